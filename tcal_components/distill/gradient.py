"""The gradient of a step: its norm, and what becomes of one that is not a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class NonFiniteLossError(FloatingPointError):
    """The loss or its gradient is not a number; no weight was changed by it."""


def clip_gradient_(parameters: Sequence[nn.Parameter], largest: float | None) -> float:
    """Scales the gradients in place so that their common norm is at most ``largest``.

    Args:
        parameters: with gradients or without, plain or sharded by FSDP2.
        largest: norm; None leaves the gradients as they are.

    Returns:
        float: their norm before, over all parameters and processes.
    """
    # By itself torch takes its multi-tensor kernels for plain tensors only: two launches a parameter under FSDP2.
    foreach = True if all(p.device.type == "cuda" for p in parameters) else None
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm, foreach=foreach)
    return float(norm)
