"""``report.json``: one machine-readable record of a run, valid on disk after every stage.

The keys of schema 1 are all present from the first write, with ``null`` where a stage has not run. Sections beside the
schema (``data``, ``half_life``, ``alignment_curve``, ...) may be added; readers ignore those they do not know.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from tcal_components.reporting.environment import StageClock, device_description, package_versions
from tcal_components.reporting.markdown import write_markdown
from tcal_components.reporting.plots import write_plots

SCHEMA = 1
STAGES = ("measure", "initialize", "align", "distill", "export")

# What each stage owns, as paths into the report: cleared when the stage starts afresh, so no number outlives its cause.
_OWNED_BY_STAGE: dict[str, tuple[tuple[str, ...], ...]] = {
    "measure": (("tokens", "calibration"),),
    "initialize": (
        ("perplexity", "naive"),
        ("perplexity", "analytic"),
        ("initialization",),
        ("half_life",),
        ("gates",),
    ),
    "align": (("perplexity", "aligned"), ("alignment_error",), ("tokens", "alignment"), ("alignment_curve",)),
    "distill": (("perplexity", "distilled"), ("tokens", "distillation"), ("recovery_curve",)),
    "export": (("export",),),
}


def sanitize(value: Any) -> Any:
    """Plain JSON values: tensors and numpy scalars become numbers or lists, NaN and infinities become ``None``."""
    if isinstance(value, torch.Tensor):
        return sanitize(value.detach().cpu().tolist())
    if isinstance(value, Mapping):
        return {str(key): sanitize(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (set, frozenset)):
        return [sanitize(item) for item in sorted(value)]
    if isinstance(value, Sequence):
        return [sanitize(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (Path, torch.dtype, torch.device)):
        return str(value)
    if hasattr(value, "tolist"):  # numpy arrays and scalars, without importing numpy
        return sanitize(value.tolist())
    raise TypeError(f"a report holds numbers, strings, lists and dicts, not {type(value).__name__}")


def write_json(path: str | Path, data: Mapping[str, Any]) -> None:
    """Writes JSON so that a kill at any moment leaves either the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = json.dumps(sanitize(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_report(path: str | Path) -> dict[str, Any]:
    """Reads a ``report.json``.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no report or of another schema.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"report: no file {path}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"report: {path} is not JSON ({error})") from error
    schema = data.get("schema") if isinstance(data, dict) else None
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
        resume: Keep what an existing report says about stages that have run. ``False`` starts an empty report.

    Example:
        >>> report = Report("out", "taylor_calibrate_kd", cfg, device="cuda")
        >>> with report.stage("align") as clock:
        ...     clock.add_tokens(4096)
        >>> report.update({"perplexity": {"aligned": 17.4}})
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
        resume: bool = False,
    ) -> None:
        self.output_dir = Path(output_dir)
        self.path = self.output_dir / "report.json"
        self.device = torch.device(device)
        self.rank = rank
        self.data = empty_report()
        self._clocks: dict[str, StageClock] = {}
        if resume and self.path.is_file():
            _merge(self.data, load_report(self.path))
        self.data.update(
            recipe=recipe,
            config_sha256=config_sha256(config),
            versions=package_versions(),
            device=device_description(self.device),
            world_size=world_size,
        )
        self.save()

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def update(self, values: Mapping[str, Any], *, save: bool = True) -> None:
        """Merges nested values into the report: ``update({"perplexity": {"aligned": 17.4}})`` leaves its siblings."""
        _merge(self.data, sanitize(values))
        if save:
            self.save()

    def replace(self, section: str, value: Any) -> None:
        """Sets a whole top-level section, dropping what was there."""
        self.data[section] = sanitize(value)
        self.save()

    def finished(self, stage: str) -> bool:
        """Whether the report says that ``stage`` has run to its end."""
        return self.data["stages"].get(stage) == "finished"

    def forget(self, stage: str) -> None:
        """Clears the numbers of ``stage`` and of those after it, which came of its output."""
        for name in STAGES[STAGES.index(stage) :] if stage in STAGES else (stage,):
            for table in ("seconds", "peak_memory_gib", "tokens_per_second"):
                self.data[table][name] = None
            self.data["stages"].pop(name, None)
            for owner in _OWNED_BY_STAGE.get(name, ()):
                if len(owner) == 2:
                    self.data[owner[0]][owner[1]] = None
                elif owner[0] in (empty := empty_report()):
                    self.data[owner[0]] = empty[owner[0]]
                else:
                    self.data.pop(owner[0], None)

    @contextmanager
    def stage(self, name: str, *, resumed: bool = False) -> Iterator[StageClock]:
        """Times a stage: seconds, peak memory, tokens per second (of the tokens given to the clock).

        The report is written when the stage begins and when it ends, also when it ends with an error.

        Args:
            name: The stage, normally one of ``STAGES``.
            resumed: The stage continues a broken run: seconds of before are added to, numbers are kept. Otherwise the
                numbers of this stage and of later ones are cleared first.
        """
        if not resumed:
            self.forget(name)
        clock = StageClock(device=self.device, earlier_seconds=self.data["seconds"].get(name) or 0.0)
        self._clocks[name] = clock
        self.data["stages"][name] = "running"
        self.save()
        try:
            yield clock
        except BaseException as error:
            self._record(name, clock)
            asked = isinstance(error, (KeyboardInterrupt, SystemExit))
            self.data["stages"][name] = "interrupted" if asked else "failed"
            raise
        else:
            self._record(name, clock)
            self.data["stages"][name] = "finished"
        finally:
            del self._clocks[name]
            self.save()

    def _record(self, name: str, clock: StageClock) -> None:
        seconds = clock.seconds
        self.data["seconds"][name] = round(seconds, 3)
        before = self.data["peak_memory_gib"].get(name) or 0.0  # of the part before an interruption
        self.data["peak_memory_gib"][name] = round(max(before, clock.peak_memory_gib), 4)
        if clock.tokens and seconds > 0:
            self.data["tokens_per_second"][name] = round(clock.tokens / seconds, 2)

    def save(self) -> Path:
        """Writes ``report.json`` (process 0 only); running stages are brought up to date first."""
        for name, clock in self._clocks.items():
            self._record(name, clock)
        if self.rank == 0:
            write_json(self.path, self.data)
        return self.path

    def finish(self, *, plots: bool = True) -> Path:
        """Writes ``report.json``, the plots and ``report.md``; returns the path of ``report.md``."""
        self.save()
        target = self.output_dir / "report.md"
        if self.rank == 0:
            write_markdown(self.data, target, plots=write_plots(self.data, self.output_dir) if plots else [])
        return target


def _merge(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
