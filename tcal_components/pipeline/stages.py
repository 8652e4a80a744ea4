"""The bookkeeping of stages: which are finished with what the config asks for, what they left, what they report."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tcal_components.checkpoint.artifacts import load_result
from tcal_components.checkpoint.fingerprint import changes, fingerprint, plain
from tcal_components.checkpoint.run_state import RunState
from tcal_components.checkpoint.stage_files import StageFiles
from tcal_components.config.pipeline import PipelineConfig
from tcal_components.measure.statistics import StatisticsSums
from tcal_components.reporting import Report, StageClock
from tcal_components.reporting.console import stage_line
from tcal_components.setup import Workbench


class Stages:
    """What the stages of a run leave below its ``output_dir``, and what the report says of them.

    Every process calls every method together.

    Args:
        bench: of the run.
        config: its sections, complete.

    Attributes:
        inputs: what each stage's output is made from, by stage.
        text: fingerprint of the evaluation text.
        mixers: the stage whose mixers the distillation starts from.
        exports: the stage whose student is exported.
        report: there after :meth:`open_report`.

    Raises:
        ConfigError: a stage whose input neither is there nor is about to be made, or a state of other settings to resume from.
    """

    report: Report

    def __init__(self, bench: Workbench, config: PipelineConfig) -> None:
        self.bench, self.config = bench, config
        self.files = StageFiles(bench.output_dir, config.stages)
        self.mixers = self.files.mixers
        evaluation = bench.data_fingerprint("evaluation")
        self.text = fingerprint(evaluation)
        self.inputs: dict[str, dict[str, Any]] = {}
        self.files.prints = self._prints = dict[str, str]()
        before = {"initialize": "measure", "align": "initialize", "distill": self.mixers}
        for stage, values in config.inputs(bench).items():
            self._depends(stage, before.get(stage), values)
        self._prints.setdefault("distill", "")  # without its section: which no output has
        # The curve in the distillation's state has perplexities, so it is of this evaluation text.
        prints = self._prints
        self.files.states = {"align": prints["align"], "distill": fingerprint(prints["distill"], evaluation)}
        distills = "distill" in config.stages or self.files.current("distill")
        self.exports = "distill" if distills else self.mixers
        # With the evaluation text, because the model card has the perplexities.
        text = {"validation_dataset": evaluation}
        self._depends("export", self.exports, {"export": config.export.settings(), **text})
        if config.generation is not None:
            numbers = dataclasses.asdict(config.generation)
            self._depends("generate", self.exports, {"generation": numbers, **text, "seed": bench.seed})
        self.files.check()
        if config.run.resume_from_checkpoint:
            self.files.check_states()

    def _depends(self, stage: str, before: str | None, values: Mapping[str, Any]) -> None:
        """Notes what a stage's output is made from: what the stage before left, and values of the config."""
        made = {} if before is None else {before: self._prints[before]}
        assert not made.keys() & values.keys(), f"{stage} has two inputs named {before}"
        self.inputs[stage] = plain({**made, **values})
        self._prints[stage] = fingerprint(self.inputs[stage])

    def _say_what_is_outdated(self) -> None:
        """A line for each finished stage whose inputs have changed since; an outdated export says so itself too."""
        for stage, inputs in self.inputs.items():
            earlier = load_result(self.bench.output_dir, stage)
            if earlier is None or earlier["made_of"] == self._prints[stage]:
                continue
            known = earlier.get("inputs")
            why = ", ".join(changes(known, inputs)) if known else "another version of this recipe"
            if self._is_run(stage):
                self.bench.log(f"{stage}: made anew, because of {why}")
            else:
                self.bench.log(f"{stage}: what is in {self.files.path(stage)} is outdated, because of {why}")
            if stage == "export" and self.bench.ctx.is_first:
                self.files.mark_export(why)

    def _is_run(self, stage: str) -> bool:
        if stage == "generate":  # wherever there is a student
            return self.exports in self.config.stages or self.files.current(self.exports)
        return stage in self.config.stages

    def open_report(self) -> Report:
        """Says what is outdated, and begins the report with what finished stages of the same inputs have said.

        Returns:
            Report: of the run.
        """
        if self.bench.ctx.is_first:
            self.files.sweep()
        self._say_what_is_outdated()
        self.report = Report(
            self.bench.output_dir,
            "taylor_calibrate_kd",
            self.bench.container(),
            device=self.bench.ctx.device,
            world_size=self.bench.ctx.world_size,
            rank=self.bench.ctx.rank,
            results=self.files.results(),
            resume=True,
        )
        return self.report

    def skip(self, stage: str) -> bool:
        """Whether the stage can be left out, because its output and its result are there; says so."""
        done = self.report.finished(stage)
        if done:
            self.bench.log(f"{stage}: {self.files.path(stage)} is up to date, not run again")
            if stage in self.files.states:  # a kill may have come between the result and this
                self.files.state(stage).remove()
        return done

    def begin(self, stage: str) -> tuple[RunState, bool]:
        """The state of a stage that saves one; says what becomes of what is there.

        Args:
            stage: ``align`` or ``distill``.

        Returns:
            The state, and whether there is something to continue from.
        """
        state = self.files.state(stage, keep_last=self.config.run.keep_last_checkpoints)
        step = state.latest()
        resumed = (
            state.begin(self.files.states[stage], resume=self.config.run.resume_from_checkpoint) and step is not None
        )
        if resumed:
            self.bench.log(f"{stage}: continues after step {step}")
        elif step is not None:
            self.bench.log(f"{stage}: starts anew; the state after step {step} of an interrupted run is dropped")
        return state, resumed

    @contextmanager
    def running(self, stage: str, *, resumed: bool = False) -> Iterator[StageClock]:
        """The stage's entry in the report; its result is written when the block ends, so its output comes before.

        Args:
            stage: its name.
            resumed: it continues a broken run, whose seconds count.

        Yields:
            StageClock: takes tokens and numbers.
        """
        with self.report.stage(
            stage, made_of=self._prints[stage], inputs=self.inputs[stage], text=self.text, resumed=resumed
        ) as clock:
            yield clock
        self.bench.log(stage_line(self.report.data, stage))

    def of_another_text(self) -> list[str]:
        """Finished stages whose perplexities are of another evaluation text than the config's."""
        return [stage for stage, result in self.report.results.items() if result["text"] != self.text]

    def path(self, stage: str) -> Path:
        """Where a stage's output lies."""
        return self.files.path(stage)

    def read(self, stage: str) -> dict[str, Tensor]:
        """Tensors that a stage left, by name, on the CPU."""
        return self.files.read(stage)

    def write(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a stage's output whole or not at all, by the first process; the others wait."""
        if self.bench.ctx.is_first:
            self.files.write(stage, tensors)
        self.bench.ctx.barrier()

    def write_statistics(self, sums: StatisticsSums) -> None:
        """Writes what ``measure`` found, likewise.

        Args:
            sums: of all processes.
        """
        if self.bench.ctx.is_first:
            path = self.path("measure")
            path.parent.mkdir(parents=True, exist_ok=True)
            sums.finalise({"fingerprint": self.files.prints["measure"]}).save(path)
        self.bench.ctx.barrier()
