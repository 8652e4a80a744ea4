"""Tables of a report's sections ``generation`` and ``continuations``: what teacher and students write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcal_components.reporting._format import table


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _continuations(section: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            row["agreement_tokens"],
            _percent(row["equal_tokens"]),
            _percent(row["win_or_tie"]),
            row["teacher_nll"]["greedy"],
            row["teacher_nll"]["sampled"],
            _percent(row["repetition"]["greedy"]),
            _percent(row["repetition"]["sampled"]),
        )
        for name, row in section["models"].items()
    ]
    header = (
        "model",
        "first tokens as the teacher's",
        "equal tokens",
        "win or tie",
        "teacher's nats a token, greedy",
        "sampled",
        "repeated 4-grams, greedy",
        "sampled",
    )
    note = (
        f"{section['new_tokens']} tokens after each of {section['prompts']} held-out prompts, greedy and sampled at "
        f"temperature {section['temperature']:g}. Win or tie: prompts after which the teacher finds the greedy text at "
        "least as likely as its own.\n\n"
    )
    return note + table(header, rows)


def _answers(generation: Mapping[str, Mapping[str, float]]) -> str:
    tasks = {task: row for task, row in generation.items() if task != "continuation"}
    if not tasks:
        return ""
    models = [name for name in next(iter(tasks.values())) if name != "win_or_tie"]
    rows = [
        (task, *(_percent(row.get(name)) for name in models), _percent(row.get("win_or_tie")))
        for task, row in tasks.items()
    ]
    note = "Share of right answers, which the model writes itself; win or tie is the first student's, by example.\n\n"
    return note + table(("task", *models, "win or tie"), rows)


def generation_sections(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(title, body)`` of both tables; an empty body where there are no numbers."""
    section = report.get("continuations")
    return [
        ("Continuations of held-out text", _continuations(section) if section else ""),
        ("Generated answers", _answers(report.get("generation") or {})),
    ]
