"""Distillation loss from hidden states: head and loss run on chunks of tokens, so full logits never exist.

Torchtune 0.6.1's chunked losses split the *logits* and keep the fp32 softmax of every chunk for the backward pass; at a
vocabulary of 151 936 that is gigabytes. Here a chunk of hidden states goes through the head, its loss and the closed-form
gradient of the loss with respect to the logits, and only the gradients of hidden states and head weight outlive the chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tcal_components.ops.chunked_losses import Head, HeadLoss, LogitLoss, LossSettings, head_weight

Direction = Literal["forward", "reverse", "symmetric", "jensen_shannon"]
DIRECTIONS: tuple[str, ...] = ("forward", "reverse", "symmetric", "jensen_shannon")


class LinearKL(nn.Module):
    """KL divergence between teacher and student over the full vocabulary, computed from hidden states.

    The loss is ``kd_ratio * temperature**2 * KL + (1 - kd_ratio) * cross-entropy``, summed over tokens. The KL is the true
    one: it includes the teacher's entropy, so its minimum is 0. Softmax and sums run in float32 (float64 for float64 input).

    A head that is a plain product (``nn.Linear`` without bias, torchtune's ``TiedLinear``, or a weight) gets its gradients
    in the forward pass; any other callable is recomputed chunk by chunk under ``torch.utils.checkpoint``.

    Args:
        temperature: divides the logits of both models in the KL; the factor temperature**2 keeps gradients comparable.
        direction: "forward" KL(teacher || student) covers all that the teacher may say; "reverse" KL(student || teacher)
            keeps to what it says most; "symmetric" is their mean; "jensen_shannon" lies between them too, is at most ln 2
            and so forgives single tokens that the student finds nearly impossible.
        kd_ratio: share of the KL, in [0, 1]; the rest is cross-entropy with the labels, at temperature 1.
        chunk_tokens: tokens that go through the heads at once. Memory above weights is about
            ``4 * chunk_tokens * vocabulary`` bytes in bf16 (0.6 GiB at 1024 and 151 936) and 0.3 GiB of softmax, plus
            the gradient of the head; fewer tokens save memory and cost speed only below a few hundred.
        ignore_index: label of tokens that do not count.

    Raises:
        ValueError: for a value out of range.
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        direction: Direction = "forward",
        kd_ratio: float = 1.0,
        chunk_tokens: int = 1024,
        ignore_index: int = -100,
    ) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"kd_loss.temperature is {temperature}, expected a number above 0")
        if direction not in DIRECTIONS:
            raise ValueError(f"kd_loss.direction is '{direction}', allowed: {', '.join(DIRECTIONS)}")
        if not 0.0 <= kd_ratio <= 1.0:
            raise ValueError(f"kd_loss.kd_ratio is {kd_ratio}, expected a number from 0 to 1")
        if chunk_tokens < 1:
            raise ValueError(f"kd_loss.chunk_tokens is {chunk_tokens}, expected at least 1")
        self.chunk_tokens = chunk_tokens
        self.settings = LossSettings(temperature, direction, kd_ratio, ignore_index)

    def forward(
        self, student_hidden: Tensor, student_head: Head, teacher_hidden: Tensor, teacher_head: Head, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum the loss over tokens; the caller divides by the *global* number of tokens.

        Args:
            student_hidden: final hidden states before the head [N, E].
            student_head: callable [n, E] -> [n, V], or the weight [V, E].
            teacher_hidden: [N, E_teacher]; no gradient flows into the teacher.
            teacher_head: callable [n, E_teacher] -> [n, V], or the weight [V, E_teacher].
            labels: [N] integers, already shifted.

        Returns:
            The differentiable sum of the loss, and the detached sums ``kl_sum`` (unscaled KL), ``ce_sum`` and ``tokens``.

        Raises:
            ValueError: if the shapes or vocabularies do not fit together.
        """
        n = len(labels)
        if student_hidden.ndim != 2 or len(student_hidden) != n or len(teacher_hidden) != n:
            raise ValueError(
                f"expected hidden states [N, E] and labels [N], got student {tuple(student_hidden.shape)}, "
                f"teacher {tuple(teacher_hidden.shape)}, labels {tuple(labels.shape)}"
            )
        device = student_hidden.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else student_hidden.dtype
        weight, teacher_weight = head_weight(student_head), head_weight(teacher_head)
        if teacher_weight is not None:
            # Under autocast the teacher may be wider than the product: cast once, not once a chunk.
            matrix = teacher_weight.detach().to(dtype if autocast else teacher_hidden.dtype)
            teacher: Callable[[Tensor], Tensor] = functools.partial(_project, matrix=matrix)
        else:
            assert callable(teacher_head)
            teacher = teacher_head
        if weight is not None and teacher_weight is not None:
            _check_vocabulary(weight.shape[0], teacher_weight.shape[0])
        if weight is not None:
            with torch.autocast(device, enabled=False):
                sums = HeadLoss.apply(
                    student_hidden, weight, teacher_hidden, teacher, labels, self.settings, self.chunk_tokens, dtype
                )
        else:
            assert callable(student_head)
            sums = self._recomputed(student_hidden, student_head, teacher_hidden, teacher, labels)
        parts = sums.detach()
        tokens = (labels != self.settings.ignore_index).sum()
        return sums[0], {"kl_sum": parts[1], "ce_sum": parts[2], "tokens": tokens}

    def _recomputed(
        self,
        hidden: Tensor,
        head: Callable[[Tensor], Tensor],
        teacher_hidden: Tensor,
        teacher: Callable[[Tensor], Tensor],
        labels: Tensor,
    ) -> Tensor:
        """The sums for any callable head: each chunk is a checkpoint that runs again in the backward pass."""

        def chunk(h: Tensor, teacher_h: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                teacher_logits = teacher(teacher_h)
            logits = head(h)
            _check_vocabulary(logits.shape[-1], teacher_logits.shape[-1])
            return LogitLoss.apply(logits, teacher_logits, y, self.settings)

        size = self.chunk_tokens
        parts = [
            checkpoint(chunk, h, t, y, use_reentrant=False)
            for h, t, y in zip(hidden.split(size), teacher_hidden.split(size), labels.split(size), strict=True)
        ]
        return torch.stack(parts).sum(0)


def _project(hidden: Tensor, *, matrix: Tensor) -> Tensor:
    return hidden.to(matrix.dtype) @ matrix.t()


def _check_vocabulary(student: int, teacher: int) -> None:
    if student != teacher:
        raise ValueError(
            f"vocabulary sizes differ: student {student}, teacher {teacher}; distillation over logits needs the same "
            "vocabulary (Qwen pads it differently by size: take teacher and student of the same size)"
        )
