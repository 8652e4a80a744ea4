"""What a distillation is told and what it tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tcal_components.config import (
    ConfigError,
    Count,
    Length,
    Positive,
    Rate,
    Seed,
    Settings,
    Steps,
    Tokens,
    WarmUp,
)


@dataclasses.dataclass(frozen=True)
class DistillConfig(Settings):
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
        keep_best: end with the weights that had the least held-out loss, measured at the start, with every evaluation and at
            the end; false ends with the last ones, whatever they are.
        eval_every_steps: how often to evaluate besides the end; None only at the end.
        save_every_steps: how often to save a checkpoint besides the end; None only at the end.
        log_every_steps: how often to report.
        activation_offloading: saved activations wait on the CPU; CUDA only.
        optimizer: component of the optimizer; None is AdamW.
        lr_scheduler: component of the schedule, called with the optimizer, ``num_training_steps`` and ``last_epoch`` as
            torchtune's are; it has to return a ``LambdaLR``, whose rate follows from the step alone.
        seed: of whatever is random in a step, such as stochastic rounding.
    """

    tokens: Tokens
    batch_size: Count
    seq_len: Length
    micro_batch_size: Count | None = None
    lr: Rate = 1e-3
    base_lr: Rate = 1e-4
    weight_decay: Rate = 0.0
    warmup_steps: WarmUp = 10
    clip_grad_norm: Positive | None = 1.0
    keep_best: bool = True
    eval_every_steps: Steps | None = None
    save_every_steps: Steps | None = None
    log_every_steps: Steps = 1
    activation_offloading: bool = False
    optimizer: Mapping[str, Any] | None = None
    lr_scheduler: Mapping[str, Any] | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens < self.batch_size * self.seq_len:
            raise ConfigError(
                f"tokens is {self.tokens}, expected at least one step: batch_size {self.batch_size} x seq_len "
                f"{self.seq_len} = {self.batch_size * self.seq_len}"
            )

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
        best_step: of the weights that the student ends with; None without held-out text or unfinished.
        heldout_loss: at the start (``first``), of those weights (``best``) and at the end (``last``).
    """

    curve: list[dict[str, float]]
    steps: int
    tokens: int
    seconds: float
    finished: bool
    best_step: int | None = None
    heldout_loss: dict[str, float] = dataclasses.field(default_factory=dict)
