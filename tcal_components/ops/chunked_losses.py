"""Losses of a chunk of rows, with gradients that are computed in the forward pass."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtune.modules import TiedLinear

Head = Callable[[Tensor], Tensor] | Tensor

# Rows of the head's gradient that are computed at once when it is accumulated in a wider dtype than the matmul's.
_ROW_BLOCK = 16384
# Logits whose float32 softmax exists at once: 3 or 4 tensors of this size, 256 MiB.
_SOFTMAX_ELEMENTS = 1 << 24


@dataclasses.dataclass(frozen=True)
class LossSettings:
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
    student: Tensor, teacher: Tensor, labels: Tensor, settings: LossSettings, grad: Tensor
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
    student: Tensor, teacher: Tensor, target: Tensor, counted: Tensor, settings: LossSettings, grad: Tensor
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


class LogitLoss(torch.autograd.Function):
    """The chunk's sums from logits; its backward is the closed-form gradient."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
        sums, grad = _chunk_loss(student, teacher, labels, settings, torch.empty_like(student))
        ctx.save_for_backward(grad)
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0][0].to(grad.dtype), None, None, None  # only the loss is differentiable


class HeadLoss(torch.autograd.Function):
    """Head without bias and loss in one pass: gradients are ready when the forward pass ends, nothing is recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        teacher_hidden: Tensor,
        teacher_head: Callable[[Tensor], Tensor],
        labels: Tensor,
        settings: LossSettings,
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


def head_weight(head: Head) -> Tensor | None:
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
