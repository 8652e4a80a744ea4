"""Accuracy of retrieval by distance: teacher-forced, so one forward answers a whole batch and no generation is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.evaluation.access import device_of, evaluating, final_hidden, gathered, head_of
from tcal_components.evaluation.recall.tasks import TASKS, Example, Tokenizer, chance_level, make_examples


@dataclass(frozen=True)
class RetrievalResult:
    """Accuracy at one distance.

    Attributes:
        task: Name in ``TASKS``.
        distance: Tokens between statement and answer.
        examples: How many questions.
        accuracy: Share of answer tokens for which the model's most likely token is right, the earlier ones given.
        exact: Share of answers with every token right.
        chance: ``accuracy`` of a guess among the tokens that are possible at each place.
    """

    task: str
    distance: int
    examples: int
    accuracy: float
    exact: float
    chance: float

    def as_dict(self) -> dict[str, Any]:
        """The row of a report's ``evaluation.retrieval``, without the model's name."""
        return asdict(self)


def _predictions(model: nn.Module, examples: Sequence[Example], device: torch.device) -> list[Tensor]:
    """The most likely token at each place of each answer."""
    longest = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.long)
    for row, example in enumerate(examples):
        # Padding on the right: a causal model's answers do not see it, so it needs no mask.
        tokens[row, : len(example.tokens)] = torch.tensor(example.tokens)

    def compute() -> list[Tensor]:
        hidden = final_hidden(model, {"tokens": tokens.to(device)})
        head, found = head_of(model), []
        for row, example in enumerate(examples):
            end = len(example.tokens) - 1  # the state before a token predicts it
            found.append(head(hidden[row, end - example.answer_length : end]).argmax(-1).cpu())
        return found

    return gathered(model, compute)


def score(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    batch_size: int = 4,
    device: torch.device | str | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> tuple[float, float]:
    """Shares of right answer tokens and of wholly right answers.

    Args:
        model: A HybridDecoder or a causal language model of transformers.
        examples: See ``make_examples``.
        batch_size: Examples a forward.
        device: Where the model computes. Default: where its weights are.
        autocast_dtype: Compute under autocast to this type.

    Returns:
        tuple[float, float]: ``accuracy`` and ``exact``.
    """
    device = device_of(model) if device is None else torch.device(device)
    right = total = whole = 0
    with evaluating(model, device=device, autocast_dtype=autocast_dtype):
        for begin in range(0, len(examples), batch_size):
            part = examples[begin : begin + batch_size]
            for example, predicted in zip(part, _predictions(model, part, device)):
                hits = int((predicted == torch.tensor(example.answer)).sum())
                right, total = right + hits, total + example.answer_length
                whole += hits == example.answer_length
    return right / total, whole / len(examples)


def example_sets(
    tokenizer: Tokenizer, *, tasks: Sequence[str], distances: Sequence[int], examples: int, seed: int
) -> dict[tuple[str, int], list[Example]]:
    """The questions of :func:`retrieval` by task and distance, which is also how to find out whether they can be asked.

    Args:
        tokenizer: The models' tokenizer.
        tasks: Names in ``TASKS``.
        distances: Tokens between statement and answer.
        examples: Questions for each task and distance.
        seed: Of the questions.

    Returns:
        dict: The questions of each task and distance.

    Raises:
        ValueError: For an unknown task or a distance too short for its text.
    """
    work = [(task, distance) for task in tasks for distance in distances]
    return {key: make_examples(key[0], tokenizer, distance=key[1], count=examples, seed=seed) for key in work}


def retrieval(
    model: nn.Module,
    tokenizer: Tokenizer,
    *,
    tasks: Sequence[str] = tuple(TASKS),
    distances: Sequence[int] = (512, 1024, 2048),
    examples: int = 32,
    batch_size: int = 4,
    seed: int = 0,
    device: torch.device | str | None = None,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = None,
) -> list[RetrievalResult]:
    """Retrieval accuracy by task and distance; the same questions for every model.

    Args:
        model: A HybridDecoder or a causal language model of transformers.
        tokenizer: The model's tokenizer.
        tasks: Names in ``TASKS``.
        distances: Tokens between statement and answer.
        examples: Questions for each task and distance.
        batch_size: Questions a forward.
        seed: Of the questions.
        device: Where the model computes. Default: where its weights are.
        autocast_dtype: Compute under autocast to this type.
        progress: Label of a progress bar; None shows none.

    Returns:
        list[RetrievalResult]: One for each task and distance.

    Raises:
        ValueError: For an unknown task or a distance too short for its text.
    """
    sets = example_sets(tokenizer, tasks=tasks, distances=distances, examples=examples, seed=seed)
    results = []
    for (task, distance), questions in tqdm(sets.items(), desc=progress, disable=progress is None, unit="task"):
        accuracy, exact = score(model, questions, batch_size=batch_size, device=device, autocast_dtype=autocast_dtype)
        results.append(RetrievalResult(task, distance, examples, accuracy, exact, chance_level(task, tokenizer)))
    return results
