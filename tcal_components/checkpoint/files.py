"""Files that are there whole or not at all, and which of them could not be written."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
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
    text = json.dumps(sanitize(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
