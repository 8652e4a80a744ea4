"""How far a teacher with exchanged layers is from the teacher itself, with gradients for whatever was put in."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.measure.capture import run_hidden
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.ops.linear_kl import LinearKL

_LOSS = LinearKL()


def divergence(
    teacher: HybridDecoder,
    exchanged: AbstractContextManager[nn.Module],
    batch: Mapping[str, Any],
    *,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """KL(teacher || student) over the full vocabulary, summed over this process's tokens.

    Args:
        teacher: frozen, plain or under FSDP2.
        exchanged: makes the teacher the student, as :func:`~tcal_components.modules.conversion.converted` does.
        batch: prepared batch; without ``labels`` all tokens count.
        autocast_dtype: run both under autocast to this type.

    Returns:
        tuple: the sum in nats, with its graph where gradients are enabled, and the number of counted tokens.
    """
    tokens = batch["tokens"]
    labels = batch["labels"] if batch.get("labels") is not None else tokens
    with torch.autocast(tokens.device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None):
        with torch.no_grad():
            wanted = run_hidden(teacher, batch).flatten(0, 1)
        with exchanged:
            hidden = run_hidden(teacher, batch).flatten(0, 1)
        total, parts = _LOSS(hidden, teacher.output, wanted, teacher.output, labels.flatten())
    return total, parts["tokens"].to(total.dtype)
