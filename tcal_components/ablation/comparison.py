"""Pure functions that compare starts: when a curve reaches a value, and means over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
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
) -> tuple[dict[str, float | None], dict[str, Mapping[str, Any] | None]]:
    """Fewest tokens at which any of the runs of one start comes within a ratio of the teacher's perplexity.

    Args:
        runs: with ``curve``: rows of ``tokens`` and ``perplexity``.
        teacher: its perplexity.
        ratios: each above 1.

    Returns:
        Two dicts by ratio (as text): the tokens, and the run that needed so few; None where no run reaches it.
    """
    tokens: dict[str, float | None] = {}
    fastest: dict[str, Mapping[str, Any] | None] = {}
    for ratio in ratios:
        key = f"{ratio:g}"
        tokens[key] = fastest[key] = None
        for run in runs:
            reached = first_reach([(row["tokens"], row["perplexity"]) for row in run["curve"]], ratio * teacher)
            best = tokens[key]
            if reached is not None and (best is None or reached < best):
                tokens[key], fastest[key] = reached, run
    return tokens, fastest


def fewer_tokens(
    tokens: Mapping[str, float | None], baseline: Mapping[str, float | None], spent: float
) -> dict[str, float | dict[str, float] | None]:
    """How many times fewer tokens than a baseline a start needs.

    Args:
        tokens: of the start, by ratio, as :func:`tokens_to_ratios` returns them.
        baseline: of the baseline, likewise.
        spent: tokens at the end of the baseline's longest run.

    Returns:
        dict: by ratio, the baseline's tokens over the start's. ``{"at_least": ...}`` where the baseline has not reached it
        with all that it spent. None where the start has not reached it, or has before a token was spent.
    """
    found: dict[str, float | dict[str, float] | None] = {}
    for ratio, mine in tokens.items():
        theirs = baseline[ratio]
        if not mine:
            found[ratio] = None
        elif theirs is not None:
            found[ratio] = theirs / mine
        else:
            found[ratio] = {"at_least": spent / mine} if spent else None
    return found


def lower_envelope(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Best perplexity of any of the runs so far.

    Args:
        runs: with ``curve``: rows of ``tokens`` and ``perplexity``.

    Returns:
        Rows likewise, one for every number of tokens at which some run was measured; the perplexity never rises.
    """
    lowest: dict[float, float] = {}
    for row in (row for run in runs for row in run["curve"]):
        lowest[row["tokens"]] = min(row["perplexity"], lowest.get(row["tokens"], math.inf))
    tokens = sorted(lowest)
    best = accumulate((lowest[count] for count in tokens), min)
    return [{"tokens": count, "perplexity": value} for count, value in zip(tokens, best)]
