"""Ranks a teacher's layers by how much they need their attention, and writes the set that a config includes.

    tune run recipes/select_layers --config configs/select_layers.yaml
    tune run recipes/select_layers --config configs/select_layers.yaml "select.policy=[ablation,single_keep]"

Each policy writes ``output_dir/POLICY.json``, which ``retain: {policy: file, path: ..., num_layers: N}`` of the other
recipes reads. Only the text of ``calibration_dataset`` is used. An interrupted run continues where it stopped when it is
started again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from torch import nn
from torchtune import config as torchtune_config

from tcal_components.calibration.initialize import STRATEGIES, StartConfig, initialize_mixers
from tcal_components.calibration.layer_optimizer import AlignConfig
from tcal_components.calibration.policies import (
    POLICIES,
    Ranking,
    rank_by_ablation,
    rank_by_alignment_error,
    rank_by_kl,
    rank_by_single_keep,
    rank_uniform,
)
from tcal_components.calibration.resumable import resumable_alignment, stored_statistics
from tcal_components.calibration.scoring import ScoreFile, Scorer
from tcal_components.checkpoint.artifacts import read_tensors, write_tensors
from tcal_components.checkpoint.fingerprint import fingerprint, stored_fingerprint
from tcal_components.config import ConfigError, one_line_errors, scalar, section
from tcal_components.data.roles import recut
from tcal_components.evaluation.perplexity import evaluation_batches
from tcal_components.models.memory import count_parameters
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.reporting import Report, render_markdown, write_json, write_plots
from tcal_components.reporting.selection import selection_markdown
from tcal_components.workbench import Workbench


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """Section ``select``.

    Args:
        policy: one of ``POLICIES``, or a list of them.
        num_layers: layers that keep attention.
        mixers: what stands in for attention while ``single_keep`` and ``kl_guided`` measure: mixers as ``initialize``
            makes them, or ``align`` after ``align.steps`` steps.
        batch_size: sequences a forward pass over all processes.
    """

    num_layers: int
    policy: str | list[str] = "kl_guided"
    mixers: str = "align"
    batch_size: int = 8

    @property
    def policies(self) -> list[str]:
        """The policies as a list."""
        return [self.policy] if isinstance(self.policy, str) else list(self.policy)


@dataclasses.dataclass(frozen=True)
class MeasuredStart(StartConfig):
    """Section ``initialize``: a strategy of the table, its numbers, and queries a block while the teacher is measured."""

    query_block: int = 128


class SelectLayers:
    """The recipe.

    Args:
        cfg: see ``configs/select_layers.yaml``; a section ``retain`` is not read, because every layer is looked at.

    Raises:
        ValueError: a mistake in the config, before any weight is read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(self, cfg: DictConfig) -> None:
        cfg.retain = {"layers": []}  # every layer gets a mixer
        self.bench = bench = Workbench(cfg, extra_keys=("select", "initialize", "save_every"))
        self.cfg, self.ctx, self.out = cfg, bench.ctx, bench.output_dir
        self.select = section(SelectConfig, cfg.get("select"), "select")
        self.start = section(MeasuredStart, cfg.get("initialize"), "initialize")
        self.align_config = section(AlignConfig, cfg.get("align"), "align")
        self.save_every = scalar(cfg, "save_every", int, 100, least=1)
        self._check()
        self.report = Report(
            self.out,
            "select_layers",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            resume=True,
        )
        self._teacher: HybridDecoder | None = None

    def _check(self) -> None:
        total, select = self.bench.spec.num_layers, self.select
        for name in select.policies:
            if name not in POLICIES:
                raise ConfigError(f"select.policy has {name!r}; allowed: {', '.join(POLICIES)}")
        if not select.policies:
            raise ConfigError(f"select.policy is empty; allowed: {', '.join(POLICIES)}")
        if not 0 <= select.num_layers <= total:
            raise ConfigError(f"select.num_layers is {select.num_layers}, but the teacher has {total} layers")
        if select.mixers not in ("initialize", "align"):
            raise ConfigError(f"select.mixers is {select.mixers!r}; allowed: initialize, align")
        if self.start.strategy not in STRATEGIES:
            raise ConfigError(f"initialize.strategy is {self.start.strategy!r}; allowed: {', '.join(STRATEGIES)}")
        if "alignment_error" in select.policies and self.align_config.steps < 1:
            raise ConfigError("select.policy alignment_error needs an alignment, but align.steps is 0")
        counts = {"select.batch_size": select.batch_size, "initialize.query_block": self.start.query_block}
        for key, value in counts.items():
            if value < 1:
                raise ConfigError(f"{key} is {value}, expected at least 1")
        if self._aligns:
            self.bench.check_batch_size(self.align_config.batch_size, "align.batch_size")
            seq_len, tokens = self.align_config.seq_len, self.bench.data["calibration"].num_tokens
            if seq_len > tokens:
                raise ConfigError(
                    f"align.seq_len is {seq_len}, expected at most the {tokens} tokens of calibration_dataset"
                )

    @property
    def _aligns(self) -> bool:
        """Whether a policy needs aligned mixers."""
        policies = [POLICIES[name] for name in self.select.policies]
        return any(policy.alignment or (policy.mixers and self.select.mixers == "align") for policy in policies)

    @property
    def teacher(self) -> HybridDecoder:
        """The teacher, read when it is first needed."""
        if self._teacher is None:
            with one_line_errors():  # a damaged checkpoint is the user's matter
                self._teacher = self.bench.load_teacher()
        return self._teacher

    def run(self) -> None:
        """All policies, their files and the report."""
        bench, select = self.bench, self.select
        self.report.update(
            {
                "teacher": {"family": bench.spec.family, "parameters": count_parameters(bench.spec)[0]},
                "data": bench.provenance(),
            }
        )
        self.report.replace("selection", {})  # of an earlier run, perhaps with other settings
        mixers = None
        if any(POLICIES[name].mixers for name in select.policies):
            mixers = self.initialize()
            if self._aligns:
                mixers = self.align(mixers)
        for name in select.policies:
            self.write(name, *self.rank(name, mixers))
        if self.ctx.is_first:
            self._write_report()

    # ------------------------------------------------------------------------------------- mixers in place of attention

    def initialize(self) -> nn.ModuleDict:
        """A mixer for every layer, in closed form; returns them with these weights."""
        bench, path = self.bench, self.out / "initialize" / "mixers.safetensors"
        text = [bench.teacher_fingerprint, bench.data_fingerprint("calibration"), str(self.ctx.dtype)]
        self.initialized = fingerprint(
            text,
            dataclasses.asdict(bench.gdn),
            dataclasses.asdict(self.start),
            bench.data_fingerprint("heldout"),
            bench.seed,
        )
        if not (stored_fingerprint(path) == self.initialized and self.report.finished("initialize")):
            with self.report.stage("initialize") as clock:
                statistics = stored_statistics(
                    self.out / "measure" / "statistics.safetensors",
                    fingerprint=fingerprint(text),
                    teacher=self.teacher,
                    layers=bench.converted,
                    batches=lambda: bench.calibration_batches(self.select.batch_size),
                    query_block=self.start.query_block,
                    ctx=self.ctx,
                    autocast_dtype=self.ctx.autocast_dtype,
                )
                found = initialize_mixers(
                    self.start.strategy,
                    teacher=self.teacher,
                    layers=bench.converted,
                    gdn_spec=bench.gdn,
                    statistics=statistics,
                    batches=bench.calibration_batches(self.select.batch_size),
                    heldout_batches=list(bench.calibration_batches(self.select.batch_size, "heldout")),
                    seed=bench.seed,
                    options=self.start.options,
                    autocast_dtype=self.ctx.autocast_dtype,
                )
                if self.ctx.is_first:
                    write_tensors(path, found.weights, fingerprint=self.initialized)
                self.ctx.barrier()
                clock.add_tokens(bench.data["calibration"].num_tokens)
            self.report.update({"tokens": {"calibration": bench.data["calibration"].num_tokens}})
        self.mixers_from = self.initialized
        return bench.mixers(read_tensors(path))

    def align(self, mixers: nn.ModuleDict) -> nn.ModuleDict:
        """Each mixer towards the attention of its layer; returns them with the aligned weights."""
        bench, config, path = self.bench, self.align_config, self.out / "align" / "mixers.safetensors"
        aligned = fingerprint(self.initialized, dataclasses.asdict(config))
        if not (stored_fingerprint(path) == aligned and self.report.finished("align")):
            # Cut to another length it must not run into the text that layers are scored on.
            tokens = min(config.text_tokens, bench.data["calibration"].num_tokens)
            text = recut(self.cfg.calibration_dataset, bench.tokenizer, seq_len=config.seq_len, max_tokens=tokens)
            with self.report.stage("align") as clock:
                result = resumable_alignment(
                    self.out / "align" / "state",
                    fingerprint=aligned,
                    teacher=self.teacher,
                    mixers=mixers,
                    stream=bench.stream(text, config.batch_size, seed=bench.seed),
                    prepare=bench.prepare,
                    heldout_batches=list(bench.calibration_batches(config.batch_size, "heldout")),
                    config=config,
                    save_every=self.save_every,
                    autocast_dtype=self.ctx.autocast_dtype,
                )
                if self.ctx.is_first:
                    write_tensors(path, result.weights, fingerprint=aligned)
                self.ctx.barrier()
                clock.add_tokens(result.tokens)
            self.report.replace("alignment_error", {str(layer): error for layer, error in result.error.items()})
            self.report.replace("alignment_curve", result.curve)
            self.report.update({"tokens": {"alignment": result.tokens}})
        if self.select.mixers == "align":
            self.mixers_from = aligned
            return bench.mixers(read_tensors(path))
        return bench.mixers(read_tensors(self.out / "initialize" / "mixers.safetensors"))

    # ---------------------------------------------------------------------------------------------------------- ranking

    def rank(self, policy: str, mixers: nn.ModuleDict | None) -> tuple[Ranking, float, dict[str, int]]:
        """A policy's ranking with the seconds and the tokens, by their use, that it cost."""
        bench, select = self.bench, self.select
        if policy == "uniform":
            return rank_uniform(bench.spec.num_layers, select.num_layers), 0.0, {}
        seconds, tokens = 0.0, {}
        if POLICIES[policy].mixers:
            used = ["initialize", "align"] if POLICIES[policy].alignment or select.mixers == "align" else ["initialize"]
            seconds = sum(self.report["seconds"][stage] or 0.0 for stage in used)
            tokens = {"calibration": self.report["tokens"]["calibration"]}
            tokens |= {"alignment": self.report["tokens"]["alignment"]} if "align" in used else {}
        if policy == "alignment_error":
            errors = {int(layer): error["last"] for layer, error in self.report["alignment_error"].items()}
            return rank_by_alignment_error(errors), seconds, tokens

        made_of = self.mixers_from if POLICIES[policy].mixers else bench.teacher_fingerprint
        made_of = fingerprint(made_of, bench.data_fingerprint("heldout"), str(self.ctx.dtype), policy)
        scores = ScoreFile(self.out / "scores" / f"{policy}.json", fingerprint=made_of)
        self.ctx.barrier()  # all processes have read the file before the first one writes to it
        batches = evaluation_batches(
            bench.data["heldout"], batch_size=select.batch_size, rank=self.ctx.rank, world_size=self.ctx.world_size
        )
        scorer = Scorer(self.teacher, batches, autocast_dtype=self.ctx.autocast_dtype)
        if policy == "ablation":
            ranking = rank_by_ablation(scorer, bench.spec.num_layers, scores)
        else:
            assert mixers is not None
            mixers.requires_grad_(False)
            if policy == "single_keep":
                ranking = rank_by_single_keep(scorer, mixers, scores)
            else:
                ranking = rank_by_kl(scorer, mixers, select.num_layers, scores)
        return ranking, seconds + scores.seconds, {**tokens, "scored": scorer.tokens * len(scores.values)}

    def path(self, policy: str) -> Path:
        """The file of a policy."""
        return self.out / f"{policy}.json"

    def write(self, policy: str, ranking: Ranking, seconds: float, tokens: Mapping[str, int]) -> None:
        """The file that ``retain: {policy: file}`` reads."""
        retained = sorted(ranking.layers[: self.select.num_layers])
        content: dict[str, Any] = {
            "policy": policy,
            "ranking": list(ranking.layers),
            "retained_layers": retained,
            "num_layers": self.select.num_layers,
            "total_layers": self.bench.spec.num_layers,
            "scores": {str(layer): score for layer, score in sorted(ranking.scores.items())},
            "score": POLICIES[policy].summary,
            "seconds": round(seconds, 3),
            "tokens": sum(tokens.values()),
            "tokens_by_use": dict(tokens),
            "details": ranking.details,
            "teacher": str(self.bench.teacher_checkpointer.checkpoint_dir),
            "config": self.bench.container(),
        }
        if self.ctx.is_first:
            write_json(self.path(policy), content)
        summary = {key: content[key] for key in ("ranking", "retained_layers", "scores", "seconds", "tokens")}
        self.report.update({"selection": {policy: summary}})
        self.bench.log(f"{policy}: layers {retained} keep attention; {self.path(policy)}")

    def _write_report(self) -> None:
        selections = {name: self.report["selection"][name] for name in self.select.policies}
        text = render_markdown(self.report.data, plots=write_plots(self.report.data, self.out))
        title, rest = text.split("\n", 1)
        (self.out / "report.md").write_text(f"{title}\n\n{selection_markdown(selections)}{rest}", encoding="utf-8")
        self.bench.log(f"report: {self.out / 'report.md'}")


@torchtune_config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = SelectLayers(cfg)
    recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
