"""Runs that are killed, or asked to stop, in any stage end with the weights of the run that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

STAGES = ("measure", "initialize", "align", "distill", "export")
WEIGHTS = (
    "measure/statistics.safetensors",
    "initialize/mixers.safetensors",
    "align/mixers.safetensors",
    "distill/student.safetensors",
    "export/model.safetensors",
)


@pytest.fixture(scope="module")
def runs(quick_args, tmp_path_factory):
    """Follows a plan of stops; gives the folder and how each run ended."""

    def follow(stops, *changes):
        out = tmp_path_factory.mktemp("out")
        args = quick_args(out, "resume_from_checkpoint=true", *changes)
        plan = out / "plan.json"
        plan.write_text(json.dumps({"args": args, "output_dir": str(out), "stops": stops}))
        script = Path(__file__).with_name("killed_runs.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
        done = subprocess.run(
            [sys.executable, script, plan], env=environment, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return out, json.loads(done.stdout.splitlines()[-1])["runs"]

    return follow


@pytest.fixture(scope="module")
def unbroken(runs):
    """Folder of a run that nobody stopped, and the seconds that each stage took."""
    out, ended = runs([])
    assert ended[0]["status"] == 0, (out / "runs.log").read_text()[-3000:]
    return out, ended[0]["seconds"]


def assert_the_same(out, whole):
    for name in WEIGHTS:
        first, second = load_file(out / name), load_file(whole / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
    reports = [json.loads((folder / "report.json").read_text()) for folder in (out, whole)]
    for key in ("perplexity", "alignment_error", "alignment_curve", "recovery_curve", "tokens", "stages", "half_life"):
        assert reports[0][key] == reports[1][key], key
    assert all(reports[0]["seconds"][stage] > 0 for stage in STAGES)
    left = [path for path in out.rglob("*") if path.name.startswith((".", "step-"))]
    assert all(path.name == ".metadata" or path.name.startswith("step-") for path in left), left


def test_ten_kills_and_the_weights_of_an_unbroken_run(runs, unbroken):
    """Two in each stage, at a random moment of its first half and one of its second."""
    whole, seconds = unbroken
    moments = random.Random(0)
    # The first is still during the stage if the machine has become faster since the unbroken run, the second perhaps not.
    stops = [
        [stage, (half + moments.random()) / 2 * seconds[stage], signal.SIGKILL] for stage in STAGES for half in (0, 1)
    ]
    out, ended = runs(stops, "save_every=1", "distill.save_every_steps=2")
    assert [run["status"] for run in ended] == [-signal.SIGKILL] * 10 + [0], (out / "runs.log").read_text()[-3000:]
    assert {run["during"] for run in ended[:-1]} >= set(STAGES)
    for run in ended[:-1]:
        assert all(run["report"][stage] == "finished" for stage in STAGES[: STAGES.index(run["stop"][0])])
    assert any(run["steps"]["align"] for run in ended) and any(run["steps"]["distill"] for run in ended)
    assert_the_same(out, whole)


def test_a_signal_saves_and_ends(runs, unbroken):
    """Before a preemption: no checkpoint was due, and none of the steps is lost."""
    whole, _ = unbroken
    stops = [["align", None, signal.SIGTERM], ["distill", None, signal.SIGUSR1]]
    out, ended = runs(stops, "save_every=1000")
    log = (out / "runs.log").read_text()
    assert [run["status"] for run in ended] == [128 + signal.SIGTERM, 128 + signal.SIGUSR1, 0], log[-3000:]
    for run, total in zip(ended, (8, 12)):
        stage = run["stop"][0]
        assert run["report"][stage] == "interrupted" and run["during"] == stage
        (step,) = run["steps"][stage]
        assert 0 < step < total and f"after step {step}; resume_from_checkpoint=true goes on from there" in log
    assert "align: stopped by SIGTERM" in log and "distill: stopped by SIGUSR1" in log
    assert_the_same(out, whole)
