"""The bookkeeping of stages: which are finished with what the config asks for, what they left, what they report."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.files import replacing
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import ConfigError
from tcal_components.distributed.watch import shared
from tcal_components.pipeline.config import PipelineConfig
from tcal_components.reporting import Report, StageClock, stage_result
from tcal_components.reporting.console import stage_line
from tcal_components.reporting.report import NUMBERS
from tcal_components.setup import Workbench

_NAMES = {"measure": "statistics.safetensors", "distill": "student.safetensors", "export": ""}
_NAMES["generate"] = NUMBERS[0]  # which has no other output than its numbers
_OUTDATED = "> **Outdated:**"
_NEEDS = {"initialize": "measure", "align": "initialize", "distill": "initialize", "export": "initialize"}


class Stages:
    """What the stages of a run leave below its ``output_dir``, and what the report says of them.

    A stage has an output and a result, both with the same inputs: values of the config, and the fingerprint of the stage
    before. What the evaluation text says of its output is an artifact of its own, of the stage and the text.

    Every process calls every method together.

    Args:
        bench: of the run.
        config: its sections, complete.

    Attributes:
        results: by stage, where its numbers lie.
        mixers: the stage whose mixers the distillation starts from.
        exports: the stage whose student is exported.
        report: there after :meth:`open_report`.

    Raises:
        ConfigError: a stage whose input neither is there nor is about to be made, or a state of other settings to resume from.
    """

    report: Report

    def __init__(self, bench: Workbench, config: PipelineConfig) -> None:
        self.bench, self.config, self.root = bench, config, bench.output_dir
        self.results: dict[str, Artifact] = {}
        # An earlier alignment counts unless the start is made anew.
        earlier = "initialize" not in config.stages and self.path("align").is_file()
        self.mixers = "align" if "align" in config.stages or earlier else "initialize"
        self._text = {"validation_dataset": bench.data_fingerprint("evaluation")}
        before = {"initialize": "measure", "align": "initialize", "distill": self.mixers}
        for stage, values in config.inputs(bench).items():
            self._depends(stage, before.get(stage), values)
        self.exports = "distill" if "distill" in config.stages or self.current("distill") else self.mixers
        # With the evaluation text, because the model card has the perplexities.
        self._depends("export", self.exports, {"export": config.export.settings(), **self._text})
        if config.generation is not None:
            numbers = dataclasses.asdict(config.generation)
            self._depends("generate", self.exports, {"generation": numbers, **self._text, "seed": bench.seed})
        self._check()
        if config.run.resume_from_checkpoint:
            self._check_states()

    def _depends(self, stage: str, before: str | None, values: Mapping[str, Any]) -> None:
        """Notes what a stage's output is made from: what the stage before left, and values of the config."""
        made = {} if before is None else {before: self.results[before].fingerprint}
        assert not made.keys() & values.keys(), f"{stage} has two inputs named {before}"
        self.results[stage] = stage_result(self.root, stage, {**made, **values})

    # ------------------------------------------------------------------------------------------------ what is there

    def path(self, stage: str) -> Path:
        """Where a stage's output lies."""
        return self.root / stage / _NAMES.get(stage, "mixers.safetensors")

    def output(self, stage: str) -> Artifact:
        """The tensors of a stage."""
        return Artifact(self.path(stage), self.results[stage].inputs)

    def current(self, stage: str) -> bool:
        """Whether a stage has been finished with what the config asks for, and its output is still there."""
        if stage not in self.results or not self.results[stage].current():
            return False
        if stage == "export":  # the model card is the last that is written
            return (card := self._card()) is not None and not card.startswith(_OUTDATED)
        return stage == "generate" or self.output(stage).current()

    def finished(self) -> list[str]:
        """The stages that need not run again; an alignment that the later stages do not use is none of them."""
        return [name for name in self.results if (name != "align" or self.mixers == "align") and self.current(name)]

    def read(self, stage: str) -> dict[str, Tensor]:
        """Tensors that a stage left, by name, on the CPU."""
        tensors: dict[str, Tensor] = self.output(stage).load()
        return tensors

    def write(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a stage's output whole or not at all, by the first process; the others wait."""
        if self.bench.ctx.is_first:
            self.output(stage).save(tensors)
        self.bench.ctx.barrier()

    def state(self, stage: str) -> tuple[RunState, dict[str, Any]]:
        """What an interrupted stage left, and what it has to be made from to be continued."""
        state = RunState(self.root / stage / "state", keep_last=self.config.run.keep_last_checkpoints)
        # The curve in the distillation's state has perplexities, so it is of this evaluation text.
        return state, {**self.results[stage].inputs, **(self._text if stage == "distill" else {})}

    def _card(self) -> str | None:
        card = self.path("export") / "README.md"
        return card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None

    # --------------------------------------------------------------------------------------------- what may be used

    def _check(self) -> None:
        """Finds stages whose input neither exists nor is about to be made."""
        stages = self.config.stages
        for stage, before in _NEEDS.items():
            if stage in stages and before not in stages and not self.current(before):
                raise ConfigError(
                    f"stages has {stage}, but the output of {before} is not in {self.root} (or was made with other "
                    f"settings, or not to its end); add {before} to stages"
                )
        # A later output is used where it exists, so one of other settings must not be.
        for before, after in (("align", ("distill", "export")), ("distill", ("export",))):
            made_anew = {"initialize", "align", before} & set(stages)
            read = set(after) & set(stages) and not made_anew and self.path(before).is_file()
            if read and not self.current(before):
                raise ConfigError(
                    f"the output of {before} in {self.root / before} was made with other settings, or not to its end; add "
                    f"{before} to stages, or remove that folder to go on without it"
                )

    def _check_states(self) -> None:
        """Refuses to resume with other settings, which would lose what there is to resume from."""
        for stage in {"align", "distill"} & set(self.config.stages):
            state, inputs = self.state(stage)
            begun, steps = state.begun_with(inputs), state.steps()
            if steps and not begun.current() and not self.current(stage):
                why = begun.why()
                raise ConfigError(
                    f"resume_from_checkpoint is true, but {state.directory} holds step {steps[-1]} of a run with other "
                    f"settings or text{f' ({why})' if why else ''}; give it the same again, or set resume_from_checkpoint=false to "
                    "start anew"
                )

    def _say_what_is_outdated(self) -> None:
        """A line for each finished stage whose inputs have changed since; an outdated export says so itself too."""
        for stage, result in self.results.items():
            why = result.why()
            if why is None:
                continue
            if self._is_run(stage):
                self.bench.log(f"{stage}: made anew, because of {why}")
            else:
                self.bench.log(f"{stage}: what is in {self.path(stage)} is outdated, because of {why}")
            if stage == "export" and self.bench.ctx.is_first:
                self._mark_export(why)

    def _is_run(self, stage: str) -> bool:
        if stage == "generate":  # wherever there is a student
            return self.exports in self.config.stages or self.current(self.exports)
        return stage in self.config.stages

    def _mark_export(self, why: str) -> None:
        """Says at the top of the exported model card that it is not of the present config; it is made anew then."""
        card = self._card()
        if card is not None and not card.startswith(_OUTDATED):
            with replacing(self.path("export") / "README.md") as temporary:
                note = f"{_OUTDATED} this model was made before its run got other settings ({why})."
                temporary.write_text(f"{note}\n\n{card}", encoding="utf-8")

    def _sweep(self) -> None:
        """Removes what a killed run was writing."""
        for path in (*self.root.glob(".*.tmp"), *self.root.glob("*/.*.tmp")):
            path.unlink(missing_ok=True)
        for path in self.root.glob(".export.*"):
            shutil.rmtree(path, ignore_errors=True)

    # -------------------------------------------------------------------------------------------------- the report

    def open_report(self) -> Report:
        """Says what is outdated, and begins the report with what finished stages of the same inputs have said.

        Returns:
            Report: of the run.
        """
        if self.bench.ctx.is_first:
            self._sweep()
        self._say_what_is_outdated()
        self.report = Report(
            self.root,
            "taylor_calibrate_kd",
            self.bench.container(),
            device=self.bench.ctx.device,
            world_size=self.bench.ctx.world_size,
            rank=self.bench.ctx.rank,
            results=[self.results[stage] for stage in self.finished()],
            resume=True,
        )
        return self.report

    def skip(self, stage: str) -> bool:
        """Whether the stage can be left out, because its output and its result are there; says so."""
        done = self.report.finished(stage)
        if done:
            self.bench.log(f"{stage}: {self.path(stage)} is up to date, not run again")
            if stage in ("align", "distill"):  # a kill may have come between the result and this
                self.state(stage)[0].remove()
        return done

    def begin(self, stage: str) -> tuple[RunState, bool]:
        """The state of a stage that saves one; says what becomes of what is there.

        Args:
            stage: ``align`` or ``distill``.

        Returns:
            The state, and whether there is something to continue from.
        """
        state, inputs = self.state(stage)
        step = state.latest()
        resumed = state.begin(inputs, resume=self.config.run.resume_from_checkpoint) and step is not None
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
        with self.report.stage(stage, result=self.results[stage], resumed=resumed) as clock:
            yield clock
        self._amend(stage)
        self.bench.log(stage_line(self.report.data, stage))

    def evaluated(self, stage: str, find: Callable[[], Mapping[str, Any]]) -> None:
        """What the evaluation text says of a stage's output: kept with the text that it is of, or found and kept.

        Args:
            stage: its name; its output is written.
            find: gives the sections of the report, where they are not there.
        """
        kept = self._evaluation(stage)
        if not shared(kept.current()):
            found = find()
            if self.bench.ctx.is_first:
                kept.save(found)
            self.bench.ctx.barrier()
        self._amend(stage)

    def _amend(self, stage: str) -> None:
        """Brings what the evaluation text says of a finished stage into the report."""
        kept = self._evaluation(stage)
        if self.report.finished(stage) and kept.current():
            self.report.amend(stage, kept.load())

    def _evaluation(self, stage: str) -> Artifact:
        return Artifact(self.root / stage / NUMBERS[1], {stage: self.results[stage].fingerprint, **self._text})
