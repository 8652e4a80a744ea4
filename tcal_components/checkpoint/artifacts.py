"""The files that stages hand to one another: safetensors with a fingerprint, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


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
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes a file that its owner alone may read
        save_file(tensors, str(temporary), metadata=metadata)
        temporary.chmod(mode)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


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


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity: one pass without a mask of its size.

    Args:
        tensor: of a float type, not empty.

    Returns:
        bool: NaN and infinity show at the ends, and so does a NaN between them.
    """
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
