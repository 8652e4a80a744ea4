"""Plot of a comparison of runs: perplexity by stage, and against the tokens spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from tcal_components.reporting._canvas import DARK, LIGHT, MID, SERIES, TEACHER, figure, log_axis
from tcal_components.reporting._format import short_number, short_tokens

# The naive copy is often a hundred times worse and would press the others together: it is a number beside the axis.
_MARKS = (
    ("analytic", "initialized", LIGHT, "^"),
    ("aligned", "aligned", MID, "s"),
    ("distilled", "distilled", DARK, "o"),
)


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within a logarithmic axis, at most about ``most``."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in (
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9),
        (1, 1.5, 2, 3, 5, 7),
        (1, 2, 5),
        (1, 3),
        (1,),
    ):
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= most:
            break
    return ticks


def _log_x(axis: Any, low: float, high: float, formatter: Any, *, most: int) -> None:
    axis.set_xscale("log")
    axis.set_xlim(low, high)
    axis.set_xticks(_log_ticks(low, high, most))
    axis.xaxis.set_major_formatter(lambda value, _: formatter(value))
    axis.xaxis.set_minor_formatter(lambda value, _: "")


def _beside(axis: Any, y: float, *texts: str) -> None:
    """Two columns right of the axis, in points from its edge so that they keep apart at any width."""
    for offset, text in zip((55, 155), texts):
        place = {"xytext": (offset, 0), "textcoords": "offset points", "xycoords": axis.get_yaxis_transform()}
        axis.annotate(text, (1, y), ha="right", va="center", fontsize=9, annotation_clip=False, **place)


def _stages(axis: Any, rows: Sequence[Mapping[str, Any]], teacher: float | None) -> None:
    """One line a run, one mark a stage; the naive copy and the last stage as numbers on the right."""
    drawn = [mark for mark in _MARKS if any(row["perplexity"][mark[0]] for row in rows)]
    for y, row in enumerate(rows):
        values = [row["perplexity"][stage] for stage, *_ in drawn if row["perplexity"][stage]]
        if values:
            axis.plot([min(values), max(values)], [y, y], color="#bbbbbb", linewidth=1.2, zorder=1)
        if teacher is None and row["teacher_perplexity"]:
            axis.plot([row["teacher_perplexity"]], [y], color=TEACHER, marker="|", markersize=14, ls="")
        naive, last = row["perplexity"]["naive"], values[-1] if values else None
        ratio = f" ({short_number(last / row['teacher_perplexity'], 4)}x)" if last and row["teacher_perplexity"] else ""
        _beside(
            axis,
            y,
            "-" if naive is None else short_number(naive, 4),
            f"{short_number(last, 4)}{ratio}" if last else "-",
        )
    _beside(axis, -0.85, "naive", "last stage (ratio)")
    for order, (stage, label, colour, marker) in enumerate(drawn):
        points = [(row["perplexity"][stage], y) for y, row in enumerate(rows) if row["perplexity"][stage]]
        xs, ys = zip(*points)
        axis.scatter(
            xs, ys, s=46, c=colour, marker=marker, edgecolor="#333333", linewidth=0.6, zorder=3 + order, label=label
        )
    if teacher is None:
        axis.plot([], [], color=TEACHER, marker="|", markersize=14, ls="", label="its teacher")
    else:
        axis.axvline(
            teacher, color=TEACHER, linestyle="--", linewidth=1.3, label=f"teacher: {short_number(teacher, 4)}"
        )
    values = [row["perplexity"][stage] for row in rows for stage, *_ in drawn if row["perplexity"][stage]]
    values += [row["teacher_perplexity"] for row in rows if row["teacher_perplexity"]]
    margin = max(1.05, (max(values) / min(values)) ** 0.06)
    _log_x(axis, min(values) / margin, max(values) * margin, short_number, most=7)
    axis.set_yticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_ylim(len(rows) - 0.4, -0.6)  # the first run on top
    axis.grid(False, axis="y")
    axis.set_xlabel("held-out perplexity (log scale)")
    axis.set_title("Perplexity after each stage", pad=30)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, columnspacing=1.0, handletextpad=0.3)


def _recovery(axis: Any, curves: Mapping[str, Sequence[tuple[float, float]]], teacher: float | None) -> None:
    """One line a run."""
    for index, ((name, points), (colour, line, marker)) in enumerate(zip(curves.items(), cycle(SERIES))):
        x, y = zip(*points)
        face = colour if index < len(SERIES) else "white"  # the colours come again with open marks
        axis.plot(x, y, color=colour, ls=line, marker=marker, markersize=5, markerfacecolor=face, label=name)
    if teacher is not None:
        axis.axhline(
            teacher, color=TEACHER, linestyle="--", linewidth=1.3, label=f"teacher: {short_number(teacher, 4)}"
        )
    tokens = [x for points in curves.values() for x, _ in points]
    values = [y for points in curves.values() for _, y in points] + ([teacher] if teacher else [])
    log_axis(axis, min(values) / 1.05, max(values) * 1.05)
    _log_x(axis, min(tokens) / 1.15, max(tokens) * 1.15, short_tokens, most=7)
    axis.set_xlabel("tokens spent: calibration + alignment + distillation (log scale)")
    axis.set_ylabel("held-out perplexity (log scale)")
    axis.set_title("Recovery by distillation")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def _states(axis: Any, points: Sequence[tuple[str, float, float]]) -> None:
    """Alignment error against what a student keeps for a sequence, one mark a run."""
    for (name, x, y), (colour, _, marker) in zip(points, cycle(SERIES)):
        axis.plot([x], [y], color=colour, marker=marker, markersize=7, ls="", label=name)
    sizes, errors = [x for _, x, _ in points], [y for *_, y in points]
    _log_x(axis, min(sizes) / 1.2, max(sizes) * 1.2, short_number, most=7)
    axis.set_ylim(0, max(errors) * 1.15)
    axis.set_xlabel("state of the converted layers for one sequence (KiB, log scale)")
    axis.set_ylabel("alignment error, held out")
    axis.set_title("Error against state size")
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))


def plot_comparison(comparison: Mapping[str, Any], path: Path) -> bool:
    """Perplexity by stage; where runs were distilled, against the tokens spent; where states differ, error against state.

    Args:
        comparison: what :func:`tcal_components.reporting.compare.compare` returned.
        path: of the PNG file.

    Returns:
        bool: False, nothing drawn, where no run has a perplexity or matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    rows, teacher = comparison["runs"], comparison["teacher_perplexity"]
    if not any(row["perplexity"][stage] for row in rows for stage, *_ in _MARKS):
        return False
    curves = {
        row["name"]: [(p["tokens"], p["perplexity"]) for p in row["recovery_curve"] if p["tokens"] and p["perplexity"]]
        for row in rows
    }
    curves = {name: points for name, points in curves.items() if points}
    states = [
        (row["name"], row["state_bytes"] / 1024, row["alignment_error"])
        for row in rows
        if row["state_bytes"] and row["alignment_error"]
    ]
    if len({size for _, size, _ in states}) < 2:
        states = []
    panels = [lambda axis: _stages(axis, rows, teacher)]
    heights = [0.34 * len(rows) + 1.6]
    if curves:
        panels.append(lambda axis: _recovery(axis, curves, teacher))
        heights.append(max(3.8, 0.24 * len(curves) + 1.2))
    if states:
        panels.append(lambda axis: _states(axis, states))
        heights.append(max(3.4, 0.24 * len(states) + 1.2))
    width = 9.6 + 0.17 * max(0, max(len(row["name"]) for row in rows) - 36)  # names stand on both sides
    with figure(1, width=width, height=sum(heights), path=path) as (fig, (whole,)):
        whole.remove()  # one above the other: side by side, names and legend would leave the axes no room
        fig.get_layout_engine().set(h_pad=0.09)
        axes = fig.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, draw in zip(axes, panels):
            draw(axis)
    return True
