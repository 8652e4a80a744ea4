"""How closely a student follows its teacher: hidden states layer by layer, top token, KL divergence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.evaluation.access import (
    device_of,
    evaluating,
    final_hidden,
    gathered,
    head_of,
    inputs_for,
    is_transformers,
    layers_of,
)


@dataclass
class AgreementResult:
    """Means over the predicted tokens of all processes.

    Attributes:
        layers: By layer, the relative squared error of the hidden state after it: the mean over tokens of
            ||student - teacher||^2 / ||teacher||^2, so that no token with a huge norm (an attention sink) decides it.
        top1: Share of tokens for which both have the same most likely token.
        kl: KL(teacher || student) in nats a token.
        tokens: How many tokens.
    """

    layers: dict[int, float]
    top1: float
    kl: float
    tokens: int

    def as_dict(self) -> dict[str, Any]:
        """The entry of a report's ``evaluation.agreement``."""
        layers = {str(index): value for index, value in self.layers.items()}
        return {"layers": layers, "top1": self.top1, "kl": self.kl, "tokens": self.tokens}


def _run(model: nn.Module, inputs: Mapping[str, Any], keep: Tensor) -> tuple[list[Tensor], Tensor]:
    """Hidden states after every layer and after the final norm, at the tokens of ``keep`` [B, T] only."""
    states: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output)[keep])

    with ExitStack() as stack:
        for layer in layers_of(model):
            handle = layer.register_forward_hook(hook)
            stack.callback(handle.remove)
        hidden = final_hidden(model, inputs)[keep]
    return states, hidden


def agreement(
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *,
    device: torch.device | str | None = None,
    autocast_dtype: torch.dtype | None = None,
    chunk_tokens: int = 512,
    progress: str | None = None,
) -> AgreementResult:
    """Compares a student with its teacher on text.

    Args:
        teacher: A HybridDecoder or a causal language model of transformers.
        student: Likewise, with as many layers; not necessarily of the same kind.
        batches: This process's batches with ``tokens``, ``labels`` and optionally ``input_pos``, ``document``, [B, T].
        device: Where both models compute. Default: where the student's weights are.
        autocast_dtype: Compute under autocast to this type.
        chunk_tokens: Tokens that go through both heads at once.
        progress: Label of a progress bar; None shows none.

    Returns:
        AgreementResult: Means, summed in float64.

    Raises:
        ValueError: If the models differ in layers or vocabulary, or nothing is predicted.
    """
    device = device_of(student) if device is None else torch.device(device)
    count = len(layers_of(teacher))
    if len(layers_of(student)) != count:
        raise ValueError(f"agreement: the teacher has {count} layers, the student {len(layers_of(student))}")
    # [tokens, same top token, KL, error of each layer]
    sums = torch.zeros(3 + count, dtype=torch.float64, device=device)
    with evaluating(teacher, student, device=device, autocast_dtype=autocast_dtype):
        for batch in tqdm(batches, desc=progress, disable=progress is None, unit="batch"):
            # One split of the batch for both: into documents as soon as one of the models needs that.
            splitter = teacher if is_transformers(teacher) else student
            for inputs in inputs_for(splitter, batch, device):
                keep = inputs["labels"] != IGNORE_INDEX
                sums += _compare(teacher, student, inputs, keep, chunk_tokens)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(sums)
    tokens, same, kl, *errors = sums.tolist()
    if not tokens:
        raise ValueError("agreement: the data has no token to predict (every label is ignored)")
    return AgreementResult({i: e / tokens for i, e in enumerate(errors)}, same / tokens, kl / tokens, int(tokens))


def _compare(
    teacher: nn.Module, student: nn.Module, inputs: Mapping[str, Any], keep: Tensor, chunk_tokens: int
) -> Tensor:
    def compute_teacher() -> tuple[list[Tensor], Tensor]:
        return _run(teacher, inputs, keep)

    teacher_states, teacher_hidden = gathered(teacher, compute_teacher)

    def compute_student() -> Tensor:
        student_states, student_hidden = _run(student, inputs, keep)
        errors = [_relative_error(s, t) for s, t in zip(student_states, teacher_states)]

        def heads() -> Tensor:
            both = torch.zeros(2, dtype=torch.float64, device=keep.device)  # same top token, KL
            for s, t in zip(student_hidden.split(chunk_tokens), teacher_hidden.split(chunk_tokens)):
                student_logits, teacher_logits = head_of(student)(s), head_of(teacher)(t)
                if student_logits.shape[-1] != teacher_logits.shape[-1]:
                    raise ValueError(
                        f"agreement: vocabularies differ, teacher {teacher_logits.shape[-1]}, "
                        f"student {student_logits.shape[-1]}"
                    )
                both[0] += (student_logits.argmax(-1) == teacher_logits.argmax(-1)).sum()
                log_q, log_p = _log_softmax(student_logits), _log_softmax(teacher_logits)
                both[1] += (log_p.exp() * (log_p - log_q)).sum(-1).double().sum()
            return both

        return torch.cat([keep.sum().double()[None], gathered(teacher, heads), *(error[None] for error in errors)])

    return gathered(student, compute_student)


def _relative_error(student: Tensor, teacher: Tensor) -> Tensor:
    wide = torch.promote_types(teacher.dtype, torch.float32)
    student, teacher = student.to(wide), teacher.to(wide)
    ratio = (student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-30)
    return ratio.double().sum()


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
