"""One table for a teacher and a retained set: every start with every alignment, over seeds, and the recovery by distillation.

    tune run recipes/ablate_initialization --config configs/ablate_quickstart.yaml
    tune run recipes/ablate_initialization --config configs/ablate_smollm2.yaml

Every start of a seed sees the same text in the same order. Each finished cell is a file in ``output_dir/cells``; started
again, a run continues with the cells that are missing, and a distillation in the middle.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from tcal_components.calibration.comparison import (
    fewer_tokens,
    lower_envelope,
    mean_curve,
    summarise,
    targets,
    tokens_to_ratios,
)
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


# What tells the runs of one start's recovery apart.
GRID = ("lr", "base_lr", "tokens", "batch_size")


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """Section ``recovery``: distillation from some of the cells, each with the same grid.

    The grid is the product of ``lr``, ``base_lr``, ``tokens`` and ``batch_size``.

    Args:
        starts: ``START/ALIGNMENT`` of the cells, of the first seed.
        tokens: of a distillation, which is the length of its schedule; one number or a grid.
        batch_size: sequences a step over all processes, one number or a grid; their length is that of ``dataset``.
        micro_batch_size: sequences a forward pass of one process; None, or more than its share, takes all.
        lr: grid of peak learning rates of the converted layers.
        base_lr: grid of peak learning rates of everything else.
        warmup_steps: linear warm-up.
        eval_every_tokens: how often the perplexity is measured; also at an eighth, a quarter and a half of it.
        save_every_tokens: how often the state is saved that an interrupted run continues from; None never.
        ratios: of the teacher's perplexity, to which the tokens are counted.
        baseline: the one of ``starts`` that the tokens of the others are compared with; None takes the first.
    """

    starts: list[str]
    tokens: int | list[int]
    batch_size: int | list[int] = 8
    micro_batch_size: int | None = None
    lr: list[float] = dataclasses.field(default_factory=lambda: [1e-3])
    base_lr: list[float] = dataclasses.field(default_factory=lambda: [1e-4])
    warmup_steps: int = 10
    eval_every_tokens: int = 131_072
    save_every_tokens: int | None = None
    ratios: list[float] = dataclasses.field(default_factory=lambda: [1.5, 1.2, 1.1, 1.05])
    baseline: str | None = None


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
        recovery = self.recovery
        if recovery is None:
            return []
        grid = itertools.product(
            recovery.lr, recovery.base_lr, _as_list(recovery.tokens), _as_list(recovery.batch_size)
        )
        return [self._distill_config(**dict(zip(GRID, values))) for values in grid]

    def _distill_config(self, *, lr: float, base_lr: float, tokens: int, batch_size: int) -> DistillConfig:
        recovery, seq_len = self.recovery, self.bench.data["training"].seq_len
        assert recovery is not None
        a_step, save = batch_size * seq_len, recovery.save_every_tokens
        try:
            return DistillConfig(
                tokens=tokens,
                batch_size=batch_size,
                seq_len=seq_len,
                micro_batch_size=recovery.micro_batch_size,
                lr=float(lr),
                base_lr=float(base_lr),
                warmup_steps=recovery.warmup_steps,
                eval_every_steps=max(1, round(recovery.eval_every_tokens / a_step)),
                save_every_steps=None if save is None else max(1, round(save / a_step)),
                optimizer=self.cfg.get("optimizer"),
                seed=self.ablate.seeds[0],
            )
        except ValueError as error:  # it names the section of the main recipe
            raise ConfigError(f"recovery.{str(error).removeprefix('distill.')}") from error

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
        if recovery is None:
            return
        for name in recovery.starts:
            check_keys({name: None}, cells, "recovery.starts")
        tokens, batch_sizes = _as_list(recovery.tokens), _as_list(recovery.batch_size)
        if not (recovery.starts and recovery.lr and recovery.base_lr and tokens and batch_sizes):
            raise ConfigError("recovery needs at least one entry in each of starts, lr, base_lr, tokens and batch_size")
        for key in ("tokens", "batch_size", "eval_every_tokens", "save_every_tokens"):
            for value in _as_list(getattr(recovery, key)):
                if value is not None and value < 1:
                    raise ConfigError(f"recovery.{key} is {value}, expected at least 1")
        for batch_size in batch_sizes:
            self.bench.check_batch_size(batch_size, "recovery.batch_size")
        if recovery.baseline is not None and recovery.baseline not in recovery.starts:
            raise ConfigError(
                f"recovery.baseline is {recovery.baseline!r}, expected one of recovery.starts: {', '.join(recovery.starts)}"
            )

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
        """Distils from each start with the whole grid; the report is written after each start.

        Runs that an earlier grid left in the same folder count too, so that a grid can be refined start by start.
        """
        assert self.recovery is not None
        ratios, baseline = self.recovery.ratios, self.recovery.baseline or self.recovery.starts[0]
        found: dict[str, Any] = {}
        for name in self.recovery.starts:
            cell = cells[name]
            runs = [self.distill(cell, config) for config in self.grid]
            runs += self._earlier_runs(cell, runs)
            finished = [run for run in runs if run["finished"]] or runs
            best = min(finished, key=lambda run: run["curve"][-1]["perplexity"])
            tokens_to, fastest = tokens_to_ratios(runs, self.teacher_perplexity, ratios)
            found[name] = {
                "tokens_before": sum(cell["tokens"].values()),
                "best": best,
                "runs": runs,
                "tokens_to": tokens_to,
                "tokens_to_run": {ratio: run and {key: run[key] for key in GRID} for ratio, run in fastest.items()},
            }
            if baseline in found:
                base = found[baseline]
                spent = max(run["curve"][-1]["tokens"] for run in base["runs"])
                for start in found.values():
                    start["fewer_than"] = fewer_tokens(start["tokens_to"], base["tokens_to"], spent)
            table = {"ratios": [f"{r:g}" for r in ratios], "baseline": baseline, "starts": found}
            self.report.replace("recovery", table)
            self.report.replace("recovery_curve", {key: lower_envelope(value["runs"]) for key, value in found.items()})

    def distill(self, cell: Mapping[str, Any], config: DistillConfig) -> dict[str, Any]:
        """One distillation: read where it is there, continued where it was interrupted."""
        bench, start, alignment = self.bench, cell["start"], cell["alignment"]
        made_of = self._run_print(cell, config)
        name = f"{start}.{alignment}.{config.lr:g}.{config.base_lr:g}.{config.tokens}.{config.batch_size}"
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
        settings = {key: getattr(config, key) for key in GRID}
        bench.log(f"recovery: {start}/{alignment}, {', '.join(f'{key} {value:,}' for key, value in settings.items())}")
        student = self._student(read_tensors(self._weights_path(start, alignment)))
        spent = sum(cell["tokens"].values())
        curve = [{"tokens": spent, "perplexity": cell["perplexity"]}]
        run = {"fingerprint": made_of, **settings, "finished": True, "curve": curve}

        def evaluate(step: int) -> dict[str, float]:
            due = step == config.steps or _is_evaluated(step, config.eval_every_steps)
            return {"perplexity": bench.perplexity(student, label=f"step {step}")} if due else {}

        try:
            result = distill(
                student,
                self.teacher,
                bench.stream(bench.data["training"], config.batch_size, seed=bench.seed + 1),
                config=dataclasses.replace(config, eval_every_steps=1),  # `evaluate` chooses
                ctx=self.ctx,
                loss=torchtune_config.instantiate(self.cfg.kd_loss) if self.cfg.get("kd_loss") else None,
                on_eval=evaluate,
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

    def _run_print(self, cell: Mapping[str, Any], config: DistillConfig) -> str:
        loss = OmegaConf.to_container(self.cfg.kd_loss) if self.cfg.get("kd_loss") else None
        plain = {**dataclasses.asdict(config), "optimizer": dict(config.optimizer or {})}
        return fingerprint(cell["fingerprint"], plain, loss, self.bench.data_fingerprint("training"))

    def _earlier_runs(self, cell: Mapping[str, Any], runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Finished runs from this cell with other values of the grid, which are the same in everything else."""
        known = {run["fingerprint"] for run in runs}
        found = []
        for path in sorted((self.out / "recovery").glob(f"{cell['start']}.{cell['alignment']}.*.json")):
            run = json.loads(path.read_text(encoding="utf-8"))
            if run["fingerprint"] in known or not all(key in run for key in GRID):
                continue
            if run["fingerprint"] == self._run_print(cell, self._distill_config(**{key: run[key] for key in GRID})):
                found.append(run)
        return found

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


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _is_evaluated(step: int, every: int) -> bool:
    """Every so many steps, and thrice before: the perplexity falls fastest at the beginning."""
    return step % every == 0 or step in (every // 8, every // 4, every // 2)


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
