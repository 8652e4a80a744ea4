"""An optimizer's state as tensors under parameter names, so that it can be stored and sharded anew like weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.optim.quant_utils import quantize_8bit_with_qmap

from tcal_components.distributed.parallel import reshard


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors and numbers by parameter name, all as tensors, ready for ``RunState``.

    ``torch.distributed.checkpoint`` cannot store torchao's 8-bit states (torchao 0.13 to 0.15), so they are widened to float32
    on the CPU; ``restore_optimizer`` finds the same codes again.

    Args:
        model: names the parameters.
        optimizer: of that model's parameters; call ``initialize_optimizer`` first to load into it.

    Returns:
        ``{parameter: {key: tensor}}``; plain tensors are the optimizer's own, so loading fills them in place.
        ``restore_optimizer`` puts back the others.

    Raises:
        ValueError: the optimizer keeps something else, which would be lost.
    """
    return {
        name: {
            key: _stored(value, f"{type(optimizer).__name__} keeps '{key}' of {name}")
            for key, value in optimizer.state[parameter].items()
            if value is not None
        }
        for name, parameter in named_trainable(model)
        if parameter in optimizer.state
    }


def restore_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Copy what ``optimizer_state`` holds as another tensor back: widened states into quantised ones, and numbers."""
    for name, parameter in named_trainable(model):
        for key, value in state.get(name, {}).items():
            own = optimizer.state[parameter][key]
            if not isinstance(own, Tensor):
                optimizer.state[parameter][key] = type(own)(value.item())
            elif _is_quantised(own):
                _quantise(_local(value).to(own.device), _local(own))


def initialize_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its states without changing a weight: a step of zero gradients at zero learning rate."""
    assert not optimizer.state, "the optimizer has run already"
    rates = [_rate(group) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        _set_rate(group, 0.0)
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for state in optimizer.state.values():  # the step above is not to count
        step = state.get("step")
        if isinstance(step, Tensor):
            step.zero_()
        elif isinstance(step, (int, float)):
            state["step"] = type(step)(0)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _set_rate(group, rate)


def named_trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters under the names they have without wrappers (activation checkpointing, compile)."""
    reshard(model)  # FSDP2 shows gathered parameters, which no optimizer knows, between a forward and its backward
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield clean_name(name), parameter


def clean_name(name: str) -> str:
    """A parameter's name without the parts that wrappers insert."""
    return name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def _rate(group: dict[str, Any]) -> float:
    return float(group["lr"])


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # torchao's optimizers keep a tensor so that a compiled step reads it
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _stored(value: Any, what: str) -> Tensor:
    """A value of an optimizer's state as a tensor; ``what`` says in an error whose it is."""
    if isinstance(value, Tensor):
        return _widened(value)
    if isinstance(value, (int, float)):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu")
    raise ValueError(
        f"{what} as {type(value).__name__}; a checkpoint holds tensors and numbers: choose another optimizer"
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_quantised(tensor: Tensor) -> bool:
    return hasattr(_local(tensor), "dequantize") and type(_local(tensor)) not in (Tensor, nn.Parameter)


def _widened(tensor: Tensor) -> Tensor:
    """A quantised optimizer state as float32 with the same sharding; anything else as it is."""
    if not _is_quantised(tensor):
        return tensor
    wide = _local(tensor).dequantize()
    if isinstance(tensor, DTensor):
        wide = DTensor.from_local(
            wide, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return wide.to("cpu")  # all moments in float32 at once would not fit where 8 bits were asked for


def _quantise(wide: Tensor, into: Any) -> None:
    """Write a widened state back into torchao's quantised tensor.

    torchao scales a block by its largest magnitude, but its signed table ends at 1 above and at -0.993 below: where a negative
    value dominates, the widened block is 0.7 % too small and every code would shift. The true scale is recovered first.
    """
    if not getattr(into, "signed", False) or not hasattr(into, "codes") or into.qmap.numel() != 256:
        into.copy_(wide)
        return
    blocks = wide.reshape(-1, into.block_size)
    highest, lowest = blocks.amax(-1), -blocks.amin(-1)
    scale = torch.where(highest > lowest, highest, lowest / -into.qmap.min()).clamp_(min=1e-12)
    into.codes.copy_(quantize_8bit_with_qmap((blocks / scale.unsqueeze(-1)).view_as(wide), into.qmap))
    into.scale.copy_(scale)
