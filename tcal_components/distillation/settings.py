"""What a distillation is told and what it tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Settings of the distillation.

    Attributes:
        tokens: to train on; the number of steps is ``tokens // (batch_size * seq_len)``.
        batch_size: sequences a step, over all processes.
        seq_len: tokens a sequence.
        micro_batch_size: sequences a forward pass of one process; None takes its whole share. Less saves memory.
        lr: peak learning rate of the converted layers' mixers.
        base_lr: peak learning rate of everything else.
        weight_decay: of matrices.
        warmup_steps: linear warm-up from 0; then a cosine to 0. Not read where ``lr_scheduler`` is given.
        clip_grad_norm: largest norm of the global gradient; None does not clip.
        eval_every_steps: how often to evaluate besides the end; None only at the end.
        save_every_steps: how often to save a checkpoint besides the end; None only at the end.
        log_every_steps: how often to report.
        activation_offloading: saved activations wait on the CPU; CUDA only.
        optimizer: component of the optimizer; None is AdamW.
        lr_scheduler: component of the schedule, called with the optimizer, ``num_training_steps`` and ``last_epoch`` as
            torchtune's are; it has to return a ``LambdaLR``, whose rate follows from the step alone.
        seed: of whatever is random in a step, such as stochastic rounding.
    """

    tokens: int
    batch_size: int
    seq_len: int
    micro_batch_size: int | None = None
    lr: float = 1e-3
    base_lr: float = 1e-4
    weight_decay: float = 0.0
    warmup_steps: int = 10
    clip_grad_norm: float | None = 1.0
    eval_every_steps: int | None = None
    save_every_steps: int | None = None
    log_every_steps: int = 1
    activation_offloading: bool = False
    optimizer: Mapping[str, Any] | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "batch_size",
            "seq_len",
            "micro_batch_size",
            "eval_every_steps",
            "save_every_steps",
            "log_every_steps",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"distill.{name} is {value}, expected at least 1")
        if self.tokens < self.batch_size * self.seq_len:
            raise ValueError(
                f"distill.tokens is {self.tokens}, expected at least one step: batch_size {self.batch_size} x seq_len "
                f"{self.seq_len} = {self.batch_size * self.seq_len}"
            )
        for name in ("lr", "base_lr", "weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"distill.{name} is {getattr(self, name)}, expected 0 or more")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ValueError(f"distill.clip_grad_norm is {self.clip_grad_norm}, expected a number above 0 or null")

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.tokens // (self.batch_size * self.seq_len)


@dataclasses.dataclass
class DistillResult:
    """What a distillation did.

    Attributes:
        curve: one entry a reported step: step, tokens, loss, lr, grad_norm, and what the evaluation returned.
        steps: optimizer steps done, earlier runs included.
        tokens: tokens seen, earlier runs included.
        seconds: time of training and evaluation, earlier runs included.
        finished: False if it was asked to stop before the end.
    """

    curve: list[dict[str, float]]
    steps: int
    tokens: int
    seconds: float
    finished: bool
