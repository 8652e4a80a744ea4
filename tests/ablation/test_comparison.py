import math

import pytest

from tcal_components.ablation.comparison import (
    fewer_tokens,
    first_reach,
    lower_envelope,
    mean_curve,
    spread,
    summarise,
    targets,
    tokens_to_ratios,
    value_at,
)

CURVE = [(0, 1.0), (10, 0.5), (30, 0.125)]


def test_curves_are_linear_in_the_logarithm():
    assert value_at(CURVE, 0) == 1.0 and value_at(CURVE, 10) == pytest.approx(0.5)
    assert value_at(CURVE, 20) == pytest.approx(0.25)
    assert value_at(CURVE, 31) is None and value_at([(0, 0.7)], 5) is None and value_at([], 0) is None
    assert first_reach(CURVE, 2.0) == 0 and first_reach(CURVE, 0.5) == pytest.approx(10)
    assert first_reach(CURVE, 0.25) == pytest.approx(20) and first_reach(CURVE, 0.1) is None
    assert first_reach([(0, 1.0), (5, 0.4), (6, 0.9), (7, 0.3)], 0.4) == 5, "the first time counts"


def test_spread_needs_every_seed():
    assert spread([1.0, 3.0]) == {"mean": 2.0, "std": pytest.approx(math.sqrt(2)), "count": 2, "of": 2}
    assert spread([1.0, None]) == {"mean": None, "std": None, "count": 1, "of": 2}
    assert spread([2.0])["std"] is None and spread([])["mean"] is None


def cell(start, seed, errors, alignment="ours"):
    return {
        "start": start,
        "alignment": alignment,
        "seed": seed,
        "curve": [(10 * i, e) for i, e in enumerate(errors)],
        "steps": 10 * (len(errors) - 1),
        "tokens": {"calibration": 100, "alignment": 1000 * (len(errors) - 1)},
        "seconds": {"initialize": 1.0, "align": 2.0},
        "error_last": errors[-1],
        "perplexity": 20.0 + seed,
    }


def test_rows_count_the_steps_to_the_error_of_the_reference():
    cells = [cell("naive", 0, [1.0, 0.4, 0.2]), cell("taylor", 0, [0.5, 0.2, 0.1]), cell("naive", 1, [1.0, 0.5, 0.3])]
    cells += [cell("taylor", 1, [0.5, 0.4, 0.31]), cell("taylor", 0, [0.5], alignment="none")]
    goals = targets(cells, start="naive", alignment="ours", steps=[20])
    assert goals == {"0": {"20": pytest.approx(0.2)}, "1": {"20": pytest.approx(0.3)}}
    rows = {(row["start"], row["alignment"]): row for row in summarise(cells, goals, after=10)}
    assert rows["naive", "ours"]["steps_to"]["20"]["mean"] == pytest.approx(20)
    taylor = rows["taylor", "ours"]
    assert taylor["steps_to"]["20"] == {"mean": None, "std": None, "count": 1, "of": 2}, "seed 1 stays above"
    assert taylor["error_after"]["mean"] == pytest.approx(0.3) and taylor["seconds"]["mean"] == 3.0
    assert taylor["perplexity"]["mean"] == 20.5 and taylor["seeds"] == [0, 1]
    none = rows["taylor", "none"]
    assert none["steps_to"] == {} and none["error_after"]["mean"] is None and none["error_last"]["mean"] == 0.5


def test_mean_curve():
    assert mean_curve([{"step": 3, "error": {0: 0.2, 5: 0.4}}]) == [(3, pytest.approx(0.3))]


def test_tokens_to_ratios_take_the_best_of_the_grid():
    runs = [
        {"curve": [{"tokens": 0, "perplexity": 100.0}, {"tokens": 1000, "perplexity": 15.0}]},
        {
            "curve": [
                {"tokens": 0, "perplexity": 100.0},
                {"tokens": 500, "perplexity": 15.0},
                {"tokens": 900, "perplexity": 12.0},
            ]
        },
    ]
    tokens, fastest = tokens_to_ratios(runs, 10.0, [1.5, 1.2, 1.05])
    assert tokens == {"1.5": pytest.approx(500), "1.2": pytest.approx(900), "1.05": None}
    assert fastest == {"1.5": runs[1], "1.2": runs[1], "1.05": None}


def test_another_run_of_the_grid_may_be_the_fastest_to_each_ratio():
    def run(name, *points):
        return {"name": name, "curve": [{"tokens": t, "perplexity": p} for t, p in points]}

    short, long = run("short", (0, 100.0), (100, 15.0), (200, 14.0)), run("long", (0, 100.0), (100, 20.0), (400, 11.0))
    diverged = run("diverged", (0, 100.0))
    for runs in ([diverged, short, long], [long, short, diverged]):
        tokens, fastest = tokens_to_ratios(runs, 10.0, [1.5, 1.1, 1.0])
        assert tokens == {"1.5": pytest.approx(100), "1.1": pytest.approx(400), "1": None}
        assert [run and run["name"] for run in fastest.values()] == ["short", "long", None]
        assert lower_envelope(runs) == [
            {"tokens": 0, "perplexity": 100.0},
            {"tokens": 100, "perplexity": 15.0},
            {"tokens": 200, "perplexity": 14.0},
            {"tokens": 400, "perplexity": 11.0},
        ]
    rising = run("rising", (0, 9.0), (5, 12.0), (10, 8.0))
    assert [row["perplexity"] for row in lower_envelope([rising])] == [9.0, 9.0, 8.0] and lower_envelope([]) == []


def test_fewer_tokens_than_a_baseline():
    baseline = {"2": 600.0, "1.5": 900.0, "1.2": None, "1.1": None}
    mine = {"2": 0.0, "1.5": 300.0, "1.2": 400.0, "1.1": None}
    assert fewer_tokens(mine, baseline, 1000.0) == {"2": None, "1.5": 3.0, "1.2": {"at_least": 2.5}, "1.1": None}
    assert fewer_tokens(baseline, baseline, 1000.0) == {"2": 1.0, "1.5": 1.0, "1.2": None, "1.1": None}
    assert fewer_tokens(mine, baseline, 0.0)["1.2"] is None, "a baseline that spent nothing bounds nothing"
