"""Plots of a report, as PNG files beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tcal_components.reporting._canvas import DARK, LIGHT, MID, SERIES, TEACHER, figure, layer_axis, log_axis
from tcal_components.reporting._format import short_number, short_tokens
from tcal_components.reporting.evaluation_plots import EVALUATION_PLOTS

_log = logging.getLogger(__name__)

STAGE_NAMES = {
    "naive": "plain copy",
    "analytic": "started\n(no training)",
    "aligned": "aligned",
    "distilled": "distilled",
}


def _kept(report: Mapping[str, Any]) -> list[int]:
    """Layers that keep attention."""
    return (report.get("student") or {}).get("retained_layers") or []


def _alignment_error(axis: Any, report: Mapping[str, Any]) -> None:
    errors: Mapping[str, Mapping[str, float | None]] = report["alignment_error"]
    layers = sorted(int(layer) for layer in errors)
    first = [errors[str(layer)].get("first") for layer in layers]
    last = [errors[str(layer)].get("last") for layer in layers]
    for layer, begin, end in zip(layers, first, last):
        if begin is not None and end is not None:
            axis.plot([layer, layer], [begin, end], color="#bbbbbb", linewidth=1.2, zorder=1)
    for values, label, face in ((first, "before alignment", "white"), (last, "after alignment", DARK)):
        points = [(layer, value) for layer, value in zip(layers, values) if value is not None]
        if points:
            x, y = zip(*points)
            edge = MID if face == "white" else DARK
            axis.scatter(x, y, s=34, facecolor=face, edgecolor=edge, linewidth=1.6, label=label, zorder=2)
    axis.set_ylim(bottom=0)
    top = axis.get_ylim()[1]
    axis.set_ylim(0, top * 1.18)  # room for the legend above the points
    layer_axis(axis, layers, _kept(report))
    axis.set_ylabel("relative error, held out")
    axis.set_title("Error of every converted layer")
    axis.legend(loc="upper center", ncols=3, columnspacing=1.2, handletextpad=0.5)


def _teacher_line(axis: Any, teacher: float) -> None:
    """Its level as a line."""
    axis.axhline(teacher, color=TEACHER, linestyle="--", linewidth=1.3, label=f"teacher: {short_number(teacher)}")


def _perplexity(axis: Any, report: Mapping[str, Any]) -> None:
    values = [(name, report["perplexity"].get(name)) for name in STAGE_NAMES]
    values = [(name, value) for name, value in values if value]
    teacher = (report.get("teacher") or {}).get("perplexity")
    everything = [value for _, value in values] + ([teacher] if teacher else [])
    low, high = min(everything), max(everything)
    shades = {"naive": "#c9c9c9", "analytic": LIGHT, "aligned": MID, "distilled": DARK}
    log_axis(axis, low / 1.8, high * max(2.0, (high / low) ** 0.16))
    bars = axis.bar(
        [STAGE_NAMES[name] for name, _ in values],
        [value for _, value in values],
        color=[shades[name] for name, _ in values],
        edgecolor="#333333",
        linewidth=0.8,
        width=0.62,
    )
    for bar, (_, value) in zip(bars, values):
        axis.text(bar.get_x() + bar.get_width() / 2, value * 1.04, short_number(value), ha="center", va="bottom")
    if teacher:
        _teacher_line(axis, teacher)
        axis.legend(loc="upper right")
    axis.grid(False, axis="x")
    axis.set_ylabel("held-out perplexity (log scale)")
    axis.set_title("Perplexity after each stage")


def plot_report(report: Mapping[str, Any], path: Path) -> bool:
    """Alignment error by layer and perplexity by stage; ``False`` (nothing drawn) when the report has neither."""
    errors = report.get("alignment_error") or {}
    panels: list[Callable[[Any], None]] = []
    if any(value is not None for row in errors.values() for value in row.values()):
        panels.append(lambda axis: _alignment_error(axis, report))
    if any(report["perplexity"].values()):
        panels.append(lambda axis: _perplexity(axis, report))
    if not panels:
        return False
    with figure(len(panels), path=path) as (_, axes):
        for panel, axis in zip(panels, axes):
            panel(axis)
    return True


def _heads(value: Any) -> list[float]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if item is not None]


def _before_after(
    axis: Any, rows: Mapping[str, Mapping[str, Any]], before: str, after: str, kept: Sequence[int]
) -> list[float]:
    """One point a head, two columns a layer: initialized (open, left) and trained (filled, right); returns all values."""
    layers = sorted(int(layer) for layer in rows)
    drawn: list[float] = []
    for key, shift, face, edge, label in (
        (before, -0.17, "white", MID, "initialized"),
        (after, 0.17, DARK, DARK, "after training"),
    ):
        points = [(layer + shift, value) for layer in layers for value in _heads(rows[str(layer)].get(key))]
        if points:
            x, y = zip(*points)
            axis.scatter(x, y, s=16, facecolor=face, edgecolor=edge, linewidth=1.0, label=label)
            drawn += y
    layer_axis(axis, layers, kept)
    return drawn


def _legend_above(axis: Any) -> None:
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def plot_half_life(report: Mapping[str, Any], path: Path) -> bool:
    """Half-life of the state by layer and head, before and after training."""
    rows = report.get("half_life") or {}
    if not rows:
        return False
    with figure(1, width=8.0, path=path) as (_, (axis,)):
        drawn = [value for value in _before_after(axis, rows, "before", "after", _kept(report)) if value > 0]
        log_axis(axis, min(drawn, default=1) / 1.2, max(drawn, default=10) * 1.2)
        axis.set_ylabel("half-life (tokens, log scale)")
        axis.set_title("Half-life of the state: one point a head", pad=26)
        _legend_above(axis)
    return True


def plot_gates(report: Mapping[str, Any], path: Path) -> bool:
    """Write gate and output gate by layer and head, before and after training."""
    rows = report.get("gates") or {}
    panels = [
        (key, title)
        for key, title in (("write", "Write gate, mean beta"), ("output", "Output gate, mean silu(g)"))
        if any(f"{key}_{when}" in row for row in rows.values() for when in ("before", "after"))
    ]
    if not panels:
        return False
    with figure(len(panels), width=6.0, path=path) as (_, axes):
        for axis, (key, title) in zip(axes, panels):
            _before_after(axis, rows, f"{key}_before", f"{key}_after", _kept(report))
            low, high = axis.get_ylim()
            axis.set_ylim(*((0, 1) if key == "write" else (min(0, low), max(0, high))))
            axis.set_ylabel(title + (" (0 shut, 1 open)" if key == "write" else ""))
            _legend_above(axis)
    return True


_MARKED_POINTS = 24


def plot_distillation(report: Mapping[str, Any], path: Path) -> bool:
    """Perplexity of one student against the tokens of its distillation, and the teacher's; False where there is none."""
    rows = report.get("recovery_curve") or []
    if not isinstance(rows, list):
        return False
    rows = [row for row in rows if row["perplexity"]]
    if len(rows) < 2:
        return False
    x, y = zip(*((row["tokens"] - rows[0]["tokens"], row["perplexity"]) for row in rows))
    teacher = (report.get("teacher") or {}).get("perplexity")
    levels = [*y, *([teacher] if teacher else [])]
    room = max(1.001, (max(levels) / min(levels)) ** 0.08)
    with figure(1, width=8.0, path=path) as (_, (axis,)):
        axis.plot(x, y, color=DARK, marker="o", markersize=4.5, markevery=_markers(x), label="student")
        if teacher:
            _teacher_line(axis, teacher)
        log_axis(axis, min(levels) / room, max(levels) * room, words=lambda value: short_number(value, 4))
        axis.xaxis.set_major_formatter(lambda value, _: short_tokens(value))
        axis.set_xlim(-0.03 * x[-1], 1.17 * x[-1])  # room for the last number
        last = short_number(y[-1], 4) + (f"\n({short_number(y[-1] / teacher, 4)} x)" if teacher else "")
        axis.annotate(last, (x[-1], y[-1]), xytext=(8, 0), textcoords="offset points", va="center")
        axis.set_xlabel("tokens of the distillation")
        axis.set_ylabel("held-out perplexity (log scale)")
        axis.set_title("Distillation")
        axis.legend(loc="upper right")
    return True


