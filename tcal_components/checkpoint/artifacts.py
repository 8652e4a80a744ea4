"""The files that stages leave: safetensors with a fingerprint, and their results, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException


class WriteError(OSError):
    """A file that could not be written; the text is one line that names it."""


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Say which file could not be written, and why: a full disk raises without a name, and each library its own error.

    Args:
        path: the file or folder that is written inside.

    Raises:
        WriteError: in place of what the system, safetensors or torch raised.
    """
    try:
        yield
    except WriteError:
        raise
    except (OSError, SafetensorError, CheckpointException, RuntimeError) as error:
        reason, file = _reason(error), getattr(error, "filename2", None) or getattr(error, "filename", None)
        if reason is None or (file is not None and not Path(file).is_relative_to(Path(path).parent)):
            raise  # another file's trouble, which it names
        raise WriteError(f"cannot write {path}: {reason}") from error


def flush(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _reason(error: BaseException) -> str | None:
    """What the system said, wherever in an error it is; None for an error of another kind."""
    if isinstance(error, CheckpointException):  # of each process that failed
        return next(filter(None, (_reason(failure) for failure, _ in error.failures.values())), None)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, SafetensorError) and (number := re.search(r"os error (\d+)", str(error))):
        return os.strerror(int(number[1]))
    before = error.__cause__ or error.__context__
    return _reason(before) if before is not None else None


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], *, fingerprint: str) -> Path:
    """Write a safetensors file under a temporary name and rename it.

    Args:
        path: where it goes; the folder is made.
        tensors: by name, on any device; tensors that share memory are copied.
        fingerprint: of what they were made from, see :mod:`tcal_components.checkpoint.fingerprint`.

    Returns:
        The path.
    """
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        pointer = value.untyped_storage().data_ptr()
        ready[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return save_whole(path, ready, {"format": "pt", "fingerprint": fingerprint})


def save_whole(path: str | Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> Path:
    """A safetensors file that is there whole or not at all, with the mode of other files.

    Args:
        path: where it goes; the folder is made.
        tensors: by name, as safetensors takes them.
        metadata: of the file.

    Returns:
        The path.
    """
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes a file that its owner alone may read
        save_file(tensors, str(temporary), metadata=metadata)
        temporary.chmod(mode)
    return Path(path)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A file that is there whole or not at all, also after a power cut: written under another name, flushed, renamed.

    Args:
        path: where it goes; the folder is made.

    Yields:
        The other name, to write to.

    Raises:
        WriteError: in one line; what was there before is still there.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def result_path(output_dir: str | Path, stage: str) -> Path:
    """Where a stage's result lies: beside its other files."""
    return Path(output_dir) / stage / "result.json"


def load_result(output_dir: str | Path, stage: str) -> dict[str, Any] | None:
    """The result of a finished stage, see :meth:`tcal_components.reporting.Report.stage`.

    Args:
        output_dir: of the run.
        stage: its name.

    Returns:
        dict or None: ``made_of`` (fingerprint of its inputs), ``text`` (that of the evaluation text) and ``report`` (its
        part of the report); None where there is none.
    """
    try:
        result = json.loads(result_path(output_dir, stage).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and {"made_of", "text", "report"} <= result.keys() else None


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Tensors of a file that :func:`write_tensors` wrote, on the CPU.

    Args:
        path: the file.

    Returns:
        By name.

    Raises:
        FileNotFoundError: no such file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}")
    return load_file(str(path), device="cpu")
