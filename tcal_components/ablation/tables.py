"""Tables and plots of ``ablate_initialization``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcal_components.reporting._canvas import DARK, LIGHT, MID, SERIES, TEACHER, figure, log_axis
from tcal_components.reporting._format import short_number, short_tokens, table

_GRID = "Every column has the best of a start's runs for itself."
_FEWER = (
    "How many times fewer tokens than {baseline}, each with its best run. '≥': {baseline} has not reached the ratio by the "
    "end of its longest run."
)
_CURVES = "In the plot below, the curve of a start is the best perplexity of any of its runs so far."


def _spread(value: Mapping[str, Any], digits: int = 4) -> str | None:
    """``18.4 ± 0.2``; ``2 of 3 seeds`` where not every seed has a number; nothing where none has."""
    if value["mean"] is None:
        return f"{value['count']} of {value['of']} seeds" if value["count"] else None
    text = short_number(value["mean"], digits)
    return text if value["std"] is None else f"{text} ± {short_number(value['std'], 2)}"


def ablation_table(ablation: Mapping[str, Any], teacher: float | None) -> str:
    """One row a start and alignment.

    Args:
        ablation: section ``ablation`` of the report.
        teacher: the teacher's perplexity.

    Returns:
        Markdown table.
    """
    goals, reference = ablation["target_steps"], ablation["target_start"]
    header = [
        "start",
        "alignment",
        "perplexity",
        "ratio to teacher",
        "error, first",
        f"after {ablation['after_steps']}",
    ]
    header += ["last", *(f"steps (tokens) to {reference} after {step}" for step in goals), "tokens", "seconds"]
    rows = []
    for row in ablation["rows"]:
        perplexity = row["perplexity"]["mean"]
        cells: list[Any] = [row["start"], row["alignment"], _spread(row["perplexity"])]
        cells.append(f"{short_number(perplexity / teacher, 4)}x" if perplexity and teacher else None)
        cells += [_spread(row[key]) for key in ("error_first", "error_after", "error_last")]
        for step in goals:
            reached, tokens = row["steps_to"].get(str(step)), row["tokens_to"].get(str(step))
            if reached is None or tokens is None or tokens["mean"] is None:
                cells.append(_spread(reached, 3) if reached and reached["count"] else None)
            else:
                cells.append(f"{_spread(reached, 3)} ({short_tokens(tokens['mean'])})")
        cells += [short_tokens(sum(row["tokens"].values())), _spread(row["seconds"], 3)]
        rows.append(cells)
    return table(header, rows)


def recovery_table(recovery: Mapping[str, Any]) -> str:
    """One row a start: tokens to ratios of the teacher's perplexity, each the best of the grid.

    Args:
        recovery: section ``recovery`` of the report.

    Returns:
        Markdown table.
    """
    ratios = recovery["ratios"]
    header = (
        "start",
        "tokens before",
        "perplexity, first",
        "last",
        "best lr / base, tokens, batch",
        *(f"tokens to {r}x" for r in ratios),
    )
    rows = []
    for name, start in recovery["starts"].items():
        best = start["best"]
        reached = [start["tokens_to"].get(str(ratio)) for ratio in ratios]
        rows.append(
            (
                name,
                short_tokens(start["tokens_before"]),
                short_number(best["curve"][0]["perplexity"], 4),
                short_number(best["curve"][-1]["perplexity"], 4),
                f"{best['lr']:g} / {best['base_lr']:g}, {short_tokens(best['tokens'])}, {best['batch_size']}",
                *(None if value is None else short_tokens(value) for value in reached),
            )
        )
    return table(header, rows)


def fewer_tokens_table(recovery: Mapping[str, Any]) -> str:
    """One row a start: how many times fewer tokens than the baseline it needs to each ratio.

    Args:
        recovery: section ``recovery`` of the report.

    Returns:
        Markdown table.
    """
    ratios = recovery["ratios"]
    header = [f"fewer tokens than {recovery['baseline']}", *(f"to {ratio}x" for ratio in ratios)]
    rows = [
        (name, *(_fewer(start["fewer_than"][ratio]) for ratio in ratios)) for name, start in recovery["starts"].items()
    ]
    return table(header, rows)


def _fewer(value: float | Mapping[str, float] | None) -> str | None:
    """``3.2x``; ``≥ 3.2x`` where the baseline never came so far."""
    if isinstance(value, Mapping):
        return f"≥ {short_number(value['at_least'])}x"
    return None if value is None else f"{short_number(value)}x"


def ablation_markdown(report: Mapping[str, Any]) -> str:
    """The sections of the ablation and of the recovery.

    Args:
        report: content of ``report.json``.

    Returns:
        Markdown.
    """
    ablation, teacher = report["ablation"], report["teacher"].get("perplexity")
    seeds = len(ablation["seeds"])
    note = (
        f"Mean over {seeds} seed{'s' if seeds != 1 else ''}"
        + (" ± standard deviation" if seeds > 1 else "")
        + ". Every "
        "row has the same text. Errors are relative, on held-out text, mean over the converted layers. 'Steps to "
        f"{ablation['target_start']} after n': steps until the error that {ablation['target_start']} has after n steps of "
        f"alignment '{ablation['target_alignment']}'. Teacher: perplexity {short_number(teacher, 4) if teacher else '-'}."
    )
    parts = ["## Starts and alignments", note, ablation_table(ablation, teacher), "![Ablation](ablation.png)"]
    recovery = report.get("recovery")
    if recovery:
        parts += [
            "## Recovery by distillation",
            "Tokens count everything spent: calibration, alignment, distillation. " + _GRID,
            recovery_table(recovery),
            _FEWER.format(baseline=recovery["baseline"]),
            fewer_tokens_table(recovery),
            _CURVES,
        ]
    return "\n\n".join(parts) + "\n"


def plot_ablation(ablation: Mapping[str, Any], teacher: float | None, path: Path) -> bool:
    """Perplexity of every cell, and the error curves of each alignment.

    Args:
        ablation: section ``ablation`` of the report.
        teacher: the teacher's perplexity.
        path: of the PNG file.

    Returns:
        bool: False, nothing drawn, where there is no cell or matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    rows = [row for row in ablation["rows"] if row["perplexity"]["mean"]]
    if not rows:
        return False
    seed = ablation["seeds"][0]
    curves: dict[str, dict[str, Sequence[tuple[float, float]]]] = {}
    for cell in ablation["cells"]:
        if cell["seed"] == seed and cell["steps"]:
            a_step = cell["tokens"]["alignment"] / cell["steps"]
            scaled = [(step * a_step, error) for step, error in cell["curve"]]
            curves.setdefault(cell["alignment"], {})[cell["start"]] = scaled
    height = max(4.0, 0.32 * len(rows) + 1.4)
    with figure(1 + len(curves), width=6.4, height=height, path=path) as (_, axes):
        _bars(axes[0], rows, teacher)
        everything = [y for group in curves.values() for points in group.values() for _, y in points]
        for axis, (alignment, group) in zip(axes[1:], curves.items()):
            for (name, points), (colour, line, marker) in zip(group.items(), SERIES * (1 + len(group) // len(SERIES))):
                x, y = zip(*points)
                axis.plot(x, y, color=colour, linestyle=line, marker=marker, markersize=3.5, label=name)
            log_axis(axis, min(everything) / 1.1, max(everything) * 1.15)
            axis.xaxis.set_major_formatter(lambda value, _: short_tokens(value))
            axis.set_xlabel("alignment tokens")
            axis.set_ylabel("relative error, held out (log scale)")
            axis.set_title(f"Alignment '{alignment}', seed {seed}")
            axis.legend(loc="upper right")
    return True


def _bars(axis: Any, rows: Sequence[Mapping[str, Any]], teacher: float | None) -> None:
    names = list(dict.fromkeys(row["alignment"] for row in rows))
    shades = dict(zip(names, [LIGHT, MID, DARK, "#c9c9c9", "#5b1a4a", "#7a7a7a"] * (1 + len(names) // 6)))
    labels = [f"{row['start']}, {row['alignment']}" for row in rows][::-1]
    values = [row["perplexity"]["mean"] for row in rows][::-1]
    bars = axis.barh(
        labels, values, color=[shades[row["alignment"]] for row in rows][::-1], edgecolor="#333333", linewidth=0.6
    )
    axis.bar_label(bars, [short_number(value) for value in values], padding=3)
    low = min([*values, *([teacher] if teacher else [])])
    high = max(values) * max(2.5, (max(values) / low) ** 0.25)
    log_axis(axis, low / 1.5, high, side="x")
    if teacher:
        label = f"teacher: {short_number(teacher)}"
        axis.axvline(teacher, color=TEACHER, linestyle="--", linewidth=1.3, label=label)
        axis.legend(loc="lower right")
    axis.grid(False, axis="y")
    axis.set_xlabel("held-out perplexity (log scale)")
    axis.set_title("No distillation")
