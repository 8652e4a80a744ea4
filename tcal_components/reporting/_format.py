"""Numbers and tables as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def short_number(value: float, digits: int = 3) -> str:
    """``14 355``, ``143``, ``18.4``, ``0.29``: ``digits`` significant digits, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.{digits}g}"


def short_tokens(value: float) -> str:
    """``131 k``, ``1.97 M``."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f}"


def milliseconds_a_step(row: Mapping[str, Any], speed: str) -> float | None:
    """Time of one decoding step from a row's tokens per second, which count all sequences of the batch."""
    return 1000 * row.get("batch_size", 1) / row[speed] if row.get(speed) else None


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; the first column is left-aligned, the others right-aligned."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(value) for value in row) + " |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return short_number(value, 4)
    return str(value).replace("|", "\\|").replace("\n", " ")
