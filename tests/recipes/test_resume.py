"""Runs that are killed, or asked to stop, anywhere end with the weights and the report of the run that was left alone."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed_runs import JOINT

STAGES = ("measure", "initialize", "align", "distill", "export")
CHANGES = ("resume_from_checkpoint=true", *JOINT, "save_every=1", "distill.save_every_steps=2")


@pytest.fixture(scope="module")
def serving():
    """A process that has imported everything and forks the runs."""
    script = Path(__file__).with_name("killed_runs.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, script, "--serve"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture(scope="module")
def runs(serving, quick_args, tmp_path_factory):
    """Follows a plan in a folder that afterwards has another name: the same path is in all reports."""
    folder = tmp_path_factory.mktemp("runs")
    count = 0

    def follow(*changes, **plan):
        nonlocal count
        count += 1
        out = folder / "out"
        plan |= {"args": quick_args(out, *CHANGES, *changes), "output_dir": str(out)}
        serving.stdin.write(json.dumps(plan) + "\n")
        serving.stdin.flush()
        answer = serving.stdout.readline()
        log = out.with_name("out.log").read_text()
        out.with_name("out.log").unlink()
        assert answer, log[-3000:]
        return out.rename(folder / str(count)), json.loads(answer), log

    return follow


@pytest.fixture(scope="module")
def unbroken(runs):
    """Folder of a run that nobody stopped, and the seconds that each stage took."""
    out, found, log = runs()
    assert found["runs"][0]["status"] == [0], log[-3000:]
    return out, found["runs"][0]["seconds"]


def assert_the_same(out, found, *, but=()):
    assert found["runs"][-1]["status"] == [0] and found["different"] == list(but)
    seconds = json.loads((out / "report.json").read_text())["seconds"]
    assert all(seconds[stage] > 0 for stage in STAGES)
    left = [str(path.relative_to(out)) for path in out.rglob("*") if path.name.startswith(".") or path.name == "state"]
    assert left == [".lock"]


def test_ten_kills_and_the_weights_of_an_unbroken_run(runs, unbroken):
    """Two in each stage, at a random moment of its first half and one of its second."""
    whole, seconds = unbroken
    moments = random.Random(0)
    # The first is still during the stage if the machine has become faster since the unbroken run, the second perhaps not.
    stops = [
        [stage, (half + moments.random()) / 2 * seconds[stage], signal.SIGKILL] for stage in STAGES for half in (0, 1)
    ]
    out, found, log = runs(stops=stops, compare=str(whole))
    ended = found["runs"]
    assert [run["status"] for run in ended] == [[-signal.SIGKILL]] * 10 + [[0]], log[-3000:]
    assert len({run["during"] for run in ended[:-1]} & set(STAGES)) >= 3, (
        "most, however fast the machine has become since"
    )
    for run in ended[:-1]:
        assert all(run["report"][stage] == "finished" for stage in STAGES[: STAGES.index(run["stop"][0])])
    assert any(run["steps"]["align"] for run in ended) and any(run["steps"]["distill"] for run in ended)
    assert_the_same(out, found)


def test_signals_save_and_end(runs, unbroken):
    """Ctrl-C, a terminal that is closed, a preemption: no checkpoint was due, and none of the steps is lost."""
    whole, _ = unbroken
    stops = [
        ["align", None, signal.SIGINT],
        ["align", None, signal.SIGHUP],
        ["distill", None, signal.SIGTERM],
        ["distill", None, signal.SIGUSR1],
    ]
    out, found, log = runs("save_every=1000", "distill.save_every_steps=null", stops=stops, compare=str(whole))
    before = {"align": 0, "distill": 0}
    for run in found["runs"][:-1]:
        stage, _, number = run["stop"]
        assert run["status"] == [128 + number] and run["during"] == stage, log[-3000:]
        assert run["report"][stage] == "interrupted"
        step = run["steps"][stage][-1]
        assert step > before[stage], "the run before was continued, and a step made"
        assert step < {"align": 14, "distill": 12}[stage]
        name = signal.Signals(number).name
        assert f"{stage}: stopped by {name} after step {step}; resume_from_checkpoint=true goes on from there" in log
        before[stage] = step
    assert_the_same(out, found, but=["report.json: config_sha256"])


def test_a_kill_between_two_writes_costs_no_number(runs, unbroken):
    """At the end of each stage, until nothing of its state is left; ``killed_runs.py --writes`` tries all writes of a run."""
    whole, _ = unbroken
    ends = [
        r"^fsync \w+/\.result\.json",  # the output is there, the result is not
        r"^replace \.report\.json.* after \w+/result",  # the result is there and not in the report
        r"^(rename|rmdir) (\w+)/state(/step-N)? after \2/result",  # the state is still there, or some of it
        r"^replace (export|\.export\S+) after|^replace export/\.README",  # the folder, the model card
    ]
    out, found, _ = runs(only="|".join(ends), compare=str(whole))
    killed = [run["write"] for run in found["runs"][:-1]]
    for stage in STAGES:
        assert any(f"fsync {stage}/.result.json" in write for write in killed), killed
        assert any(f".report.json.N.tmp after {stage}/result.json" in write for write in killed), killed
    for stage in ("align", "distill"):
        assert any(f"rmdir {stage}/state after {stage}/result.json" in write for write in killed), killed
    assert_the_same(out, found)


def test_a_process_that_dies_or_hangs_ends_the_others(runs):
    """One line, and nobody waits for the hours that the first process may take for its files."""
    limit = 0.05  # minutes
    stops = [
        ["align", None, signal.SIGKILL, 1],
        ["distill", None, signal.SIGKILL, 0],
        ["distill", None, signal.SIGSTOP, 1],
    ]
    _, found, log = runs(f"parallel.timeout_minutes={limit}", stops=stops, processes=2, last=False)
    for run in found["runs"]:
        whom = run["stop"][3]
        assert run["status"][whom] == -signal.SIGKILL and run["status"][1 - whom] == 1, log[-3000:]
        assert run["end"] < (20 if run["stop"][2] == signal.SIGKILL else 60 * limit + 20)
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: process 1 of 2 has died; process 0 ends too",
        "error: process 0 of 2 has died; process 1 ends too",
        f"error: process 1 of 2 has not answered for {limit} minutes (parallel.timeout_minutes); process 0 ends too",
    ], log[-3000:]
    assert "Traceback" not in log
