"""Distillation loss from hidden states: head and loss run on chunks of tokens, so full logits never exist.

Torchtune 0.6.1's chunked losses split the *logits* and keep the fp32 softmax of every chunk for the backward pass; at a
vocabulary of 151 936 that is gigabytes. Here a chunk of hidden states goes through the head, its loss and the closed-form
gradient of the loss with respect to the logits, and only the gradients of hidden states and head weight outlive the chunk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torchtune.modules import TiedLinear

Direction = Literal["forward", "reverse", "symmetric", "jensen_shannon"]
DIRECTIONS: tuple[str, ...] = ("forward", "reverse", "symmetric", "jensen_shannon")
Head = Callable[[Tensor], Tensor] | Tensor

# Rows of the head's gradient that are computed at once when it is accumulated in a wider dtype than the matmul's.
_ROW_BLOCK = 16384
# Logits whose float32 softmax exists at once: 3 or 4 tensors of this size, 256 MiB.
_SOFTMAX_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True)
class _Settings:
    temperature: float
    direction: str
    kd_ratio: float
    ignore_index: int


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Log-probabilities in float32 (float64 if given) as a fresh tensor that the caller may overwrite."""
    out = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if temperature != 1.0:
        out.div_(temperature)
    return out.sub_(out.logsumexp(-1, keepdim=True))


def _kl(student: Tensor, teacher: Tensor, temperature: float, direction: str) -> tuple[Tensor, Tensor]:
    """KL divergence of every token and its gradient with respect to the student's logits, times temperature squared.

    With p, q the teacher's and student's probabilities at this temperature and z the student's logits,
    d KL(p||q)/dz = (q - p) / temperature and d KL(q||p)/dz = q (log q - log p - KL(q||p)) / temperature.

    Args:
        student: logits [N, V].
        teacher: logits [N, V].
        temperature: divides both logits.
        direction: "forward" KL(p||q), "reverse" KL(q||p), "symmetric", their mean, or "jensen_shannon", the mean of
            KL(p||m) and KL(q||m) with m = (p + q) / 2, whose gradient is q (log q - log m - KL(q||m)) / (2 temperature).

    Returns:
        The unscaled divergence [N], and the gradient [N, V] of temperature**2 times the divergence.
    """
    log_q, log_p = _log_softmax(student, temperature), _log_softmax(teacher, temperature)
    if direction == "jensen_shannon":
        log_m = torch.logaddexp(log_p, log_q).sub_(math.log(2.0))
        p, q = log_p.exp(), log_q.exp()
        forward = log_p.sub_(log_m).mul_(p).sum(-1)
        ratio = log_q.sub_(log_m)
        reverse = (q * ratio).sum(-1)
        return 0.5 * (forward + reverse), ratio.sub_(reverse.unsqueeze(-1)).mul_(q).mul_(0.5 * temperature)
    p = log_p.exp() if direction != "reverse" else log_p  # reverse never reads p
    ratio = log_p.sub_(log_q)  # log p - log q; log_p's memory is reused
    q = log_q.exp_()
    if direction == "forward":
        divergence = ratio.mul_(p).sum(-1)
        return divergence, q.sub_(p).mul_(temperature)
    reverse = -(q * ratio).sum(-1)
    if direction == "reverse":
        return reverse, ratio.add_(reverse.unsqueeze(-1)).mul_(q).mul_(-temperature)
    divergence = 0.5 * ((p * ratio).sum(-1) + reverse)
    # 0.5 [(q - p) + q (-ratio - reverse)]
    grad = ratio.neg_().add_((1.0 - reverse).unsqueeze(-1)).mul_(q).sub_(p)
    return divergence, grad.mul_(0.5 * temperature)


