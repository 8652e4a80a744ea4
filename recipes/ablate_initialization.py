"""One table for a teacher and a retained set: every start with every alignment, over seeds, and the recovery by distillation.

    tune run recipes/ablate_initialization --config configs/ablate_quickstart.yaml
    tune run recipes/ablate_initialization --config configs/ablate_smollm2.yaml

Every start of a seed sees the same text in the same order. Each finished cell is a file in ``output_dir/cells``; started
again, a run continues with the cells that are missing, and a distillation in the middle.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torchtune import config as torchtune_config
from torchtune import training

from tcal_components.calibration.alignment import AlignConfig
from tcal_components.calibration.comparison import mean_curve, summarise, targets, tokens_to_ratios
from tcal_components.calibration.initialize import STRATEGIES, InitializeOptions, initialize_mixers
from tcal_components.calibration.resumable import resumable_alignment, stored_statistics
from tcal_components.calibration.statistics import Statistics
from tcal_components.checkpoint.artifacts import read_tensors, write_tensors
from tcal_components.checkpoint.fingerprint import fingerprint, stored_fingerprint
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import ConfigError, check_keys, one_line_errors, section
from tcal_components.distillation import DistillConfig, NonFiniteLossError, distill
from tcal_components.distributed import load_full_state_dict, parallelize, to_storage_dtype
from tcal_components.models.memory import count_parameters
from tcal_components.modules.conversion import student_state_dict
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.reporting import Report, render_markdown, write_json, write_plots
from tcal_components.reporting.ablation import ablation_markdown, plot_ablation
from tcal_components.workbench import Workbench


@dataclasses.dataclass(frozen=True)
class StartConfig(InitializeOptions):
    """One entry of ``starts``: a strategy and its numbers, under a name of its own."""

    strategy: str = "taylor"
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class AblateConfig:
    """Section ``ablate``.

    Args:
        seeds: of the mixers' random parts and of the order of the text.
        after_steps: the table shows the alignment error after so many steps.
        target_start: the start whose errors the others are to reach.
        target_alignment: under which alignment; None leaves the columns out.
        target_steps: after how many of its steps.
        batch_size: sequences a forward pass over the calibration text.
        query_block: queries a block while the teacher is measured.
    """

    seeds: list[int] = dataclasses.field(default_factory=lambda: [0])
    after_steps: int = 50
    target_start: str = "naive"
    target_alignment: str | None = None
    target_steps: list[int] = dataclasses.field(default_factory=list)
    batch_size: int = 8
    query_block: int = 128


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """Section ``recovery``: distillation from some of the cells, with the same grid of learning rates for each.

    Args:
        starts: ``START/ALIGNMENT`` of the cells, of the first seed.
        tokens: of each distillation.
        batch_size: sequences a step over all processes; their length is that of ``dataset``.
        micro_batch_size: sequences a forward pass of one process; None takes all.
        lr: grid of peak learning rates of the converted layers.
        base_lr: grid of peak learning rates of everything else.
        warmup_steps: linear warm-up.
        eval_every_steps: how often the perplexity is measured.
        save_every_steps: how often the state is saved that an interrupted run continues from.
        ratios: of the teacher's perplexity, to which the tokens are counted.
    """

    starts: list[str]
    tokens: int
    batch_size: int = 8
    micro_batch_size: int | None = None
    lr: list[float] = dataclasses.field(default_factory=lambda: [1e-3])
    base_lr: list[float] = dataclasses.field(default_factory=lambda: [1e-4])
    warmup_steps: int = 10
    eval_every_steps: int = 10
    save_every_steps: int | None = None
    ratios: list[float] = dataclasses.field(default_factory=lambda: [1.5, 1.2, 1.1, 1.05])


class AblateInitialization:
    """The recipe.

    Args:
        cfg: see ``configs/ablate_quickstart.yaml``.

    Raises:
        ValueError: a mistake in the config, before any weight is read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self.bench = bench = Workbench(
            cfg,
            extra_keys=("ablate", "starts", "alignments", "recovery", "save_every"),
            extra_components=("optimizer", "kd_loss"),
        )
        self.cfg, self.ctx, self.out = bench.cfg, bench.ctx, bench.output_dir
        self.ablate = section(AblateConfig, cfg.get("ablate"), "ablate")
        self.starts = self._read_starts()
        self.alignments = self._read_alignments()
        self.recovery = section(RecoveryConfig, cfg.recovery, "recovery") if cfg.get("recovery") else None
        self._check()
        self.grid = self._read_grid()
        self.report = Report(
            self.out,
            "ablate_initialization",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            resume=True,
        )

    def _read_starts(self) -> dict[str, StartConfig]:
        found: dict[str, StartConfig] = {}
        for number, entry in enumerate(self.cfg.get("starts") or list(STRATEGIES)):
            given = {"strategy": entry} if isinstance(entry, str) else entry
            start = section(StartConfig, given, f"starts[{number}]")
            if start.strategy not in STRATEGIES:
                raise ConfigError(f"starts[{number}] has strategy {start.strategy!r}; allowed: {', '.join(STRATEGIES)}")
            name = start.name or start.strategy
            if name in found:
                raise ConfigError(f"starts has {name!r} twice; give one of them another name")
            found[_checked_name(name, "starts")] = start
        return found

    def _read_alignments(self) -> dict[str, AlignConfig | None]:
        given = self.cfg.get("alignments")
        if not isinstance(given, DictConfig) or not given:
            raise ConfigError("alignments is empty, expected names with settings such as {none: null, ours: ${align}}")
        return {
            _checked_name(name, "alignments"): None
            if value is None
            else section(AlignConfig, value, f"alignments.{name}")
            for name, value in given.items()
        }

    def _read_grid(self) -> list[DistillConfig]:
        if self.recovery is None:
            return []
        settings = dataclasses.asdict(self.recovery)
        rest = {key: value for key, value in settings.items() if key not in ("starts", "ratios", "lr", "base_lr")}
        return [
            DistillConfig(
                lr=float(lr),
                base_lr=float(base_lr),
                seq_len=self.bench.data["training"].seq_len,
                optimizer=self.cfg.get("optimizer"),
                seed=self.ablate.seeds[0],
                **rest,
            )
            for lr in self.recovery.lr
            for base_lr in self.recovery.base_lr
        ]

    def _check(self) -> None:
        ablate, recovery = self.ablate, self.recovery
        if not ablate.seeds or any(not isinstance(seed, int) or seed < 0 for seed in ablate.seeds):
            raise ConfigError(f"ablate.seeds is {ablate.seeds}, expected a list of numbers from 0")
        if ablate.target_alignment is not None:
            reference = self.alignments.get(ablate.target_alignment)
            if reference is None or ablate.target_start not in self.starts:
                raise ConfigError(
                    f"ablate.target_start {ablate.target_start!r} with target_alignment {ablate.target_alignment!r} is no "
                    f"cell with an alignment; starts: {', '.join(self.starts)}; alignments: {', '.join(self.alignments)}"
                )
            late = [step for step in ablate.target_steps if not 0 < step <= reference.steps]
            if late:
                raise ConfigError(
                    f"ablate.target_steps has {late[0]}, but alignments.{ablate.target_alignment} has {reference.steps} steps"
                )
        cells = [f"{start}/{alignment}" for start in self.starts for alignment in self.alignments]
        for name in recovery.starts if recovery else ():
            check_keys({name: None}, cells, "recovery.starts")
        if recovery and not (recovery.starts and recovery.lr and recovery.base_lr):
            raise ConfigError("recovery needs at least one entry in each of starts, lr and base_lr")

    # ------------------------------------------------------------------------------------------------------------- run

    def run(self) -> None:
        """All cells, the distillations and the report."""
        bench = self.bench
        with one_line_errors():  # a damaged checkpoint is the user's matter
            self.teacher = bench.load_teacher()
        total, mixers = count_parameters(bench.spec, retained_layers=bench.retained, gdn=bench.gdn)
        self.report.update(
            {
                "teacher": {"family": bench.spec.family, "parameters": count_parameters(bench.spec)[0]},
                "student": {
                    "retained_layers": list(bench.retained),
                    "converted_layers": list(bench.converted),
                    "parameters": total,
                    "mixer_parameters": mixers,
                },
                "data": bench.provenance(),
            }
        )
        for part in ("ablation", "recovery", "recovery_curve"):
            self.report.replace(part, {})  # of an earlier run, perhaps with other settings
        self.teacher_perplexity = bench.perplexity(self.teacher, label="teacher")
        self.report.update({"teacher": {"perplexity": self.teacher_perplexity}})
        cells: list[dict[str, Any]] = []
        for seed in self.ablate.seeds:
            for start in self.starts:
                cells += self.cells(start, seed)
                self._write_ablation(cells)
        if self.recovery is not None:
            self.recover({f"{cell['start']}/{cell['alignment']}": cell for cell in cells[::-1]})
        self._write_report()

    def _base_print(self) -> list[Any]:
        bench = self.bench
        return [bench.teacher_fingerprint, bench.data_fingerprint("calibration"), str(self.ctx.dtype), bench.converted]

    # ------------------------------------------------------------------------------------------- starts and alignments

    def cells(self, start: str, seed: int) -> list[dict[str, Any]]:
        """The cells of one start and seed: read where they are there, made where not."""
        found: list[dict[str, Any]] = []
        made: tuple[dict[str, Tensor], dict[str, float], dict[int, float]] | None = None
        for alignment in self.alignments:
            path, made_of = (
                self.out / "cells" / f"{start}.{alignment}.{seed}.json",
                self._cell_print(start, alignment, seed),
            )
            cell = _read_cell(path, made_of)
            kept = self._weights_path(start, alignment) if self._is_recovered(start, alignment, seed) else None
            if cell is None or (kept is not None and stored_fingerprint(kept) != made_of):
                made = made or self.initialize(start, seed)
                weights, seconds, error = made
                self.bench.log(f"cell: start {start}, alignment {alignment}, seed {seed}")
                cell, aligned = self.align(start, alignment, seed, weights, error, made_of)
                cell["seconds"] = {**seconds, **cell["seconds"]}
                if kept is not None and self.ctx.is_first:
                    write_tensors(kept, aligned, fingerprint=made_of)
                if self.ctx.is_first:
                    write_json(path, cell)
                self.ctx.barrier()
            found.append(cell)
        return found

    def initialize(self, start: str, seed: int) -> tuple[dict[str, Tensor], dict[str, float], dict[int, float]]:
        """Weights of a start, the seconds that they took by stage, and the held-out error by layer."""
        bench, config = self.bench, self.starts[start]
        needs = STRATEGIES[config.strategy].needs_statistics
        statistics = self.statistics() if needs else None
        seconds, began = {"measure": self.report["seconds"]["measure"]} if needs else {}, time.perf_counter()
        found = initialize_mixers(
            config.strategy,
            teacher=self.teacher,
            layers=bench.converted,
            gdn_spec=bench.gdn,
            statistics=statistics,
            batches=bench.calibration_batches(self.ablate.batch_size) if needs else [],
            heldout_batches=list(bench.calibration_batches(self.ablate.batch_size, "heldout")),
            seed=seed,
            options=InitializeOptions(
                **{field.name: getattr(config, field.name) for field in dataclasses.fields(InitializeOptions)}
            ),
            autocast_dtype=self.ctx.autocast_dtype,
        )
        error = {layer: float(notes["heldout_error"]) for layer, notes in found.diagnostics.items()}
        return found.weights, {**seconds, "initialize": round(time.perf_counter() - began, 3)}, error

    def statistics(self) -> Statistics:
        """The teacher's statistics, measured once for all starts that need them."""
        path, made_of = self.out / "measure" / "statistics.safetensors", fingerprint(self._base_print())
        arguments = {
            "teacher": self.teacher,
            "layers": self.bench.converted,
            "batches": lambda: self.bench.calibration_batches(self.ablate.batch_size),
            "query_block": self.ablate.query_block,
            "ctx": self.ctx,
            "autocast_dtype": self.ctx.autocast_dtype,
        }
        if path.is_file() and self.report.finished("measure"):
            return stored_statistics(path, fingerprint=made_of, **arguments)
        with self.report.stage("measure") as clock:
            found = stored_statistics(path, fingerprint=made_of, **arguments)
            clock.add_tokens(self.bench.data["calibration"].num_tokens)
        return found

    def align(
        self,
        start: str,
        alignment: str,
        seed: int,
        weights: Mapping[str, Tensor],
        error: Mapping[int, float],
        made_of: str,
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """One cell, and its mixers' weights."""
        bench, config = self.bench, self.alignments[alignment]
        uses_text = STRATEGIES[self.starts[start].strategy].needs_statistics
        tokens = {"calibration": bench.data["calibration"].num_tokens if uses_text else 0, "alignment": 0}
        cell: dict[str, Any] = {
            "fingerprint": made_of,
            "start": start,
            "alignment": alignment,
            "seed": seed,
            "steps": 0,
        }
        cell |= {"tokens": tokens, "seconds": {}}
        if config is None:
            cell["error_by_layer"] = {str(layer): {"first": value, "last": value} for layer, value in error.items()}
            curve = [{"step": 0, "error": dict(error)}]
        else:
            began = time.perf_counter()
            text = bench.training_data(config.seq_len, config.text_tokens)
            result = resumable_alignment(
                self.out / "cells" / f"{start}.{alignment}.{seed}.state",
                fingerprint=made_of,
                teacher=self.teacher,
                mixers=bench.mixers(weights),
                stream=bench.stream(text, config.batch_size, seed=seed),
                prepare=bench.prepare,
                heldout_batches=list(bench.calibration_batches(self.ablate.batch_size, "heldout")),
                config=config,
                save_every=int(self.cfg.get("save_every", 100)),
                keep_last=1,
                autocast_dtype=self.ctx.autocast_dtype,
            )
            cell |= {"steps": result.steps, "tokens": {**tokens, "alignment": result.tokens}}
            cell["seconds"] = {"align": round(time.perf_counter() - began, 3)}
            cell["error_by_layer"] = {str(layer): value for layer, value in result.error.items()}
            weights, curve = result.weights, result.curve
        cell["curve"] = mean_curve(curve)
        cell["error_last"] = sum(e["last"] for e in cell["error_by_layer"].values()) / len(cell["error_by_layer"])
        cell["perplexity"] = bench.perplexity(self.teacher, weights, f"{start}/{alignment}")
        return cell, weights

    def _cell_print(self, start: str, alignment: str, seed: int) -> str:
        bench, config = self.bench, self.alignments[alignment]
        settings = dataclasses.asdict(self.starts[start])
        settings.pop("name")
        aligned = None if config is None else [dataclasses.asdict(config), bench.data_fingerprint("training")]
        texts = [bench.data_fingerprint(role) for role in ("heldout", "evaluation")]
        return fingerprint(self._base_print(), dataclasses.asdict(bench.gdn), settings, aligned, texts, seed)

    def _is_recovered(self, start: str, alignment: str, seed: int) -> bool:
        return (
            self.recovery is not None
            and seed == self.ablate.seeds[0]
            and f"{start}/{alignment}" in self.recovery.starts
        )

    def _weights_path(self, start: str, alignment: str) -> Path:
        return self.out / "recovery" / f"{start}.{alignment}.safetensors"

    # -------------------------------------------------------------------------------------------------------- recovery

    def recover(self, cells: Mapping[str, Mapping[str, Any]]) -> None:
        """Distils from each start with each pair of learning rates; the report is written after each start."""
        assert self.recovery is not None
        found: dict[str, Any] = {}
        for name in self.recovery.starts:
            cell = cells[name]
            runs = [self.distill(cell, config) for config in self.grid]
            finished = [run for run in runs if run["finished"]] or runs
            best = min(finished, key=lambda run: run["curve"][-1]["perplexity"])
            found[name] = {
                "tokens_before": sum(cell["tokens"].values()),
                "best": best,
                "runs": runs,
                "tokens_to": tokens_to_ratios(runs, self.teacher_perplexity, self.recovery.ratios),
            }
            self.report.replace("recovery", {"ratios": [f"{r:g}" for r in self.recovery.ratios], "starts": found})
            self.report.replace("recovery_curve", {key: value["best"]["curve"] for key, value in found.items()})

    def distill(self, cell: Mapping[str, Any], config: DistillConfig) -> dict[str, Any]:
        """One distillation: read where it is there, continued where it was interrupted."""
        bench, start, alignment = self.bench, cell["start"], cell["alignment"]
        loss = OmegaConf.to_container(self.cfg.kd_loss) if self.cfg.get("kd_loss") else None
        plain = {**dataclasses.asdict(config), "optimizer": dict(config.optimizer or {})}
        made_of = fingerprint(cell["fingerprint"], plain, loss, bench.data_fingerprint("training"))
        name = f"{start}.{alignment}.{config.lr:g}.{config.base_lr:g}"
        path, state = (
            self.out / "recovery" / f"{name}.json",
            RunState(self.out / "recovery" / f"{name}.state", keep_last=1),
        )
        run = _read_cell(path, made_of)
        if run is not None:
            return run
        marker = state.directory / "fingerprint.txt"
        resume = marker.is_file() and marker.read_text() == made_of
        self.ctx.barrier()
        if not resume:
            state.clear()
            if self.ctx.is_first:
                state.directory.mkdir(parents=True, exist_ok=True)
                marker.write_text(made_of)
        bench.log(f"recovery: {start}/{alignment}, lr {config.lr:g}, base_lr {config.base_lr:g}")
        student = self._student(read_tensors(self._weights_path(start, alignment)))
        spent = sum(cell["tokens"].values())
        curve = [{"tokens": spent, "perplexity": cell["perplexity"]}]
        run = {"fingerprint": made_of, "lr": config.lr, "base_lr": config.base_lr, "finished": True, "curve": curve}
        try:
            result = distill(
                student,
                self.teacher,
                bench.stream(bench.data["training"], config.batch_size, seed=bench.seed + 1),
                config=config,
                ctx=self.ctx,
                loss=torchtune_config.instantiate(self.cfg.kd_loss) if loss else None,
                on_eval=lambda step: {"perplexity": bench.perplexity(student, label=f"step {step}")},
                run_state=state,
                resume=resume,
                progress=self.ctx.is_first,
            )
        except NonFiniteLossError as error:  # a learning rate of the grid was too high
            bench.log(f"recovery: {start}/{alignment} diverged: {error}")
            run |= {"finished": False, "note": str(error)}
        else:
            rows = [row for row in result.curve if "perplexity" in row]
            curve += [{"tokens": spent + int(row["tokens"]), "perplexity": row["perplexity"]} for row in rows]
            run["seconds"] = round(result.seconds, 3)
        if self.ctx.is_first:
            write_json(path, run)
            shutil.rmtree(state.directory)
        self.ctx.barrier()
        return run

    def _student(self, mixers: Mapping[str, Tensor]) -> HybridDecoder:
        """The hybrid with these mixers, float32, ready to train."""
        weights: dict[str, Tensor] = {}
        if self.ctx.is_first:
            weights = student_state_dict(self.bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY], mixers)
        with torch.device("meta"):
            student = torchtune_config.instantiate(self.cfg.model, retained_layers=list(self.bench.retained))
        to_storage_dtype(student, torch.float32)
        student = parallelize(student, ctx=self.ctx)
        load_full_state_dict(student, weights, ctx=self.ctx)
        return student

    # ---------------------------------------------------------------------------------------------------------- report

    def _write_ablation(self, cells: list[dict[str, Any]]) -> None:
        """The table so far, so that an interrupted run can be read."""
        ablate = self.ablate
        reference = {"start": ablate.target_start, "alignment": ablate.target_alignment or ""}
        goals = targets(cells, steps=ablate.target_steps, **reference)
        table = {
            "seeds": ablate.seeds,
            "after_steps": ablate.after_steps,
            "target_start": ablate.target_start,
            "target_alignment": ablate.target_alignment,
            "target_steps": ablate.target_steps if ablate.target_alignment else [],
            "targets": goals,
            "starts": {name: dataclasses.asdict(start) for name, start in self.starts.items()},
            "alignments": {name: config and dataclasses.asdict(config) for name, config in self.alignments.items()},
            "rows": summarise(cells, goals, after=ablate.after_steps),
            "cells": cells,
        }
        self.report.replace("ablation", table)

    def _write_report(self) -> None:
        self.report.save()
        if not self.ctx.is_first:
            return
        data = json.loads(self.report.path.read_text(encoding="utf-8"))
        plot_ablation(data["ablation"], self.teacher_perplexity, self.out / "ablation.png")
        write_plots(data, self.out)  # recovery.png
        title, rest = render_markdown(data).split("\n", 1)
        (self.out / "report.md").write_text(f"{title}\n\n{ablation_markdown(data)}{rest}", encoding="utf-8")
        self.bench.log(f"report: {self.out / 'report.md'}")


def _checked_name(name: Any, where: str) -> str:
    if not re.fullmatch(r"[\w+-]+", str(name)):
        raise ConfigError(f"{where} has the name {name!r}; allowed are letters, digits, '_', '+' and '-'")
    return str(name)


def _read_cell(path: Path, made_of: str) -> dict[str, Any] | None:
    """A finished cell, if it was made from the same inputs."""
    if not path.is_file():
        return None
    cell = json.loads(path.read_text(encoding="utf-8"))
    return cell if cell.get("fingerprint") == made_of else None


@torchtune_config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = AblateInitialization(cfg)
    recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
