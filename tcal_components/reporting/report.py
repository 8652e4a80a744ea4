"""``report.json``: one machine-readable record of a run, valid on disk after every stage.

A stage's own numbers lie in its ``result.json``, written once, when everything else of the stage is on disk. ``report.json`` is
put together from these, so a kill between two writes costs no number. The keys of schema 1 are all present from the first
write, with ``null`` where a stage has not run. Sections beside the schema (``data``, ``half_life``, ``alignment_curve``, ...)
may be added; readers ignore those they do not know.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.files import sanitize, write_json, writing
from tcal_components.config import read_json_object
from tcal_components.reporting.environment import StageClock, device_description, package_versions
from tcal_components.reporting.markdown import write_markdown
from tcal_components.reporting.plots import write_plots

SCHEMA = 1
STAGES = ("measure", "initialize", "align", "distill", "export")
# What a stage says of itself, and of its output on the evaluation text; both go when it is made anew.
NUMBERS = ("result.json", "perplexity.json")
_TABLES = ("seconds", "peak_memory_gib", "tokens_per_second")  # by stage


def load_report(path: str | Path) -> dict[str, Any]:
    """Reads a ``report.json``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no report or of another schema.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"report: no file {path}")
    data = read_json_object(path)
    schema = data.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"report: {path} has schema {schema!r}, this version reads schema {SCHEMA}")
    return data


