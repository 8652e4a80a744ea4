"""AdamW of the converted layers during alignment: groups by name, schedule, gradient sum and clipping by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.calibration.collectives import all_sum_, world_size
from tcal_components.calibration.layer_stack import LayerStack

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")
# Marks on parameters (`_no_weight_decay`) are lost by deepcopy, assigning loads and fully_shard; names are not.
NO_DECAY = ("decay", "o_norm", "q_conv", "k_conv", "v_conv")
GATES = ("g_proj", "a_proj", "b_proj")
# Where the config leaves a learning rate open, see `learning_rates`.
NEW_LR, GATE_LR_TIMES_WIDTH, PROJECTION_STEP = 6e-3, 3.5, 0.25
POLISHES = ("none", "teacher", "sequential")
PARTS = (*PROJECTIONS, *GATES, *NO_DECAY)


@dataclass(frozen=True)
class AlignConfig:
    """Numbers of the alignment (config section ``align``).

    Args:
        steps: optimizer steps.
        batch_size: sequences per step over all processes.
        seq_len: tokens per sequence.
        lr: peak learning rate of the parameters that the teacher does not have (gates, decay, convolutions, o_norm). None:
            by the width of the model, see :func:`learning_rates`.
        projection_lr: peak learning rate of the copied projections q, k, v and output. None: by width and weights.
        warmup_steps: linear warm-up.
        min_lr_ratio: share of the peak at which the cosine ends.
        weight_decay: of matrices; never of A_log, dt_bias, o_norm and convolutions.
        betas: of AdamW.
        eps: of AdamW.
        max_grad_norm: clip the gradient norm of each layer; None does not clip.
        eval_every: steps between held-out evaluations (one more follows the last step).
        heldout_batches: number of held-out batches of ``batch_size`` sequences.
        relative: minimise |student - y|^2 / |y|^2; False takes the mean squared error, as published.
        frozen: parts of the mixer that are not trained, such as ``output_proj`` and ``o_norm`` as published.
        polish: closed form at the end: W_o of every layer solved once more over ``polish_tokens`` tokens and kept where
            that lowers the held-out error. ``teacher`` (on the teacher's inputs), ``sequential`` (layer by layer on the
            student's own hidden states) or ``none``. Not done where ``output_proj`` is frozen.
        polish_tokens: training text of the polish, over all processes.
        polish_pulls: strengths of the pull to the trained W_o, relative to the mean diagonal; chosen in each layer.
        polish_gamma: ``sequential``: share of the student's drift from the teacher that each layer is asked to undo.
        stack_layers: compute all layers at once (:class:`~tcal_components.calibration.layer_stack.LayerStack`), which small
            batches gain from and which keeps the activations of all layers. Sharded layers never are.
        fixed_sequences: train (and polish) on these few sequences again and again, as published; None takes fresh text.

    Raises:
        ValueError: a value out of range.
    """

    steps: int = 300
    batch_size: int = 8
    seq_len: int = 512
    lr: float | None = None
    projection_lr: float | None = None
    warmup_steps: int = 10
    min_lr_ratio: float = 0.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    eval_every: int = 25
    heldout_batches: int = 4
    relative: bool = True
    frozen: tuple[str, ...] = ()
    polish: str = "teacher"
    polish_tokens: int = 131_072
    polish_pulls: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    polish_gamma: float = 0.5
    stack_layers: bool = False
    fixed_sequences: int | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("steps", 0),
            ("batch_size", 1),
            ("seq_len", 2),
            ("warmup_steps", 0),
            ("eval_every", 1),
            ("heldout_batches", 1),
            ("polish_tokens", 1),
            ("lr", 0.0),
            ("projection_lr", 0.0),
            ("weight_decay", 0.0),
            ("min_lr_ratio", 0.0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"align.{name} is {value}; it must be at least {least}")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(
                f"align.max_grad_norm is {self.max_grad_norm}; it must be positive, or null for no clipping"
            )
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"align.betas is {self.betas}; it must be two numbers in [0, 1)")
        unknown = [part for part in self.frozen if part not in PARTS]
        if unknown:
            raise ValueError(f"align.frozen has {unknown[0]!r}; allowed: {', '.join(PARTS)}")
        if self.polish not in POLISHES:
            raise ValueError(f"align.polish is {self.polish!r}; allowed: {', '.join(POLISHES)}")
        if not self.polish_pulls or min(self.polish_pulls) < 0:
            raise ValueError(
                f"align.polish_pulls is {list(self.polish_pulls)}; it must be a list of numbers of at least 0"
            )
        if not 0.0 <= self.polish_gamma <= 1.0:
            raise ValueError(f"align.polish_gamma is {self.polish_gamma}; it must lie in [0, 1]")
        if self.fixed_sequences is not None and self.fixed_sequences < 1:
            raise ValueError(
                f"align.fixed_sequences is {self.fixed_sequences}; it must be at least 1, or null for fresh text"
            )

    @property
    def polishes(self) -> bool:
        """Whether W_o is solved once more at the end."""
        return self.polish != "none" and "output_proj" not in self.frozen

    @property
    def polish_steps(self) -> int:
        """Batches of ``batch_size`` sequences that the polish reads, behind those of the steps."""
        return -(-self.polish_tokens // (self.batch_size * self.seq_len)) if self.polishes else 0

    @property
    def text_tokens(self) -> int:
        """Tokens of training text that steps and polish read without reading any twice."""
        sequences = (self.steps + self.polish_steps) * self.batch_size
        return max(sequences if self.fixed_sequences is None else self.fixed_sequences, 1) * self.seq_len

    def schedule(self, step: int) -> float:
        """Share of the peak learning rate at a step: linear warm-up, then cosine.

        Args:
            step: steps made before, from 0.

        Returns:
            float: in (0, 1].
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))


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
        stack: of these mixers; then its parameters are trained, of which theirs are views.
    """

    def __init__(self, mixers: Iterable[nn.Module], config: AlignConfig, *, stack: LayerStack | None = None) -> None:
        mixers = list(mixers)
        self._config, self.rates, self._stacked = config, learning_rates(mixers, config), stack is not None
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
