"""The state of a running stage: sharded checkpoints that a kill cannot damage and any number of processes can continue.

A checkpoint is written by ``torch.distributed.checkpoint`` to a hidden name, flushed to the disk, and renamed. A name that is
listed is therefore complete, whenever the process was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.files import flush, writing
from tcal_components.distributed.watch import barrier, is_first, patient_group, shared

_NAME = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
_SEAL = "complete.json"
_INPUTS = "inputs.json"
_WRITING = ".writing-"
_DROPPED = ".dropped-"


class RunState:
    """Checkpoints of one stage in one folder; every process of the run calls every method together.

    Args:
        directory: folder that all processes see; made if missing.
        keep_last: complete checkpoints to keep; each holds weights and optimizer state.

    Raises:
        ValueError: if ``keep_last`` is below 1.
    """

    def __init__(self, directory: str | Path, *, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last_checkpoints is {keep_last}, expected at least 1")
        self.directory = Path(directory)
        self.keep_last = keep_last

    def begin(self, inputs: Mapping[str, Any], *, resume: bool = True) -> bool:
        """Start a stage, or continue it: checkpoints that were made from other inputs are forgotten.

        Args:
            inputs: all that the state depends on, as for :class:`~tcal_components.checkpoint.artifact.Artifact`.
            resume: False forgets those of the same inputs too.

        Returns:
            bool: whether the stage was begun with the same inputs, as the first process sees it.
        """
        marker = self.begun_with(inputs)
        same = shared(resume and marker.current())
        if not same:
            self.clear()
            if is_first():
                marker.save({})
            barrier()
        return same

    def begun_with(self, inputs: Mapping[str, Any]) -> Artifact:
        """Says whether the stage was begun with these inputs, and which of them have changed since."""
        return Artifact(self.directory / _INPUTS, inputs)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted({step for step, _ in self._complete()})

    def latest(self) -> int | None:
        """The last step with a complete checkpoint, as the first process sees it; None if there is none."""
        return shared(max(self.steps(), default=None))

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint, then drop those beyond ``keep_last``.

        Args:
            step: optimizer steps done.
            state: nested mappings of tensors; plain tensors are equal in all processes, DTensors are stored by shard.
            extra: small values that JSON can hold, such as counters and curves; the first process's are kept.

        Returns:
            The checkpoint's folder.

        Raises:
            TypeError: if ``extra`` holds something JSON cannot, before anything is written.
            WriteError: in one line; earlier checkpoints are still there.
        """
        text = json.dumps({} if extra is None else dict(extra))
        with writing(self.directory):
            return self._save(step, _unwrap(state), text)

    def _save(self, step: int, state: dict[str, Tensor], text: str) -> Path:
        hidden = self.directory / f"{_WRITING}step-{step:08d}"
        if is_first():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._sweep()
            hidden.mkdir()
        barrier()
        with _quiet():
            dcp.save(state, storage_writer=dcp.FileSystemWriter(hidden), **_processes())
        final = self._free_name(step)  # before the barrier, so that every process computes the same
        barrier()
        if is_first():
            files = {path.name: path.stat().st_size for path in hidden.iterdir()}
            _write_flushed(hidden / _SEAL, json.dumps({"step": step, "files": files, "extra": json.loads(text)}))
            flush(hidden)
            hidden.rename(final)
            flush(self.directory)
            for _, path in self._complete()[: -self.keep_last]:
                path.rename(self.directory / f"{_DROPPED}{path.name}")  # never listed half deleted
            self._sweep()
        barrier()
        return final

    def load(self, state: Mapping[str, Any], step: int | None = None) -> tuple[int, dict[str, Any]]:
        """Fill tensors in place from a checkpoint, whatever number of processes wrote it.

        Args:
            state: nested mappings of tensors of the stored names and shapes; DTensors receive their own shard.
            step: which checkpoint; None takes the latest.

        Returns:
            The step and ``extra`` as they were saved.

        Raises:
            FileNotFoundError: if there is no such checkpoint.
            ValueError: if names or shapes differ from what was saved.
        """
        step = self.latest() if step is None else step
        paths = [path for found, path in self._complete() if found == step]
        if not paths:
            raise FileNotFoundError(
                f"no complete checkpoint {'' if step is None else f'of step {step} '}in {self.directory}; "
                f"steps found: {self.steps() or 'none'}"
            )
        path = paths[-1]
        reader = dcp.FileSystemReader(path)
        target = _unwrap(state)
        wanted = {name: tuple(tensor.shape) for name, tensor in _leaves(target)}
        entries = reader.read_metadata().state_dict_metadata
        stored = {
            name: tuple(entry.size) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
        }
        for name in wanted.keys() | stored.keys():
            if wanted.get(name) != stored.get(name):
                raise ValueError(
                    f"checkpoint {path} does not fit this run: {name} is {stored.get(name, 'missing')} there and "
                    f"{wanted.get(name, 'missing')} here; use another output_dir or the config that wrote it"
                )
        with _quiet():
            dcp.load(target, storage_reader=reader, **_processes())
        return int(step or 0), json.loads((path / _SEAL).read_text())["extra"]

    def keep(self, steps: Collection[int | None]) -> None:
        """Forget the checkpoints of all other steps."""
        if is_first() and self.directory.is_dir():
            for step, path in self._complete():
                if step not in steps:
                    path.rename(self.directory / f"{_DROPPED}{path.name}")
            self._sweep()
        barrier()

    def clear(self) -> None:
        """Forget all checkpoints: a run with other settings starts anew."""
        if is_first() and self.directory.is_dir():
            for _, path in self._complete():
                path.rename(self.directory / f"{_DROPPED}{path.name}")
            self._sweep()
        barrier()

    def remove(self) -> None:
        """Forget all checkpoints and remove the folder: the stage has ended."""
        self.clear()
        if is_first():
            shutil.rmtree(self.directory, ignore_errors=True)
        barrier()

    def _complete(self) -> list[tuple[int, Path]]:
        """(step, folder) of complete checkpoints, oldest first; a step that was saved again comes twice."""
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            match = _NAME.fullmatch(path.name)
            if match and _sealed(path):
                found.append((int(match[1]), int(match[2] or 0), path))
        return [(step, path) for step, _, path in sorted(found)]

    def _free_name(self, step: int) -> Path:
        """A name nobody has: replacing a folder is no atomic operation, so the same step gets a suffix."""
        taken = {path.name for path in self.directory.iterdir()}
        name, suffix = f"step-{step:08d}", 0
        while name in taken:
            suffix += 1
            name = f"step-{step:08d}.{suffix}"
        return self.directory / name

    def _sweep(self) -> None:
        """Remove what a killed process left half written or half deleted."""
        for path in self.directory.iterdir():
            if path.name.startswith((_WRITING, _DROPPED)):
                shutil.rmtree(path, ignore_errors=True)


def _leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _unwrap(state: Mapping[str, Any]) -> dict[str, Any]:
    """One flat level of detached tensors: names stay what they are, and no tensor drags its graph along."""
    flat = {}
    for name, value in _leaves(state):
        assert isinstance(value, Tensor), f"run state '{name}' is {type(value).__name__}, expected a tensor"
        flat[name] = value.detach()
    return flat


def _sealed(path: Path) -> bool:
    try:
        files = json.loads((path / _SEAL).read_text())["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _write_flushed(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's advice on running in one process, which ``no_dist=True`` already says is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _processes() -> dict[str, Any]:
    """Who reads and writes together; a disk may be slower for one than for the others."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return {"process_group": patient_group()} if several else {"no_dist": True}