def config_sha256(config: Any) -> str:
    """SHA-256 of the resolved config; the order of its keys does not count."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    text = json.dumps(sanitize(config), sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def empty_report() -> dict[str, Any]:
    """Every key of schema 1, with ``None`` where a stage would write."""
    return {
        "schema": SCHEMA,
        "recipe": None,
        "config_sha256": None,
        "versions": {},
        "device": None,
        "world_size": 1,
        "teacher": {"family": None, "parameters": None, "perplexity": None},
        "student": {"retained_layers": None, "converted_layers": None, "parameters": None},
        "perplexity": {"naive": None, "analytic": None, "aligned": None, "distilled": None},
        "alignment_error": {},
        "tokens": {"calibration": None, "alignment": None, "distillation": None},
        "seconds": dict.fromkeys(STAGES),
        "peak_memory_gib": dict.fromkeys(STAGES),
        "tokens_per_second": dict.fromkeys(STAGES),
        "export": {"path": None, "format": None, "max_abs_logit_diff": None, "reference_logit_max": None},
        "stages": {},
    }


def stage_result(output_dir: str | Path, stage: str, inputs: Mapping[str, Any]) -> Artifact:
    """Where a stage's result lies: beside its other files.

    Args:
        output_dir: Folder of the run.
        stage: Its name.
        inputs: What its output is made from.
    """
    return Artifact(Path(output_dir) / stage / NUMBERS[0], inputs)


class Report:
    """The record of one run, written to ``output_dir/report.json`` after every change of stage.

    Every process may hold one; only the process with ``rank == 0`` writes.

    Args:
        output_dir: Folder of the run; made if missing.
        recipe: Name of the recipe, for example ``taylor_calibrate_kd``.
        config: The resolved config (``DictConfig`` or a plain dict).
        device: Where the run computes.
        world_size: Number of processes.
        rank: This process's rank.
        results: Of the stages that need not run again, see :func:`stage_result`; those that are not current are left out.
        resume: Keep the seconds that an earlier run spent in stages that it did not finish.

    Attributes:
        data: What ``report.json`` holds.

    Example:
        >>> report = Report("out", "taylor_calibrate_kd", cfg, device="cuda")
        >>> with report.stage("align", result=stage_result("out", "align", {"align": {"steps": 8}})) as stage:
        ...     stage.add_tokens(4096)
        ...     stage.record({"perplexity": {"aligned": 17.4}})
    """

    def __init__(
        self,
        output_dir: str | Path,
        recipe: str,
        config: Any,
        *,
        device: torch.device | str = "cpu",
        world_size: int = 1,
        rank: int = 0,
        results: Iterable[Artifact] = (),
        resume: bool = False,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.path = self.output_dir / "report.json"
        self.device = torch.device(device)
        self.rank = rank
        self._clocks: dict[str, StageClock] = {}
        finished = [result.load() for result in results if result.current()]
        self._parts: dict[str, dict[str, Any]] = {result["stage"]: result["report"] for result in finished}
        if resume and self.path.is_file():
            earlier = load_report(self.path)
            for name, state in earlier["stages"].items():
                if state != "finished" and name not in self._parts:
                    spent = {table: {name: earlier[table].get(name)} for table in _TABLES}
                    self._parts[name] = {"stages": {name: state}, **spent}
        self._common: dict[str, Any] = {
            "recipe": recipe,
            "config_sha256": config_sha256(config),
            "versions": package_versions(),
            "device": device_description(self.device),
            "world_size": world_size,
        }
        self.data: dict[str, Any] = {}
        self.save()

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def update(self, values: Mapping[str, Any]) -> None:
        """Merges nested values of no stage into the report: ``update({"teacher": {"perplexity": 17.4}})`` leaves siblings."""
        _merge(self._common, sanitize(values))
        self.save()

    def replace(self, section: str, value: Any) -> None:
        """Sets a whole top-level section of no stage, dropping what was there."""
        self._common[section] = sanitize(value)
        self.save()

    def finished(self, stage: str) -> bool:
        """Whether the report says that ``stage`` has run to its end."""
        return self.data["stages"].get(stage) == "finished"

    def amend(self, stage: str, values: Mapping[str, Any]) -> None:
        """Merges values into a finished stage's part of the report, but not into its result: they lie in a file of their own.

        Args:
            stage: Its name.
            values: Nested sections of the report.
        """
        _merge(self._parts[stage], sanitize(values))
        self.save()

    @contextmanager
    def stage(
        self,
        name: str,
        *,
        result: Artifact | None = None,
        resumed: bool = False,
    ) -> Iterator[StageClock]:
        """Times a stage, and keeps the numbers that it records: in its result once it has ended well.

        What the stage makes has to be on disk before its end. The report is written when the stage begins and when it ends,
        also when it ends with an error. Numbers of this stage and of later ones, which came of its output, go first.

        Args:
            name: The stage, normally one of ``STAGES``.
            result: Where its numbers are kept, see :func:`stage_result`; None keeps none.
            resumed: The stage continues a broken run, whose seconds count.

        Yields:
            StageClock: Seconds, peak memory, tokens per second (of the tokens given to it), and its numbers.
        """
        before = self._parts.get(name, {}) if resumed else {}
        for later in STAGES[STAGES.index(name) :] if name in STAGES else (name,):
            self._parts.pop(later, None)
            for path in (self.output_dir / later / file for file in NUMBERS):
                if self.rank == 0:
                    with writing(path):
                        path.unlink(missing_ok=True)
        clock = StageClock(
            device=self.device,
            earlier_seconds=before.get("seconds", {}).get(name) or 0.0,
            earlier_peak_gib=before.get("peak_memory_gib", {}).get(name) or 0.0,
        )
        self._clocks[name] = clock
        self._parts[name] = {"stages": {name: "running"}}
        self.save()
        try:
            yield clock
        except BaseException as error:
            asked = isinstance(error, (KeyboardInterrupt, SystemExit))
            self._end(name, "interrupted" if asked else "failed")
            with suppress(OSError):  # the error itself says more, such as which file the full disk did not take
                self.save()
            raise
        self._end(name, "finished")
        if result is not None and self.rank == 0:
            result.save({"schema": SCHEMA, "stage": name, "report": self._parts[name]})
        self.save()

    def _end(self, name: str, state: str) -> None:
        self._parts[name] = {**self._measured(name), "stages": {name: state}}
        if state == "finished":
            _merge(self._parts[name], sanitize(self._clocks[name].numbers))
        del self._clocks[name]

    def _measured(self, name: str) -> dict[str, Any]:
        clock = self._clocks[name]
        seconds = clock.seconds
        speed = round(clock.tokens / seconds, 2) if clock.tokens and seconds > 0 else None
        values = (round(seconds, 3), round(clock.peak_memory_gib, 4), speed)
        return {table: {name: value} for table, value in zip(_TABLES, values)}

    def save(self) -> Path:
        """Puts the report together and writes ``report.json`` (process 0 only); running stages are brought up to date."""
        self.data = empty_report()
        running = {name: {**self._measured(name), "stages": {name: "running"}} for name in self._clocks}
        for part in (self._common, *{**self._parts, **running}.values()):
            _merge(self.data, copy.deepcopy(part))
        if self.rank == 0:
            write_json(self.path, self.data)
        return self.path

    def finish(self, opening: str = "") -> Path:
        """Writes ``report.json``, the plots and ``report.md``.

        Args:
            opening: Markdown that stands behind the title.

        Returns:
            Path: Of ``report.md``.
        """
        self.save()
        target = self.output_dir / "report.md"
        if self.rank == 0:
            write_markdown(self.data, target, plots=write_plots(self.data, self.output_dir), opening=opening)
        return target


def _merge(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
