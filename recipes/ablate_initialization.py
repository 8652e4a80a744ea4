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
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig
from torch import Tensor

from tcal_components.ablation.comparison import (
    mean_curve,
    summarise,
    targets,
)
from tcal_components.ablation.recovery import Recovery, RecoveryConfig, read_cell
from tcal_components.ablation.tables import ablation_markdown, plot_ablation
from tcal_components.align.config import AlignConfig
from tcal_components.align.resumable import resumable_alignment, stored_statistics
from tcal_components.checkpoint.artifacts import load_result, replacing, write_tensors
from tcal_components.checkpoint.fingerprint import fingerprint, stored_fingerprint
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import (
    ConfigError,
    Count,
    Range,
    Seed,
    Settings,
    Steps,
    command_line,
    keys_of,
    one_line_errors,
    read,
    section,
)
from tcal_components.distributed.preemption import Stopped, one_line_ending, stop_on_signals
from tcal_components.initialize.initialize import STRATEGIES, StartConfig, initialize_mixers
from tcal_components.measure.statistics import Statistics
from tcal_components.models.memory import count_parameters
from tcal_components.reporting import Report, render_markdown, write_json, write_plots
from tcal_components.setup import Workbench


@dataclasses.dataclass(frozen=True)
class NamedStart(StartConfig):
    """One entry of ``starts``: a strategy and its numbers, under a name of its own."""

    name: str | None = None


@dataclasses.dataclass(frozen=True)
class AblateConfig(Settings):
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

    seeds: Annotated[list[Seed], Range(1, 1000)] = dataclasses.field(default_factory=lambda: [0])
    after_steps: Annotated[int, Range(0, 10**9)] = 50
    target_start: str = "naive"
    target_alignment: str | None = None
    target_steps: list[Steps] = dataclasses.field(default_factory=list)
    batch_size: Count = 8
    query_block: Count = 128


