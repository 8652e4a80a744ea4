"""AdamW of the converted layers during alignment: groups by name, schedule, gradient sum and clipping by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.align.config import GATES, NO_DECAY, PROJECTIONS, AlignConfig
from tcal_components.align.stack import LayerStack
from tcal_components.distributed.collectives import all_sum_, world_size

# Where the config leaves a learning rate open, see `learning_rates`.
NEW_LR, GATE_LR_TIMES_WIDTH, PROJECTION_STEP = 6e-3, 3.5, 0.25


@dataclass(frozen=True)
class LearningRates:
    """Peak learning rates of an alignment.

    Args:
        projections: of q, k, v and output.
        gates: of the matrices that the teacher does not have.
        others: of decay, convolutions and o_norm, whose size does not depend on the width of the model.
    """

    projections: float
    gates: float
    others: float

    def scaled(self, factor: float) -> LearningRates:
        """All of them times a factor."""
        return LearningRates(self.projections * factor, self.gates * factor, self.others * factor)


@torch.no_grad()
def learning_rates(mixers: Iterable[nn.Module], config: AlignConfig) -> LearningRates:
    """The rates of ``config``, and for those that it leaves open what suits the model.

    A step of Adam moves every weight by the learning rate, so what it changes of a matrix product grows with the width E. The
    projections' rate is ``0.25 rms(W_q, W_k) / sqrt(E)``: 2.0e-3 for SmolLM2-135M (E = 576), the best rate there. At E = 2048 and random
    weights of 0.02 it is 1.1e-4, and 2.0e-3 raises the error for good. The gates' rate is ``3.5 / E``, at most that of the rest, 6e-3.

    Args:
        mixers: the layers as they start; whole, or sharded by FSDP2 (every process must call this).
        config: of the alignment.

    Returns:
        LearningRates: of every layer alike.
    """
    others = NEW_LR if config.lr is None else config.lr
    gates, projections = config.lr, config.projection_lr
    squares, numbers, width = 0.0, 0, 1
    for mixer in mixers if gates is None or projections is None else ():
        for name in ("q_proj", "k_proj"):
            weight = mixer.get_parameter(f"{name}.weight")
            norm = torch.linalg.vector_norm(weight.float())
            squares += float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm) ** 2
            numbers, width = numbers + weight.numel(), weight.shape[1]
    if gates is None:
        gates = min(GATE_LR_TIMES_WIDTH / width, others)
    if projections is None:
        projections = PROJECTION_STEP * math.sqrt(squares / max(numbers, 1) / width)
    return LearningRates(projections, gates, others)


def parameter_groups(mixer: nn.Module, config: AlignConfig, rates: LearningRates | None = None) -> list[dict[str, Any]]:
    """Groups of AdamW by the names of the parameters.

    Args:
        mixer: Gated DeltaNet layer.
        config: learning rates and weight decay.
        rates: of all layers. None: of this one.

    Returns:
        list: groups with ``params``, ``lr``, ``peak_lr`` and ``weight_decay``.
    """
    rates = rates or learning_rates([mixer], config)
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, parameter in mixer.named_parameters():
        part = name.split(".")[0]
        lr = rates.projections if part in PROJECTIONS else rates.gates if part in GATES else rates.others
        groups.setdefault((lr, 0.0 if part in NO_DECAY else config.weight_decay), []).append(parameter)
    return [
        {"params": params, "lr": lr, "peak_lr": lr, "weight_decay": decay} for (lr, decay), params in groups.items()
    ]


class MixerOptimizer:
    """One AdamW for all mixers, plain or sharded by FSDP2; gradients are clipped layer by layer.

    One optimizer for all layers because each launch costs more than its arithmetic; the gradients of all layers are alive
    until :meth:`step`. On CUDA the fused kernel takes one launch for many tensors.

    Args:
        mixers: the layers; their parameters are trained.
        config: numbers of the run.
        rates: peak learning rates. None: those that ``config`` asks for.
        stack: of these mixers; then its parameters are trained, of which theirs are views.
    """

    def __init__(
        self,
        mixers: Iterable[nn.Module],
        config: AlignConfig,
        *,
        rates: LearningRates | None = None,
        stack: LayerStack | None = None,
    ) -> None:
        mixers = list(mixers)
        self._config, self.rates, self._stacked = config, rates or learning_rates(mixers, config), stack is not None
        # Where a mixer's parameter lies in the stack.
        self._rows: dict[nn.Parameter, tuple[nn.Parameter, int]] = {}
        if stack is not None:
            for index, mixer in enumerate(mixers):
                for name, parameter in mixer.named_parameters():
                    self._rows[parameter] = (stack.get_parameter(name), index)
        modules = mixers if stack is None else [stack]
        self._layers: list[list[nn.Parameter]] = []
        groups: dict[tuple[Any, Any], dict[str, Any]] = {}
        for module in modules:
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name.split(".")[0] not in config.frozen)
            self._layers.append([parameter for parameter in module.parameters() if parameter.requires_grad])
            for group in parameter_groups(module, config, self.rates):
                merged = groups.setdefault((group["peak_lr"], group["weight_decay"]), {**group, "params": []})
                merged["params"] += group["params"]
        self._parameters = [parameter for group in groups.values() for parameter in group["params"]]
        self._sharded = any(hasattr(parameter, "full_tensor") for parameter in self._parameters)
        fused = not self._sharded and all(parameter.is_cuda for parameter in self._parameters)
        self._adamw = torch.optim.AdamW(
            list(groups.values()), betas=config.betas, eps=config.eps, fused=True if fused else None
        )
        # The state exists from the start, so that a run can be saved and loaded before its first step.
        for parameter in self._parameters:
            self._adamw.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @torch.no_grad()
    def step(self, number: int) -> Tensor:
        """One step from the gradients of this process's share of the losses; clears them.

        Args:
            number: steps made before.

        Returns:
            Tensor: gradient norm of each layer before clipping, in the order of the mixers; nothing waits for it.
        """
        self._sum_gradients()
        norms = self._clip()
        factor = self._config.schedule(number)
        for group in self._adamw.param_groups:
            group["lr"] = group["peak_lr"] * factor
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norms

    def _clip(self) -> Tensor:
        limit = math.inf if self._config.max_grad_norm is None else self._config.max_grad_norm
        if self._sharded:
            sharded = [torch.nn.utils.clip_grad_norm_(layer, limit) for layer in self._layers]
            return torch.stack([norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in sharded])
        if self._stacked:
            stacked = _gradients(self._layers[0])
            norms = torch.stack([torch.linalg.vector_norm(part.flatten(1), dim=1) for part in stacked]).norm(dim=0)
            if limit != math.inf:
                factors = (limit / (norms + 1e-6)).clamp(max=1.0)
                for gradient in stacked:
                    gradient.mul_(factors.view(-1, *(1,) * (gradient.ndim - 1)))
            return norms
        gradients = [_gradients(layer) for layer in self._layers]
        parts = torch.stack(torch._foreach_norm([gradient for layer in gradients for gradient in layer]))
        norms = torch.stack([torch.linalg.vector_norm(part) for part in parts.split([len(g) for g in gradients])])
        if limit != math.inf:
            factors = (limit / (norms + 1e-6)).clamp(max=1.0)
            for layer, factor in zip(gradients, factors.unbind()):
                torch._foreach_mul_(layer, factor)
        return norms

    def _sum_gradients(self) -> None:
        """The gradient of the whole loss: every process holds that of its share."""
        processes = world_size()
        if processes == 1:
            return
        for layer in self._layers:
            gradients = _gradients(layer)
            if self._sharded:
                # FSDP2 has averaged them; the loss is already divided by the energy of all processes.
                torch._foreach_mul_(gradients, processes)
                continue
            for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
                bucket = [gradient for gradient in gradients if gradient.dtype == dtype]
                flat = all_sum_(torch.cat([gradient.flatten() for gradient in bucket]))
                for gradient, part in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
                    gradient.copy_(part.view_as(gradient))

    def moments(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Running means of the gradient and squared gradient of one parameter of a mixer."""
        names = ("exp_avg", "exp_avg_sq")
        if self._stacked:
            stacked, row = self._rows[parameter]
            return {name: self._adamw.state[stacked][name][row] for name in names}
        return {name: self._adamw.state[parameter][name] for name in names}

    def set_steps(self, steps: int) -> None:
        """Sets AdamW's own counters after its moments were loaded."""
        for parameter in self._parameters:
            self._adamw.state[parameter]["step"].fill_(steps)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