def _markers(points: Sequence[Any]) -> float | None:
    """A fixed distance apart where they would cover the line."""
    return 0.06 if len(points) > _MARKED_POINTS else None


def plot_recovery(report: Mapping[str, Any], path: Path) -> bool:
    """Perplexity against the tokens spent, where ``recovery_curve`` holds a list of rows by name.

    Drawn as what is missing to the teacher, in per cent, where every point misses something: near the teacher, where the
    curves are to be told apart, perplexity itself shows nothing.
    """
    curves = report.get("recovery_curve") or {}
    if isinstance(curves, list):
        return False
    curves = {
        name: [(row["tokens"], row["perplexity"]) for row in rows if row["tokens"] and row["perplexity"]]
        for name, rows in curves.items()
    }
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        return False
    teacher = (report.get("teacher") or {}).get("perplexity")
    values = [y for points in curves.values() for _, y in points]
    label = "held-out perplexity (log scale)"
    if above := bool(teacher and min(values) > teacher):
        curves = {name: [(x, 100 * (y / teacher - 1)) for x, y in points] for name, points in curves.items()}
        values = [100 * (y / teacher - 1) for y in values]
        label = "above the teacher's perplexity (%, log scale)"
    elif teacher:
        values.append(teacher)
    with figure(1, width=8.0, path=path) as (_, (axis,)):
        for (name, points), (colour, line, marker) in zip(curves.items(), SERIES * (1 + len(curves) // len(SERIES))):
            x, y = zip(*points)
            style = {"color": colour, "linestyle": line, "marker": marker, "markersize": 4.5}
            axis.plot(x, y, **style, markevery=_markers(points), label=name)
        if teacher and not above:
            _teacher_line(axis, teacher)
        spent = [x for points in curves.values() for x, _ in points]
        log_axis(axis, min(spent) / 1.1, max(spent) * 1.1, side="x", words=short_tokens)
        log_axis(axis, min(values) / 1.12, max(values) * 1.15)
        axis.set_xlabel("tokens spent: calibration + alignment + distillation (log scale)")
        axis.set_ylabel(label)
        axis.set_title(f"Recovery (teacher: {short_number(teacher)})" if teacher and above else "Recovery")
        axis.legend(loc="upper right")
    return True


def plot_resources(report: Mapping[str, Any], path: Path) -> bool:
    """Time and peak memory of each stage."""
    memory_label = "peak memory (GiB)"
    tables = (("seconds", "time (s)"), ("peak_memory_gib", memory_label))
    panels = [
        (label, {stage: value for stage, value in report[key].items() if value is not None}) for key, label in tables
    ]
    panels = [(label, rows) for label, rows in panels if rows]
    if not panels:
        return False
    with figure(len(panels), width=5.0, height=3.0, path=path) as (_, axes):
        for axis, (label, rows) in zip(axes, panels):
            names = list(rows)[::-1]  # the first stage on top
            bars = axis.barh(names, [rows[name] for name in names], color=DARK if label == memory_label else MID)
            axis.bar_label(bars, [short_number(rows[name]) for name in names], padding=3)
            axis.set_xlim(0, max(max(rows.values()), 1e-9) * 1.2)
            axis.set_xlabel(label)
            axis.grid(False, axis="y")
    return True


PLOTS: tuple[tuple[str, str, Callable[[Mapping[str, Any], Path], bool]], ...] = (
    ("report.png", "Error of every converted layer and perplexity by stage", plot_report),
    ("distillation.png", "Perplexity against the tokens of the distillation", plot_distillation),
    ("recovery.png", "Perplexity against the tokens spent", plot_recovery),
    ("half_life.png", "Half-life by layer and head", plot_half_life),
    ("gates.png", "Gate openness by layer and head", plot_gates),
    ("resources.png", "Time and memory by stage", plot_resources),
)


def write_plots(report: Mapping[str, Any], output_dir: str | Path) -> list[tuple[str, str]]:
    """Draws every plot that the report has numbers for.

    Returns:
        ``(file name, caption)`` of each file written; empty, with a line in the log, when matplotlib is missing.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        _log.warning("no plots: matplotlib is not installed (pip install matplotlib)")
        return []
    written = []
    for name, caption, draw in PLOTS + EVALUATION_PLOTS:
        if draw(report, output_dir / name):
            written.append((name, caption))
    return written
