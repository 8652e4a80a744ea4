"""One table for a teacher and a retained set: every start with every alignment, over seeds, and the recovery by distillation.

    tune run recipes/ablate_initialization --config configs/ablate_quickstart.yaml
    tune run recipes/ablate_initialization --config configs/ablate_smollm2.yaml

Every start of a seed sees the same text in the same order. Each finished cell is a file in ``output_dir/cells``; started
again, a run continues with the cells that are missing, and a distillation in the middle.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from torch import Tensor

from tcal_components.ablation.comparison import mean_curve
from tcal_components.ablation.config import KEYS, Ablation
from tcal_components.ablation.recovery import Recovery
from tcal_components.ablation.tables import ablation_markdown, plot_ablation
from tcal_components.align.resumable import resumable_alignment
from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import command_line, one_line_errors
from tcal_components.distributed.preemption import Stopped, one_line_ending, stop_on_signals
from tcal_components.initialize.initialize import STRATEGIES, initialize_mixers
from tcal_components.measure.statistics import Statistics, stored_statistics
from tcal_components.models.memory import count_parameters
from tcal_components.reporting import Report, stage_result
from tcal_components.setup import Workbench


class AblateInitialization:
    """The recipe.

    Args:
        cfg: see ``configs/ablate_quickstart.yaml``.

    Raises:
        ValueError: a mistake in the config, before any weight is read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(self, cfg: DictConfig) -> None:
        # Processes, texts and shapes, then the table's starts and alignments, then the grids of the recovery.
        self.bench = bench = Workbench(cfg, extra_keys=KEYS, extra_components=("optimizer", "kd_loss"))
        self.ctx, self.out = bench.ctx, bench.output_dir
        self.config = config = Ablation(bench.cfg, bench)
        self.recovery: Recovery | None = None
        if config.recovery is not None:
            seed = config.ablate.seeds[0]
            where = {"directory": self.out / "recovery", "cells": config.made_from(seed)}
            self.recovery = Recovery(config.recovery, bench=bench, seed=seed, **where)

        # The statistics that an earlier run measured count if they are of the same teacher, text and layers.
        self.measured = Artifact(self.out / "measure" / "statistics.safetensors", config.measured())
        self.result = stage_result(self.out, "measure", config.measured())
        self.report = Report(
            self.out,
            "ablate_initialization",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            results=[self.result] if self.measured.current() else [],
            resume=True,
        )

    def run(self) -> None:
        """All cells, the distillations and the report."""
        bench, config = self.bench, self.config
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
        perplexity = bench.perplexity(self.teacher, label="teacher")
        self.report.update({"teacher": {"perplexity": perplexity}})

        # The table, seed by seed and start by start; it is written after each, so that an interrupted run can be read.
        cells: list[dict[str, Any]] = []
        for seed in config.ablate.seeds:
            for start in config.starts:
                cells += self.cells(start, seed)
                self.report.replace("ablation", config.section(cells))

        # Distillation from some of the cells of the first seed, each over its grid.
        if self.recovery is not None:
            starts = {f"{cell['start']}/{cell['alignment']}": cell for cell in cells[::-1]}
            for sections in self.recovery.run(starts, teacher=self.teacher, teacher_perplexity=perplexity):
                for name, section in sections.items():
                    self.report.replace(name, section)

        if self.ctx.is_first:
            plot_ablation(self.report["ablation"], perplexity, self.out / "ablation.png")
        bench.log(f"report: {self.report.finish(ablation_markdown(self.report.data))}")
        bench.close()

    # ------------------------------------------------------------------------------------------- starts and alignments

    def cells(self, start: str, seed: int) -> list[dict[str, Any]]:
        """The cells of one start and seed: read where they are there, made where not."""
        found: list[dict[str, Any]] = []
        made: tuple[dict[str, Tensor], dict[str, float], dict[int, float]] | None = None
        made_from = self.config.made_from(seed)
        # The weights of a cell stay where a distillation starts from them.
        distilled = self.recovery.weights if self.recovery and seed == self.config.ablate.seeds[0] else {}
        for alignment in self.config.alignments:
            inputs, kept = made_from[f"{start}/{alignment}"], distilled.get(f"{start}/{alignment}")
            cell = Artifact(self.out / "cells" / f"{start}.{alignment}.{seed}.json", inputs)
            state = RunState(cell.path.with_suffix(".state"), keep_last=1)
            if not cell.current() or (kept is not None and not kept.current()):
                # Every alignment of a start begins at the same weights.
                made = made or self.initialize(start, seed)
                weights, seconds, error = made
                why = cell.why()
                self.bench.log(
                    f"cell: start {start}, alignment {alignment}, seed {seed}{f', made anew because of {why}' if why else ''}"
                )
                values, aligned = self.align(start, alignment, seed, weights, error, state, inputs)
                values["seconds"] = {**seconds, **values["seconds"]}
                if self.ctx.is_first:
                    if kept is not None:
                        kept.save(aligned)
                    cell.save(values)
            state.remove()  # a kill may have come between the two; it waits until the cell is there for all processes
            found.append(cell.load())
        return found

    def initialize(self, start: str, seed: int) -> tuple[dict[str, Tensor], dict[str, float], dict[int, float]]:
        """Weights of a start, the seconds that they took by stage, and the held-out error by layer."""
        bench, config, size = self.bench, self.config.starts[start], self.config.ablate.batch_size
        needs = STRATEGIES[config.strategy].needs_statistics
        statistics = self.statistics() if needs else None
        seconds, began = {"measure": self.report["seconds"]["measure"]} if needs else {}, time.perf_counter()
        found = initialize_mixers(
            config.strategy,
            teacher=self.teacher,
            layers=bench.converted,
            gdn_spec=bench.gdn,
            statistics=statistics,
            batches=bench.calibration_batches(size) if needs else [],
            heldout_batches=list(bench.calibration_batches(size, "heldout")),
            seed=seed,
            options=config.options,
            autocast_dtype=self.ctx.autocast_dtype,
        )
        error = {layer: float(notes["heldout_error"]) for layer, notes in found.diagnostics.items()}
        return found.weights, {**seconds, "initialize": round(time.perf_counter() - began, 3)}, error

    def statistics(self) -> Statistics:
        """The teacher's statistics, measured once for all starts that need them."""
        if self.report.finished("measure"):
            return Statistics.load(self.measured.path)
        with self.report.stage("measure", result=self.result) as clock:
            found = stored_statistics(
                self.measured,
                teacher=self.teacher,
                layers=self.bench.converted,
                batches=lambda: self.bench.calibration_batches(self.config.ablate.batch_size),
                query_block=self.config.ablate.query_block,
                ctx=self.ctx,
            )
            clock.add_tokens(self.bench.data["calibration"].num_tokens)
        return found

    def align(
        self,
        start: str,
        alignment: str,
        seed: int,
        weights: Mapping[str, Tensor],
        error: Mapping[int, float],
        state: RunState,
        inputs: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
        """One cell, and its mixers' weights."""
        bench, config = self.bench, self.config.alignments[alignment]
        uses_text = STRATEGIES[self.config.starts[start].strategy].needs_statistics
        tokens = {"calibration": bench.data["calibration"].num_tokens if uses_text else 0, "alignment": 0}
        cell: dict[str, Any] = {"start": start, "alignment": alignment, "seed": seed, "steps": 0}
        cell |= {"tokens": tokens, "seconds": {}}
        if config is None:
            # The start as it is.
            cell["error_by_layer"] = {str(layer): {"first": value, "last": value} for layer, value in error.items()}
            curve = [{"step": 0, "error": dict(error)}]
        else:
            # Every start of a seed sees the same text in the same order; a signal saves the state and ends the run.
            began, name = time.perf_counter(), f"alignment {start}/{alignment}"
            text = bench.training_data(config.seq_len, config.text_tokens)
            with stop_on_signals() as stop:
                try:
                    result = resumable_alignment(
                        state,
                        resume=state.begin(inputs),
                        teacher=self.teacher,
                        mixers=bench.mixers(weights),
                        stream=bench.stream(text, config.batch_size, seed=seed),
                        prepare=bench.prepare,
                        heldout_batches=list(bench.calibration_batches(self.config.ablate.batch_size, "heldout")),
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
        # How good it is: per layer on held-out text, and as a whole model on the evaluation text.
        cell["curve"] = mean_curve(curve)
        cell["error_last"] = sum(e["last"] for e in cell["error_by_layer"].values()) / len(cell["error_by_layer"])
        cell["perplexity"] = bench.perplexity(self.teacher, weights, f"{start}/{alignment}")
        return cell, weights


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = AblateInitialization(cfg)
    with one_line_ending():
        recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
