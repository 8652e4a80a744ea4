"""Retrieval tasks whose answers the model writes itself, a student's beside its teacher's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tcal_components.evaluation.recall.tasks import Example
from tcal_components.evaluation.written import written

Key = tuple[str, int]  # task and distance


def answers(
    model: nn.Module,
    examples: Sequence[Example],
    *,
    batch_size: int = 32,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = None,
) -> list[bool]:
    """Whether the model itself writes the answer of each retrieval example, token by token.

    Args:
        model: As in :func:`continuations`.
        examples: See :func:`~tcal_components.evaluation.recall.tasks.make_examples`.
        batch_size: Examples at once.
        autocast_dtype: Compute under autocast to this type.
        progress: Label of a progress bar; None shows none.

    Returns:
        list[bool]: For each example, whether its text begins with the whole answer.
    """
    prompts = [example.tokens[: -example.answer_length] for example in examples]
    longest = max(example.answer_length for example in examples)
    made = written(
        model,
        prompts,
        max_new_tokens=longest,
        batch_size=batch_size,
        autocast_dtype=autocast_dtype,
        progress=progress,
    )
    return [text[: example.answer_length] == example.answer for text, example in zip(made, examples)]


def win_or_tie(student: Sequence[float], teacher: Sequence[float]) -> float:
    """Share of the examples on which the student's score is at least the teacher's."""
    return sum(ours >= theirs for ours, theirs in zip(student, teacher, strict=True)) / len(student)


def task_rows(by_model: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, dict[str, float]]:
    """The section ``generation`` of a report.

    Args:
        by_model: For each model, the teacher first, the score of every example of each task.

    Returns:
        dict: By task the mean of each model, and ``win_or_tie`` of the first student.
    """
    rows: dict[str, dict[str, float]] = {}
    for name, tasks in by_model.items():
        for task, values in tasks.items():
            rows.setdefault(task, {})[name] = sum(values) / len(values)
    for task, row in rows.items():
        first = next((name for name in row if name != "teacher"), None)
        if first is not None and "teacher" in row:
            row["win_or_tie"] = win_or_tie(by_model[first][task], by_model["teacher"][task])
    return rows


def answer_report(right: Mapping[str, Mapping[Key, Sequence[bool]]]) -> dict[str, Any]:
    """The section ``generation`` of a report, over all distances, and the rows of ``evaluation.answers``.

    Args:
        right: For each model, the teacher first, what :func:`answers` found.
    """
    rows = []
    by_task: dict[str, dict[str, list[float]]] = {}
    for name, found in right.items():
        by_task[name] = {}
        for (task, distance), values in found.items():
            row = {"model": name, "task": task, "distance": distance, "examples": len(values)}
            compared = win_or_tie(values, right["teacher"][task, distance])
            rows.append({**row, "exact": sum(values) / len(values), "win_or_tie": compared})
            by_task[name].setdefault(task, []).extend(values)
    return {"generation": task_rows(by_task), "evaluation": {"answers": rows}}
