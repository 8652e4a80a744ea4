"""Speed and memory of training steps at real sizes with random weights: nothing is downloaded.

    tune run recipes/benchmark_training --config configs/benchmark_qwen3_8b.yaml
    tune run --nproc_per_node 2 recipes/benchmark_training --config configs/benchmark_qwen3_8b.yaml "run=[bf16,float8]"

Measures each variant of the config with the recipes' own training loops, then the loss head by itself. Results are written
to ``output_dir/benchmark.json`` and ``benchmark.md`` after every row; a variant that does not fit becomes a row that says so.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from omegaconf import DictConfig
from torchtune import training, utils

from tcal_components.benchmark.flops import FORMULA
from tcal_components.benchmark.markdown import benchmark_markdown
from tcal_components.benchmark.training_speed import TrainingSpeed, free_memory
from tcal_components.benchmark.variants import Variant
from tcal_components.checkpoint.files import replacing
from tcal_components.checkpoint.folder_lock import lock_folder
from tcal_components.config import (
    ConfigError,
    Count,
    OneOf,
    Positive,
    Range,
    RunConfig,
    build,
    check_component,
    check_output_dir,
    check_top_level,
    command_line,
    keys_of,
    one_line_errors,
    read,
    section,
)
from tcal_components.distributed import ParallelContext
from tcal_components.distributed.environment import startup_report
from tcal_components.distributed.preemption import one_line_ending
from tcal_components.evaluation.loss_head import LossHeadConfig, measure_loss_head
from tcal_components.models.memory import count_parameters
from tcal_components.models.retained import RetainConfig, resolve_retained
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec
from tcal_components.ops.kernels import tune_kernels
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.reporting import config_sha256, device_description, package_versions, write_json
from tcal_components.reporting._format import short_number

log = utils.get_logger("INFO")


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig(RunConfig):
    """Top-level keys of this recipe.

    Args:
        dp_replicate: groups of processes that each hold a whole, sharded copy.
        peak_tflops: dense bf16 peak of one device, of which the share is reported.
        spec: numbers that replace those of ``model``.
        variants: by name, what differs from ``defaults``.
        defaults: of every variant.
        run: names of the variants to measure; None takes all.
        max_seconds: no row is begun later than this; None: no limit.
    """

    device: str = "cuda"
    dtype: Annotated[str, OneOf(("fp32", "bf16"))] = "bf16"
    dp_replicate: Count = 1
    peak_tflops: Positive = 989.0
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    variants: Annotated[dict[str, dict[str, Any] | None], Range(1)] = dataclasses.field(kw_only=True)
    defaults: dict[str, Any] = dataclasses.field(default_factory=dict)
    run: Annotated[list[str], Range(1)] | None = None
    max_seconds: Positive | None = None


_KEYS = (*keys_of(BenchmarkConfig), "model", "gdn", "retain", "loss_head")


class Benchmark:
    """The benchmark of one config.

    Args:
        cfg: see ``configs/benchmark_qwen3_8b.yaml``.

    Raises:
        ValueError: a mistake in the config, in one line.
    """

    def __init__(self, cfg: DictConfig) -> None:
        check_top_level(cfg, _KEYS)
        self.config = settings = read(BenchmarkConfig, cfg)
        self.output_dir = Path(settings.output_dir)
        check_component(cfg.get("model"), "model")
        with torch.device("meta"):
            model = build(cfg.model, "model", makes=HybridDecoder)
        spec = section(DecoderSpec, {**dataclasses.asdict(model.spec), **settings.spec}, "spec")
        retained = resolve_retained(section(RetainConfig, cfg.get("retain"), "retain"), spec.num_layers)
        self.variants = self._variants(settings)
        self.loss_head = None
        if cfg.get("loss_head") is not None:
            self.loss_head = section(LossHeadConfig, cfg.loss_head, "loss_head")
        self.ctx = ParallelContext.create(
            settings.device, dtype=parse_dtype(settings.dtype, "dtype"), dp_replicate=settings.dp_replicate
        )
        tune_kernels(settings.tune_kernels)
        gdn = GatedDeltaNetSpec.from_config(cfg.get("gdn"))
        self.speed = TrainingSpeed(
            spec, retained_layers=retained, gdn=gdn, ctx=self.ctx, peak_tflops=settings.peak_tflops
        )
        for name, variant in self.variants.items():
            self.speed.check(name, variant)
        hardware_float8 = any(
            "float8" in (v.student, v.teacher) and not v.emulate_float8 for v in self.variants.values()
        )
        found = startup_report(self.ctx, float8=hardware_float8)
        for fact in found.facts:
            self._log(fact)
        found.raise_for_problems()
        training.set_seed(seed=settings.seed)
        check_output_dir(self.output_dir)
        self._lock = lock_folder(self.output_dir) if self.ctx.is_first else None

        parameters, mixers = count_parameters(spec, retained_layers=retained, gdn=gdn)
        self.data: dict[str, Any] = {
            "schema": 1,
            "recipe": "benchmark_training",
            "command": shlex.join(sys.argv),
            "config_sha256": config_sha256(cfg),
            "versions": package_versions(),
            "device": device_description(self.ctx.device),
            "world_size": self.ctx.world_size,
            "dtype": str(self.ctx.dtype).removeprefix("torch."),
            "teacher": {**dataclasses.asdict(spec), "parameters": count_parameters(spec)[0]},
            "student": {"retained_layers": retained, "parameters": parameters, "mixer_parameters": mixers},
            "flops": {"formula": FORMULA, "peak_tflops_per_device": self.speed.peak_tflops},
            "variants": {},
            "loss_head": {},
            "seconds": 0.0,
        }

    def _variants(self, settings: BenchmarkConfig) -> dict[str, Variant]:
        given = settings.variants
        chosen = list(given) if settings.run is None else settings.run
        for name in chosen:
            if name not in given:
                raise ConfigError(f"unknown variant '{name}' in run; allowed: {', '.join(given)}")
        return {
            name: section(Variant, {**settings.defaults, **(given[name] or {})}, f"variants.{name} (with defaults)")
            for name in chosen
        }

    def _log(self, text: str) -> None:
        if self.ctx.is_first:
            log.info(text)

    def _out_of_time(self) -> bool:
        """The first process's clock decides for all."""
        limit = self.config.max_seconds
        over = self.ctx.is_first and limit is not None and time.perf_counter() - self.began > limit
        return bool(self.ctx.all_sum(torch.tensor(int(over), device=self.ctx.device)).item())

    def run(self) -> bool:
        """Measures everything.

        Returns:
            Whether every variant ran or was found not to fit.
        """
        self.began = time.perf_counter()
        good = True
        for name, variant in self.variants.items():
            if self._out_of_time():
                row: dict[str, Any] = {"status": "not run: max_seconds is over"}
            else:
                start = time.perf_counter()
                row = self._measure(name, variant)
                row["total_seconds"] = time.perf_counter() - start
            good = good and not row["status"].startswith("failed")
            self.data["variants"][name] = row
            self._write()
            self._log(f"{name}: {self._line(row)}")
        # One process is enough: the loss head is not sharded.
        if self.loss_head is not None and self.ctx.is_first:
            for kind in self.loss_head.kinds:
                self.data["loss_head"][kind] = row = self._loss_head(kind)
                self._write()
                self._log(f"loss head, {kind}: {row}")
        self.ctx.barrier()
        self._write()
        return good

    def _measure(self, name: str, variant: Variant) -> dict[str, Any]:
        try:
            return self.speed.measure(variant)
        except Exception as error:  # noqa: BLE001 - one variant's fault must not cost the results of the others
            traceback.print_exc()
            text = " ".join(str(error).split())[:300]
        free_memory(self.ctx.device)
        return {**dataclasses.asdict(variant), "status": f"failed: {text}"}

    def _loss_head(self, kind: str) -> dict[str, Any]:
        settings, spec = self.loss_head, self.speed.spec
        assert settings is not None
        sizes = {
            "tokens": settings.tokens,
            "vocab_size": settings.vocab_size or spec.vocab_size,
            "embed_dim": settings.embed_dim or spec.embed_dim,
        }
        free_memory(self.ctx.device)
        try:
            row = measure_loss_head(
                kind, **sizes, repeats=settings.repeats, dtype=self.ctx.dtype, device=self.ctx.device
            )
            row["status"] = "ok"
        except torch.OutOfMemoryError:
            row = {"status": "out of memory"}
        free_memory(self.ctx.device)
        if kind == "linear":
            above = row.get("above_weights_gib")
            row |= {"goal_gib": settings.goal_gib, "within_goal": None if above is None else above <= settings.goal_gib}
        return {**sizes, **row}

    @staticmethod
    def _line(row: Mapping[str, Any]) -> str:
        if row["status"] != "ok":
            return str(row["status"])
        text = f"{row['seconds_per_step']:.3f} s a step, {short_number(row['tokens_per_second'])} tokens/s"
        if row["peak_memory_gib"] is not None:
            text += f", {row['share_of_peak']:.1%} of the bf16 peak, {row['peak_memory_gib']:.1f} GiB"
        return text

    def _write(self) -> None:
        if not self.ctx.is_first:
            return
        self.data["seconds"] = time.perf_counter() - self.began
        write_json(self.output_dir / "benchmark.json", self.data)
        with replacing(self.output_dir / "benchmark.md") as temporary:
            temporary.write_text(benchmark_markdown(self.data), encoding="utf-8")


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        benchmark = Benchmark(cfg)
    with one_line_ending():
        good = benchmark.run()
    if benchmark.ctx.is_first:
        print(f"benchmark: {benchmark.output_dir / 'benchmark.md'}")
    if benchmark.ctx.world_size > 1:
        torch.distributed.destroy_process_group()
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(recipe_main())
