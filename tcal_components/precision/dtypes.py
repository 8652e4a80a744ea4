"""Names of float types in configs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
