"""The step of torchao's low-bit Adam optimizers on sharded parameters (torchao 0.13 to 0.15)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import adam


def step_on_shards(optimizer: Any) -> None:
    """One step, each process on its part of every parameter, which is exact because Adam is elementwise.

    Torchao gives sharded tensors to its compiled update. There the random bits of ``bf16_stochastic_round`` are not
    sharded, and the step raises; whole parameters are not needed anyway.

    Args:
        optimizer: of ``torchao.optim``: ``AdamW8bit`` and its like.
    """
    # As torchao does: one compilation for each shape, never more.
    with torch.no_grad(), torch._dynamo.utils.disable_cache_limit():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(optimizer, group, parameter)


def _update(optimizer: Any, group: dict[str, Any], parameter: Tensor) -> None:
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.tensor(0.0)
        state["exp_avg"] = optimizer._new_buffer(parameter, True)
        state["exp_avg_sq"] = optimizer._new_buffer(parameter, False)
        if group["amsgrad"]:
            state["max_exp_avg_sq"] = optimizer._new_buffer(parameter, False)
    state["step"] += 1
    weight = _local(parameter.detach())
    if weight.numel() == 0:  # fewer rows than processes
        return
    assert parameter.grad is not None
    largest = state.get("max_exp_avg_sq")
    torch.compile(adam.single_param_adam, fullgraph=True, dynamic=False)(
        weight,
        _local(parameter.grad),
        state["step"],
        _local(state["exp_avg"]),
        _local(state["exp_avg_sq"]),
        None if largest is None else _local(largest),
        group["lr"],
        group["betas"][0],
        group["betas"][1],
        group["weight_decay"],
        group["eps"],
        optimizer.is_adamw,
        optimizer.bf16_stochastic_round and weight.dtype is torch.bfloat16,
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
