"""The files that the stages of a run hand to one another, and whether they are what the present config asks for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tcal_components.checkpoint.artifacts import load_result, read_tensors, replacing, write_tensors
from tcal_components.checkpoint.fingerprint import stored_fingerprint
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import ConfigError

_NAMES = {"measure": "statistics.safetensors", "distill": "student.safetensors", "export": ""}
_NAMES["generate"] = "result.json"  # which has no other output than its numbers
_OUTDATED = "> **Outdated:**"
_NEEDS = {"initialize": "measure", "align": "initialize", "distill": "initialize", "export": "initialize"}


class StageFiles:
    """Outputs and results of the stages below one folder.

    Args:
        root: ``output_dir`` of the run.
        stages: those that the config asks for.

    Attributes:
        prints: what each stage's output is made from, by stage; set once it is known, before anything is asked.
        states: likewise what the state is made from that an interrupted stage continues from.
    """

    def __init__(self, root: Path, stages: Sequence[str]) -> None:
        self.root, self.stages = root, tuple(stages)
        self.prints: Mapping[str, str] = {}
        self.states: Mapping[str, str] = {}

    def path(self, stage: str) -> Path:
        """Where a stage's output lies."""
        return self.root / stage / _NAMES.get(stage, "mixers.safetensors")

    def result(self, stage: str) -> dict[str, Any] | None:
        """What a finished stage reported, if it was made from what the config asks for and its output is still there."""
        result = load_result(self.root, stage)
        if result is None or result["made_of"] != self.prints[stage]:
            return None
        if stage == "generate":
            return result
        if stage == "export":  # the model card is the last that is written
            card = self.path(stage) / "README.md"
            return (
                result
                if card.is_file() and not card.read_text(encoding="utf-8", errors="replace").startswith(_OUTDATED)
                else None
            )
        return result if stored_fingerprint(self.path(stage)) == self.prints[stage] else None

    def current(self, stage: str) -> bool:
        """Whether a stage has been finished with what the config asks for."""
        return self.result(stage) is not None

    def results(self) -> dict[str, dict[str, Any]]:
        """By stage, what the finished ones reported; an alignment that the later stages do not use is none of them."""
        found = {stage: self.result(stage) for stage in self.prints if stage != "align" or self.uses_alignment}
        return {stage: result for stage, result in found.items() if result is not None}

    def mark_export(self, why: str) -> None:
        """Says at the top of the exported folder's model card that it is not of the present config; it is made anew then.

        Args:
            why: what has changed.
        """
        card = self.path("export") / "README.md"
        if card.is_file() and not (text := card.read_text(encoding="utf-8", errors="replace")).startswith(_OUTDATED):
            with replacing(card) as temporary:
                temporary.write_text(
                    f"{_OUTDATED} this model was made before its run got other settings ({why}).\n\n{text}",
                    encoding="utf-8",
                )

    def read(self, stage: str) -> dict[str, Tensor]:
        """A stage's output."""
        return read_tensors(self.path(stage))

    def write(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes a stage's output whole or not at all."""
        write_tensors(self.path(stage), tensors, fingerprint=self.prints[stage])

    def state(self, stage: str, *, keep_last: int = 2) -> RunState:
        """What an interrupted stage left."""
        return RunState(self.root / stage / "state", keep_last=keep_last)

    @property
    def uses_alignment(self) -> bool:
        """Whether later stages start from the aligned mixers: an earlier alignment counts unless the start is made anew."""
        return "align" in self.stages or ("initialize" not in self.stages and self.path("align").is_file())

    @property
    def mixers(self) -> str:
        """The stage whose mixers ``distill`` and ``export`` start from."""
        return "align" if self.uses_alignment else "initialize"

    def check(self) -> None:
        """Finds stages whose input neither exists nor is about to be made.

        Raises:
            ConfigError: in one line.
        """
        for stage, before in _NEEDS.items():
            if stage in self.stages and before not in self.stages and not self.current(before):
                raise ConfigError(
                    f"stages has {stage}, but the output of {before} is not in {self.root} (or was made with other "
                    f"settings, or not to its end); add {before} to stages"
                )
        # A later output is used where it exists, so one of other settings must not be.
        for before, after in (("align", ("distill", "export")), ("distill", ("export",))):
            made_anew = {"initialize", "align", before} & set(self.stages)
            read = set(after) & set(self.stages) and not made_anew and self.path(before).is_file()
            if read and not self.current(before):
                raise ConfigError(
                    f"the output of {before} in {self.root / before} was made with other settings, or not to its end; add "
                    f"{before} to stages, or remove that folder to go on without it"
                )

    def check_states(self) -> None:
        """Whoever asks to resume with other settings would lose what there is to resume from.

        Raises:
            ConfigError: in one line.
        """
        for stage, made_of in self.states.items():
            state = self.state(stage)
            steps, unfinished = state.steps(), stage in self.stages and not self.current(stage)
            if steps and unfinished and state.made_of() != made_of:
                raise ConfigError(
                    f"resume_from_checkpoint is true, but {state.directory} holds step {steps[-1]} of a run with other "
                    "settings or text; give it the same again, or set resume_from_checkpoint=false to start anew"
                )

    def sweep(self) -> None:
        """Removes what a killed run was writing."""
        for path in (*self.root.glob(".*.tmp"), *self.root.glob("*/.*.tmp")):
            path.unlink(missing_ok=True)
        for path in self.root.glob(".export.*"):
            shutil.rmtree(path, ignore_errors=True)