@dataclasses.dataclass(frozen=True)
class Cells(Settings):
    """The table: its starts, each a strategy or one with numbers and a name, and by name its alignments; null is none."""

    starts: Annotated[list[str | dict[str, Any]], Range(1, 1000)] = dataclasses.field(
        default_factory=lambda: list(STRATEGIES)
    )
    alignments: Annotated[dict[str, dict[str, Any] | None], Range(1, 1000)] = dataclasses.field(kw_only=True)


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
            extra_keys=(*keys_of(Cells), "ablate", "recovery"),
            extra_components=("optimizer", "kd_loss"),
        )
        self.cfg, self.ctx, self.out = bench.cfg, bench.ctx, bench.output_dir
        self.ablate = section(AblateConfig, cfg.get("ablate"), "ablate")
        cells = read(Cells, cfg)
        self.starts = self._read_starts(cells)
        self.alignments = self._read_alignments(cells)
        self._check()
        self.recovery: Recovery | None = None
        if cfg.get("recovery"):
            self.recovery = Recovery(
                section(RecoveryConfig, cfg.recovery, "recovery"),
                bench=bench,
                directory=self.out / "recovery",
                cells=[f"{start}/{alignment}" for start in self.starts for alignment in self.alignments],
                seed=self.ablate.seeds[0],
            )
        measured = load_result(self.out, "measure")
        self.report = Report(
            self.out,
            "ablate_initialization",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            results={"measure": measured} if measured and measured["made_of"] == self._measured_from() else None,
            resume=True,
        )

    def _read_starts(self, cells: Cells) -> dict[str, NamedStart]:
        found: dict[str, NamedStart] = {}
        for number, entry in enumerate(cells.starts):
            given = {"strategy": entry} if isinstance(entry, str) else entry
            start = section(NamedStart, given, f"starts[{number}]")
            name = start.name or start.strategy
            if name in found:
                raise ConfigError(f"starts has {name!r} twice; give one of them another name")
            found[_checked_name(name, "starts")] = start
        return found

    def _read_alignments(self, cells: Cells) -> dict[str, AlignConfig | None]:
        return {
            _checked_name(name, "alignments"): None
            if value is None
            else section(AlignConfig, value, f"alignments.{name}")
            for name, value in cells.alignments.items()
        }

    def _check(self) -> None:
        ablate = self.ablate
        for name, config in self.alignments.items():
            if config is not None:
                self.bench.check_batch_size(config.batch_size, f"alignments.{name}.batch_size")
                self.bench.check_batch_size(config.joint.batch_size, f"alignments.{name}.joint.batch_size")
        if ablate.target_alignment is not None:
            reference = self.alignments.get(ablate.target_alignment)
            if reference is None or ablate.target_start not in self.starts:
                raise ConfigError(
                    f"ablate.target_start {ablate.target_start!r} with target_alignment {ablate.target_alignment!r} is no "
                    f"cell with an alignment; starts: {', '.join(self.starts)}; alignments: {', '.join(self.alignments)}"
                )
            late = [step for step in ablate.target_steps if step > reference.steps]
            if late:
                raise ConfigError(
                    f"ablate.target_steps has {late[0]}, but alignments.{ablate.target_alignment} has {reference.steps} steps"
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
            self.recovery.run(
                {f"{cell['start']}/{cell['alignment']}": cell for cell in cells[::-1]},
                teacher=self.teacher,
                teacher_perplexity=self.teacher_perplexity,
                write=self._write_recovery,
            )
        self._write_report()
        bench.close()

    def _measured_from(self) -> str:
        return fingerprint(self._base_print())

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
            cell = read_cell(path, made_of)
            kept = self._kept(start, alignment, seed)
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
            self._state(start, alignment, seed).remove()  # a kill may have come between the two
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
            options=config.options,
            autocast_dtype=self.ctx.autocast_dtype,
        )
        error = {layer: float(notes["heldout_error"]) for layer, notes in found.diagnostics.items()}
        return found.weights, {**seconds, "initialize": round(time.perf_counter() - began, 3)}, error

    def statistics(self) -> Statistics:
        """The teacher's statistics, measured once for all starts that need them."""
        path, made_of = self.out / "measure" / "statistics.safetensors", self._measured_from()
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
        with self.report.stage("measure", made_of=made_of) as clock:
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
            state, name = self._state(start, alignment, seed), f"alignment {start}/{alignment}"
            with stop_on_signals() as stop:
                try:
                    result = resumable_alignment(
                        state,
                        resume=state.begin(made_of),
                        teacher=self.teacher,
                        mixers=bench.mixers(weights),
                        stream=bench.stream(text, config.batch_size, seed=seed),
                        prepare=bench.prepare,
                        heldout_batches=list(bench.calibration_batches(self.ablate.batch_size, "heldout")),
                        config=config,
                        joint_stream=bench.joint_stream(config, seed=seed + 2),
                        save_every=bench.run.save_every,
                        autocast_dtype=self.ctx.autocast_dtype,
                        should_stop=stop,
                    )
                except Stopped as stopped:
                    bench.end_early(name, stopped.step, stop)
            if bench.any_process(stop):
                bench.end_early(name, result.steps, stop)
            cell |= {"steps": result.steps, "tokens": {**tokens, "alignment": result.tokens}}
            cell["seconds"] = {"align": round(time.perf_counter() - began, 3)}
            cell["error_by_layer"] = {str(layer): value for layer, value in result.error.items()}
            if result.joint_curve:
                cell["joint_curve"] = result.joint_curve
            weights, curve = result.weights, result.curve
        cell["curve"] = mean_curve(curve)
        cell["error_last"] = sum(e["last"] for e in cell["error_by_layer"].values()) / len(cell["error_by_layer"])
        cell["perplexity"] = bench.perplexity(self.teacher, weights, f"{start}/{alignment}")
        return cell, weights

    def _state(self, start: str, alignment: str, seed: int) -> RunState:
        return RunState(self.out / "cells" / f"{start}.{alignment}.{seed}.state", keep_last=1)

    def _cell_print(self, start: str, alignment: str, seed: int) -> str:
        bench, config = self.bench, self.alignments[alignment]
        settings = dataclasses.asdict(self.starts[start])
        settings.pop("name")
        aligned = None if config is None else [dataclasses.asdict(config), bench.data_fingerprint("training")]
        texts = [bench.data_fingerprint(role) for role in ("heldout", "evaluation")]
        return fingerprint(self._base_print(), dataclasses.asdict(bench.gdn), settings, aligned, texts, seed)

    def _kept(self, start: str, alignment: str, seed: int) -> Path | None:
        """Where the weights of a cell stay, if a distillation starts from it."""
        recovery, name = self.recovery, f"{start}/{alignment}"
        if recovery is None or seed != self.ablate.seeds[0] or name not in recovery.config.starts:
            return None
        return recovery.weights_path(start, alignment)

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

    def _write_recovery(self, table: dict[str, Any], curves: dict[str, Any]) -> None:
        self.report.replace("recovery", table)
        self.report.replace("recovery_curve", curves)

    def _write_report(self) -> None:
        self.report.save()
        if not self.ctx.is_first:
            return
        data = json.loads(self.report.path.read_text(encoding="utf-8"))
        plot_ablation(data["ablation"], self.teacher_perplexity, self.out / "ablation.png")
        write_plots(data, self.out)  # recovery.png
        title, rest = render_markdown(data).split("\n", 1)
        with replacing(self.out / "report.md") as temporary:
            temporary.write_text(f"{title}\n\n{ablation_markdown(data)}{rest}", encoding="utf-8")
        self.bench.log(f"report: {self.out / 'report.md'}")


def _checked_name(name: Any, where: str) -> str:
    if not re.fullmatch(r"[\w+-]+", str(name)):
        raise ConfigError(f"{where} has the name {name!r}; allowed are letters, digits, '_', '+' and '-'")
    return str(name)


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = AblateInitialization(cfg)
    with one_line_ending():
        recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
