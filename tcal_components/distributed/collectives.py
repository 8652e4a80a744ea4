"""The few collectives of the calibration stages; with one process each returns its argument."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Processes of the default group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank in the default group, 0 without one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_sum_(tensor: Tensor) -> Tensor:
    """Sums ``tensor`` over all processes, in place, and returns it."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def all_rows(tensor: Tensor) -> Tensor:
    """Rows of all processes, one after another.

    Args:
        tensor: shape [N, ...]; N may differ between processes.

    Returns:
        Tensor: shape [sum N, ...].
    """
    if world_size() == 1:
        return tensor
    counts = [torch.zeros((), dtype=torch.int64, device=tensor.device) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor(tensor.shape[0], device=tensor.device))
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[: int(count)] for part, count in zip(parts, counts)])
