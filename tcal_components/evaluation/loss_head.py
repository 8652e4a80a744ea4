"""The distillation loss by itself: memory above weights and time, linear against dense against chunks of logits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtune.modules.loss import ForwardKLWithChunkedOutputLoss

from tcal_components.config import Count, OneOf, Positive, Range, Settings
from tcal_components.distill.loss import LinearKL

GIB = 2**30
KINDS = ("linear", "chunked_logits", "dense")


class DenseKL(LinearKL):
    """The same forward KL by the textbook formula, from full logits; takes the place of ``LinearKL`` in benchmarks."""

    def forward(
        self, student_hidden: Tensor, student_head: Any, teacher_hidden: Tensor, teacher_head: Any, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``LinearKL.forward``."""
        with torch.no_grad():
            log_p = F.log_softmax(_logits(teacher_hidden, teacher_head).float(), dim=-1)
        log_q = F.log_softmax(_logits(student_hidden, student_head).float(), dim=-1)
        counted = labels != self.settings.ignore_index
        kl = ((log_p.exp() * (log_p - log_q)).sum(-1) * counted).sum()
        ce = F.nll_loss(log_q.detach(), labels, ignore_index=self.settings.ignore_index, reduction="sum")
        return kl, {"kl_sum": kl.detach(), "ce_sum": ce, "tokens": counted.sum()}


def _logits(hidden: Tensor, head: Any) -> Tensor:
    return F.linear(hidden, head) if isinstance(head, Tensor) else head(hidden)


def _chunked_logits(student: Tensor, head: Tensor, teacher: Tensor, teacher_head: Tensor, labels: Tensor) -> Tensor:
    """Torchtune's chunked loss as its recipes call it: full logits in chunks, upcast one at a time."""
    loss = ForwardKLWithChunkedOutputLoss()
    count = loss.num_output_chunks
    with torch.no_grad():
        teacher_logits = [F.linear(part, teacher_head) for part in teacher[None].chunk(count, dim=1)]
    student_logits = [F.linear(part, head) for part in student[None].chunk(count, dim=1)]
    return loss(student_logits, teacher_logits, labels[None])


def _loss(kind: str) -> Callable[..., Tensor]:
    if kind == "chunked_logits":
        return _chunked_logits
    loss = LinearKL() if kind == "linear" else DenseKL()
    return lambda *arguments: loss(*arguments)[0]


@dataclass(frozen=True)
class LossHeadConfig(Settings):
    """Config section ``loss_head``.

    Args:
        tokens: N.
        vocab_size: V; None takes the model's.
        embed_dim: E; None takes the model's.
        repeats: passes of which the median counts; one more warms up.
        kinds: which losses.
        goal_gib: largest memory above weights of the linear one.
    """

    tokens: Annotated[int, Range(1, 2**22)] = 16384
    vocab_size: Annotated[int, Range(1, 2**21)] | None = None
    embed_dim: Count | None = None
    repeats: Count = 3
    kinds: tuple[Annotated[str, OneOf(KINDS)], ...] = KINDS
    goal_gib: Positive = 2.5


def measure_loss_head(
    kind: str, *, tokens: int, vocab_size: int, embed_dim: int, repeats: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Forward and backward of one loss over random hidden states, in this process.

    Args:
        kind: one of ``KINDS``.
        tokens: N.
        vocab_size: V.
        embed_dim: E.
        repeats: passes of which the median counts; one more warms up.
        dtype: of weights and hidden states.
        device: where.

    Returns:
        ``seconds`` a pass, and on CUDA ``above_weights_gib``: peak above both heads' weights and both hidden states, so
        with the gradients of the student's.
    """
    cuda = device.type == "cuda"
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int, std: float) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=std, generator=generator)

    heads = [random(vocab_size, embed_dim, std=0.02) for _ in range(2)]
    hidden = [random(tokens, embed_dim, std=1.0) for _ in range(2)]
    labels = torch.randint(vocab_size, (tokens,), device=device, generator=generator)
    trained = [heads[0].requires_grad_(), hidden[0].requires_grad_()]
    before = torch.cuda.memory_allocated(device) if cuda else 0
    loss, times, peak = _loss(kind), [], 0.0
    for repeat in range(repeats + 1):
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        (loss(hidden[0], heads[0], hidden[1], heads[1], labels) / tokens).backward()
        if cuda:
            torch.cuda.synchronize(device)
            peak = max(peak, torch.cuda.max_memory_allocated(device) - before)
        if repeat:
            times.append(time.perf_counter() - start)
        for tensor in trained:
            tensor.grad = None
    return {"seconds": statistics.median(times), "above_weights_gib": peak / GIB if cuda else None}
