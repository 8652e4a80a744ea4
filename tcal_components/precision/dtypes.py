"""Float types: their names in configs, and values that they cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def parse_dtype(name: str, where: str, *, allowed: Sequence[str] = ("fp32", "bf16")) -> torch.dtype:
    """A torch dtype from its name in a config.

    Args:
        name: one of ``allowed``.
        where: the key, for messages.
        allowed: of ``fp32``, ``bf16``, ``fp16`` and ``fp64``.

    Returns:
        The dtype.

    Raises:
        ValueError: another name.
    """
    if name not in allowed:
        raise ValueError(f"{where} is {name!r}; allowed: {', '.join(allowed)}")
    return _DTYPES[name]


def refuse_overflow(tensor: Tensor, dtype: torch.dtype, what: str) -> None:
    """Refuses a tensor with values outside the range of the type that it is about to be stored in.

    Args:
        tensor: of any type; a type whose range is no smaller needs no look at its values.
        dtype: the type to be.
        what: names the tensor in the message.

    Raises:
        ValueError: in one line.
    """
    floats = tensor.is_floating_point() and dtype.is_floating_point
    if floats and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max and not is_finite(tensor.to(dtype)):
        raise ValueError(f"{what} overflows when converted to {dtype} (it is stored as {tensor.dtype})")


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity: one pass without a mask of its size.

    Args:
        tensor: of a float type, not empty.

    Returns:
        bool: NaN and infinity show at the ends, and so does a NaN between them.
    """
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
