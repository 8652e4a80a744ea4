"""Whole state dicts into sharded models and out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from tcal_components.distributed.parallel import ParallelContext, materialize, reshard
from tcal_components.distributed.watch import barrier
from tcal_components.precision.dtypes import refuse_overflow


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor], *, ctx: ParallelContext, cpu_offload: bool = False
) -> None:
    """Give a model its weights; every process calls it, only the first one's ``state_dict`` is read.

    Args:
        model: as ``parallelize`` returned it, on the meta device or with storage. Storage keeps its dtype.
        state_dict: full tensors, anywhere; the other processes may pass an empty one.
        ctx: the processes.
        cpu_offload: as given to ``parallelize``.

    Raises:
        RuntimeError: for missing, unknown or misshapen weights.
        ValueError: for a weight outside the range of the model's dtype.
    """
    barrier()  # the first process has been reading the weights
    reshard(model)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        # Not assigned but copied into: assigning loses float8's wrapped weights and the parameters' requires_grad.
        materialize(model, ctx=ctx, cpu_offload=cpu_offload)
    full: dict[str, Any] = dict(state_dict) if ctx.is_first else {}
    kept_as = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for name, tensor in full.items():
        refuse_overflow(tensor, kept_as.get(name, tensor.dtype), name)  # copying would make infinities
    if ctx.mesh is None:
        model.load_state_dict(full, strict=True)
        return
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def gather_full_state_dict(model: nn.Module, *, ctx: ParallelContext) -> dict[str, Tensor]:
    """The full weights on the CPU, one tensor at a time over the GPU; every process calls it.

    Args:
        model: sharded or not.
        ctx: the processes.

    Returns:
        Copies of all weights in the first process, nothing in the others.
    """
    reshard(model)
    if ctx.mesh is None:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    full: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return full
