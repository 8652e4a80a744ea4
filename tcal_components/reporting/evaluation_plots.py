"""Plots of the ``evaluation`` section of a report: models side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tcal_components.reporting._canvas import SERIES, figure, layer_axis, log_axis
from tcal_components.reporting._format import milliseconds_a_step, short_number


def _lines(axis: Any, curves: Mapping[str, Iterable[tuple[float, Any]]]) -> None:
    for index, (name, points) in enumerate(curves.items()):
        colour, line, marker = SERIES[index % len(SERIES)]
        x, y = zip(*points)
        axis.plot(x, y, color=colour, linestyle=line, marker=marker, markersize=4.5, label=name)


def _context_axis(axis: Any, contexts: Iterable[float], label: str = "context (tokens)") -> None:
    contexts = sorted(set(contexts))
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts[:: max(1, len(contexts) // 8)])
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:g} k" if value >= 1024 else f"{value:g}")
    axis.xaxis.set_minor_formatter(lambda value, _: "")
    axis.set_xlabel(label)


def plot_context(report: Mapping[str, Any], path: Path) -> bool:
    """Perplexity by position in the document and by context length."""
    evaluation = report.get("evaluation") or {}
    by_position = {
        name: [(max(b["from"], 1), b["perplexity"]) for b in row.get("by_position") or [] if b["perplexity"]]
        for name, row in (evaluation.get("perplexity") or {}).items()
    }
    by_context = {
        name: sorted((int(length), value) for length, value in row.items() if value)
        for name, row in (evaluation.get("perplexity_by_context") or {}).items()
    }
    panels = [
        (title, label, {name: points for name, points in curves.items() if points})
        for title, label, curves in (
            ("By position in the document", "position (tokens, start of the bucket)", by_position),
            ("By context length, same tokens scored", "context (tokens)", by_context),
        )
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return False
    with figure(len(panels), height=4.3, path=path) as (fig, axes):
        for axis, (title, label, curves) in zip(axes, panels):
            _lines(axis, curves)
            _context_axis(axis, [x for points in curves.values() for x, _ in points], label)
            values = [y for points in curves.values() for _, y in points]
            log_axis(axis, min(values) / 1.1, max(values) * 1.1)
            axis.set_ylabel("perplexity (log scale)")
            axis.set_title(title)
        # Below the panels: where curves rise or fall differs from model to model.
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return True


def plot_retrieval(report: Mapping[str, Any], path: Path) -> bool:
    """Accuracy by distance, one panel a task, the chance level dotted."""
    rows = (report.get("evaluation") or {}).get("retrieval") or []
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    if not tasks:
        return False
    with figure(len(tasks), width=4.0, height=3.6, path=path) as (fig, axes):
        for axis, task in zip(axes, tasks):
            curves: dict[str, list[tuple[float, float]]] = {}
            for row in rows:
                if row["task"] == task:
                    curves.setdefault(row["model"], []).append((row["distance"], 100 * row["accuracy"]))
            _lines(axis, curves)
            chance = next(row["chance"] for row in rows if row["task"] == task)
            axis.axhline(100 * chance, color="#000000", linestyle=":", linewidth=1.2, label="chance")
            _context_axis(axis, [x for points in curves.values() for x, _ in points], "distance (tokens)")
            axis.set_ylim(-3, 103)
            axis.set_title(task.replace("_", " "))
        axes[0].set_ylabel("answer tokens predicted (%)")
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return True


def plot_agreement(report: Mapping[str, Any], path: Path) -> bool:
    """Relative error of the hidden states after each layer."""
    results = (report.get("evaluation") or {}).get("agreement") or {}
    if not results:
        return False
    with figure(1, width=8.0, path=path) as (_, (axis,)):
        curves = {
            n: sorted((int(k), v) for k, v in row["layers"].items() if v is not None) for n, row in results.items()
        }
        _lines(axis, curves)
        student = report.get("student") or {}
        kept = (student.get("retained_layers") or []) if len(results) == 1 else []  # those of the first student
        layer_axis(axis, sorted({int(x) for points in curves.values() for x, _ in points}), kept)
        axis.set_ylim(bottom=0)
        axis.set_ylabel("relative error of the hidden state")
        axis.set_title("Hidden states after each layer, student against teacher")
        axis.legend()
    return True


def plot_speed(report: Mapping[str, Any], path: Path) -> bool:
    """Prefill speed, time of a decoding step and cache size by context length; the theoretical cache size as crosses."""
    rows = (report.get("evaluation") or {}).get("speed") or []
    if not rows:
        return False
    graphs = all(row.get("graph_tokens_per_second") for row in rows)
    decode, label = (
        ("graph_tokens_per_second", "decode, CUDA graph (ms a step)")
        if graphs
        else ("decode_tokens_per_second", "decode (ms a step)")
    )
    panels: tuple[tuple[str, str, Callable[[Mapping[str, Any]], Any]], ...] = (
        ("prefill_tokens_per_second", "prefill (tokens/s)", lambda row: row["prefill_tokens_per_second"]),
        (decode, label, lambda row: milliseconds_a_step(row, decode)),
        ("cache_bytes", "cache (MiB, log scale)", lambda row: row["cache_bytes"] / 2**20),
    )
    with figure(len(panels), width=4.4, height=3.7, path=path) as (fig, axes):
        for axis, (key, label, value_of) in zip(axes, panels):
            curves: dict[str, list[tuple[float, Any]]] = {}
            for row in sorted(rows, key=lambda row: row["context"]):
                if row[key]:
                    curves.setdefault(row["model"], []).append((row["context"], value_of(row)))
            _lines(axis, curves)
            _context_axis(axis, [row["context"] for row in rows])
            axis.set_ylabel(label)
            if key == "cache_bytes":
                theory = [(r["context"], r["cache_bytes_theory"] / 2**20) for r in rows if r["cache_bytes_theory"]]
                x, y = zip(*theory) if theory else ((), ())
                axis.scatter(x, y, marker="x", s=60, color="#000000", linewidth=1.2, label="theory", zorder=3)
                sizes = [*y, *(size for points in curves.values() for _, size in points)]
                log_axis(axis, min(sizes) / 1.3, max(sizes) * 1.3)
                handles, labels = axis.get_legend_handles_labels()
            else:
                axis.set_ylim(bottom=0, top=axis.get_ylim()[1] * 1.08)
                axis.yaxis.set_major_formatter(lambda value, _: short_number(value))
        fig.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return True


EVALUATION_PLOTS = (
    ("context.png", "Perplexity by position and by context length", plot_context),
    ("retrieval.png", "Retrieval by distance", plot_retrieval),
    ("agreement.png", "Agreement of the hidden states by layer", plot_agreement),
    ("speed.png", "Speed and cache by context length", plot_speed),
)
