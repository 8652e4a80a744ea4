"""Numbers of the alignment."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

from tcal_components.config import Count, Length, OneOf, Positive, Pulls, Range, Rate, Settings, Share, Steps, WarmUp

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "output_proj")
# Marks on parameters (`_no_weight_decay`) are lost by deepcopy, assigning loads and fully_shard; names are not.
NO_DECAY = ("decay", "o_norm", "q_conv", "k_conv", "v_conv")
GATES = ("g_proj", "a_proj", "b_proj")
PARTS = (*PROJECTIONS, *GATES, *NO_DECAY)
Beta = Annotated[float, Range(0, below=1)]


@dataclass(frozen=True)
class JointConfig(Settings):
    """Numbers of the joint part of an alignment (config section ``align.joint``).

    Args:
        steps: optimizer steps; 0 leaves the part out.
        batch_size: sequences per step over all processes.
        seq_len: tokens per sequence.
        lr_scale: its peak learning rates are those of the alignment times this.
        warmup_steps: linear warm-up, then a cosine.
        eval_every: steps between held-out evaluations (one more follows the last step).
    """

    steps: Annotated[int, Range(0, 10**9)] = 0
    batch_size: Count = 2
    seq_len: Length = 512
    lr_scale: Rate = 0.1
    warmup_steps: WarmUp = 20
    eval_every: Steps = 100

    @property
    def text_tokens(self) -> int:
        """Tokens of training text that it reads."""
        return self.steps * self.batch_size * self.seq_len


@dataclass(frozen=True)
class AlignConfig(Settings):
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
        refit_tokens: training text over all processes on which W_o of every layer is solved once more at the end, in closed
            form, and kept where that lowers the held-out error; 0 does not. Not done where ``output_proj`` is frozen.
        refit_pulls: strengths of the pull to the trained W_o, relative to the mean diagonal; chosen in each layer.
        stack_layers: compute all layers at once (:class:`~tcal_components.align.stack.LayerStack`), which small
            batches gain from and which keeps the activations of all layers. Sharded layers never are.
        fixed_sequences: train (and refit) on these few sequences again and again, as published; None takes fresh text.
        joint: what follows the layers on their own: all of them together, towards the teacher's next-token distribution.
    """

    steps: Annotated[int, Range(0, 10**9)] = 300
    batch_size: Count = 8
    seq_len: Length = 512
    lr: Rate | None = None
    projection_lr: Rate | None = None
    warmup_steps: WarmUp = 10
    min_lr_ratio: Share = 0.0
    weight_decay: Rate = 0.0
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Range(0, 1)] = 1e-8
    max_grad_norm: Positive | None = 1.0
    eval_every: Steps = 25
    heldout_batches: Count = 4
    relative: bool = True
    frozen: tuple[Annotated[str, OneOf(PARTS)], ...] = ()
    refit_tokens: Annotated[int, Range(0, 10**14)] = 131_072
    refit_pulls: Pulls = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    stack_layers: bool = False
    fixed_sequences: Count | None = None
    joint: JointConfig = field(default_factory=JointConfig)

    @property
    def refit_steps(self) -> int:
        """Batches of ``batch_size`` sequences that the refit reads, behind those of the steps."""
        refits = self.refit_tokens > 0 and "output_proj" not in self.frozen
        return -(-self.refit_tokens // (self.batch_size * self.seq_len)) if refits else 0

    @property
    def text_tokens(self) -> int:
        """Tokens of training text that steps and refit read without reading any twice."""
        sequences = (self.steps + self.refit_steps) * self.batch_size
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
