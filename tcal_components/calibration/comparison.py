"""Pure functions that compare starts: when a curve reaches a value, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

Curve = Sequence[tuple[float, float]]


def value_at(curve: Curve, x: float) -> float | None:
    """Value of a curve between its points, linear in the logarithm of the value.

    Args:
        curve: (x, value) with ascending x and positive values.
        x: where.

    Returns:
        The value; None outside of the curve.
    """
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1:
            share = (x - x0) / (x1 - x0) if x1 > x0 else 0.0
            return math.exp(math.log(y0) + share * (math.log(y1) - math.log(y0)))
    return curve[0][1] if curve and x == curve[0][0] else None


def first_reach(curve: Curve, target: float) -> float | None:
    """Where a curve first falls to a value, between its points linear in the logarithm of the value.

    Args:
        curve: (x, value) with ascending x and positive values.
        target: the value.

    Returns:
        x; None if the curve stays above.
    """
    if curve and curve[0][1] <= target:
        return curve[0][0]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if y1 <= target < y0:
            return x0 + (x1 - x0) * (math.log(y0) - math.log(target)) / (math.log(y0) - math.log(y1))
    return None


def mean_curve(curve: Iterable[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """An alignment's curve as (step, mean over layers of the relative held-out error)."""
    return [(int(point["step"]), fmean(point["error"].values())) for point in curve]


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Mean and standard deviation over seeds.

    Args:
        values: one a seed; None where there is no number, as where a value was not reached.

    Returns:
        dict: ``mean`` (None unless every seed has a number), ``std`` (None for one seed), ``count`` of numbers, ``of`` seeds.
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    complete = bool(known) and len(known) == len(values)
    return {
        "mean": fmean(known) if complete else None,
        "std": stdev(known) if complete and len(known) > 1 else None,
        "count": len(known),
        "of": len(values),
    }


def targets(cells: Iterable[Mapping[str, Any]], *, start: str, alignment: str, steps: Sequence[int]) -> dict[str, Any]:
    """Errors that a reference start has after some steps.

    Args:
        cells: of the ablation.
        start: the reference.
        alignment: its alignment.
        steps: after how many steps.

    Returns:
        dict: by seed (as text), by steps (as text), the error.
    """
    return {
        str(cell["seed"]): {str(step): value_at(cell["curve"], step) for step in steps}
        for cell in cells
        if cell["start"] == start and cell["alignment"] == alignment
    }


def summarise(
    cells: Sequence[Mapping[str, Any]], goals: Mapping[str, Mapping[str, float | None]], *, after: int
) -> list[dict[str, Any]]:
    """One row a start and alignment, over all seeds.

    Args:
        cells: of the ablation, in the order of the rows.
        goals: as :func:`targets` returns them.
        after: steps after which the error is shown.

    Returns:
        Rows, JSON-serialisable; numbers over seeds as :func:`spread` returns them.
    """
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["start"], cell["alignment"]), []).append(cell)
    names = list(dict.fromkeys(name for goal in goals.values() for name in goal))
    rows = []
    for (start, alignment), group in groups.items():
        row: dict[str, Any] = {"start": start, "alignment": alignment, "seeds": [cell["seed"] for cell in group]}
        row["perplexity"] = spread([cell["perplexity"] for cell in group])
        row["error_first"] = spread([cell["curve"][0][1] for cell in group])
        row["error_after"] = spread([value_at(cell["curve"], after) for cell in group])
        row["error_last"] = spread([cell["error_last"] for cell in group])
        row["steps_to"], row["tokens_to"] = {}, {}
        for name in names if group[0]["steps"] else ():
            reached = []
            for cell in group:
                goal = goals.get(str(cell["seed"]), {}).get(name)
                reached.append(None if goal is None else first_reach(cell["curve"], goal))
            a_step = group[0]["tokens"]["alignment"] / group[0]["steps"]
            row["steps_to"][name] = spread(reached)
            row["tokens_to"][name] = spread([None if step is None else step * a_step for step in reached])
        row["steps"] = group[0]["steps"]
        row["tokens"] = group[0]["tokens"]
        row["seconds"] = spread([sum(cell["seconds"].values()) for cell in group])
        rows.append(row)
    return rows


def tokens_to_ratios(
    runs: Sequence[Mapping[str, Any]], teacher: float, ratios: Sequence[float]
) -> dict[str, float | None]:
    """Fewest tokens at which any of the runs of one start comes within a ratio of the teacher's perplexity.

    Args:
        runs: with ``curve``: rows of ``tokens`` and ``perplexity``.
        teacher: its perplexity.
        ratios: each above 1.

    Returns:
        dict: by ratio (as text); None where no run reaches it.
    """
    found: dict[str, float | None] = {}
    for ratio in ratios:
        reached = [first_reach([(r["tokens"], r["perplexity"]) for r in run["curve"]], ratio * teacher) for run in runs]
        found[f"{ratio:g}"] = min((value for value in reached if value is not None), default=None)
    return found