def _cross_entropy(student: Tensor, target: Tensor, with_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy of every token [N] with targets [N], and its gradient [N, V] with respect to the logits."""
    log_q = _log_softmax(student, 1.0)
    index = target.unsqueeze(-1)
    loss = -log_q.gather(-1, index).squeeze(-1)
    if not with_grad:
        return loss, None
    grad = log_q.exp_()
    grad.scatter_add_(-1, index, torch.full_like(index, -1.0, dtype=grad.dtype))
    return loss, grad


def _chunk_loss(
    student: Tensor, teacher: Tensor, labels: Tensor, settings: _Settings, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Sums over one chunk, and the gradient of the first with respect to the student's logits.

    Args:
        student: logits [N, V].
        teacher: logits [N, V].
        labels: [N]; tokens labelled ``settings.ignore_index`` count nowhere.
        settings: the loss.
        grad: [N, V], receives the gradient; it may be ``student`` itself.

    Returns:
        [loss, KL, cross-entropy] summed over the counted tokens, and ``grad``.
    """
    counted = labels != settings.ignore_index
    target = labels.where(counted, 0)
    rows = max(1, _SOFTMAX_ELEMENTS // student.shape[-1])
    sums = []
    for start in range(0, len(labels), rows):
        part = slice(start, start + rows)
        sums.append(_rows_loss(student[part], teacher[part], target[part], counted[part], settings, grad[part]))
    return torch.stack(sums).sum(0), grad


def _rows_loss(
    student: Tensor, teacher: Tensor, target: Tensor, counted: Tensor, settings: _Settings, grad: Tensor
) -> Tensor:
    """``_chunk_loss`` for so few rows [n, V] that their float32 softmax is small; writes ``grad``, returns the sums."""
    ratio = settings.kd_ratio
    divergence, kl_grad = _kl(student, teacher, settings.temperature, settings.direction)
    entropy, ce_grad = _cross_entropy(student, target, ratio < 1.0)
    if ce_grad is not None:
        kl_grad.mul_(ratio).add_(ce_grad, alpha=1.0 - ratio)
    grad.copy_(kl_grad.masked_fill_(~counted.unsqueeze(-1), 0.0))
    kl_sum = divergence.where(counted, 0.0).sum()
    ce_sum = entropy.where(counted, 0.0).sum()
    loss = ratio * settings.temperature**2 * kl_sum
    if ratio < 1.0:
        loss = loss + (1.0 - ratio) * ce_sum
    return torch.stack([loss, kl_sum, ce_sum])


class _LogitLoss(torch.autograd.Function):
    """The chunk's sums from logits; its backward is the closed-form gradient."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, settings: _Settings) -> Tensor:
        sums, grad = _chunk_loss(student, teacher, labels, settings, torch.empty_like(student))
        ctx.save_for_backward(grad)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0][0].to(grad.dtype), None, None, None  # only the loss is differentiable


class _HeadLoss(torch.autograd.Function):
    """Head without bias and loss in one pass: gradients are ready when the forward pass ends, nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Callable[[Tensor], Tensor],
        labels: Tensor,
        settings: _Settings,
        chunk: int,
        dtype: torch.dtype,
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        head = weight.detach().to(dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        total: Tensor | None = None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            x = hidden[part].detach().to(dtype)
            logits = x @ head.t()
            sums, grad = _chunk_loss(logits, teacher_head(teacher_hidden[part]), labels[part], settings, logits)
            total = sums if total is None else total + sums
            if grad_hidden is not None:
                grad_hidden[part] = grad @ head
            if grad_weight is not None:
                _accumulate(grad_weight, grad, x)
            del logits, grad  # before the next chunk's logits are allocated
        ctx.grads = (grad_hidden, grad_weight)
        if total is None:
            total = torch.zeros(3, device=hidden.device, dtype=torch.promote_types(dtype, torch.float32))
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("LinearKL frees its gradients in the first backward pass; a second one is not possible")
        scale = grads[0][0]
        # In place: a scaled copy of the head's gradient would double what the loss holds.
        grad_hidden, grad_weight = (None if g is None else g.mul_(scale.to(g.dtype)) for g in ctx.grads)
        ctx.grads = None
        return grad_hidden, grad_weight, None, None, None, None, None, None


def _accumulate(into: Tensor, grad: Tensor, x: Tensor) -> None:
    """into [V, E] += grad [N, V]^T x [N, E]; in row blocks when ``into`` is wider, so the product stays small."""
    if into.dtype == grad.dtype:
        into.addmm_(grad.t(), x)
        return
    for start in range(0, into.shape[0], _ROW_BLOCK):
        rows = slice(start, start + _ROW_BLOCK)
        into[rows] += grad[:, rows].t() @ x


def _head_weight(head: Head) -> Tensor | None:
    """The weight [V, E] of a head that is a plain matrix product, else None."""
    weight: Any = None
    if isinstance(head, Tensor):
        weight = head
    elif isinstance(head, TiedLinear):
        weight = head.tied_module.weight
    elif type(head) is nn.Linear and head.bias is None and not head._forward_hooks and not head._forward_pre_hooks:
        weight = head.weight
    # FSDP2 gathers weights inside a forward pass only, so the loss runs where DistillModel runs it.
    assert not isinstance(weight, DTensor), "the head's weight is sharded: call LinearKL while the model is gathered"
    return weight


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
        self.settings = _Settings(temperature, direction, kd_ratio, ignore_index)

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
        weight, teacher_weight = _head_weight(student_head), _head_weight(teacher_head)
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
                sums = _HeadLoss.apply(
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
            return _LogitLoss.apply(logits, teacher_logits, y, self.settings)

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
