"""Processes that look after one another: one that dies or hangs ends the others, with one line; one that writes does not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT = 3.0  # seconds of silence
DEAD = -signal.SIGKILL


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By case how each of three processes ended, the seconds that took, and what was said."""
    command = [sys.executable, Path(__file__).with_name("watched.py"), tmp_path_factory.mktemp("watched"), LIMIT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_first_may_write_for_longer_than_any_other_may_be_silent(found):
    case = found["the first writes for long"]
    assert case["status"] == [0, 0, 0] and case["said"] == "" and case["seconds"] >= 3 * LIMIT


@pytest.mark.parametrize(
    ("name", "status", "line"),
    [
        ("the last dies", [1, 1, DEAD], "process 2 of 3 has died; process 0 ends too"),
        ("the first dies", [DEAD, 1, 1], "process 0 of 3 has died; process 1 ends too"),
    ],
)
def test_one_that_dies_ends_the_others_within_seconds(found, name, status, line):
    case = found[name]
    assert case["status"] == status and case["seconds"] < LIMIT + 20
    assert case["said"].count(f"\nerror: {line}\n") == 1


@pytest.mark.parametrize(
    ("name", "status", "who"),
    [("the second hangs", [1, DEAD, 1], (1, 0)), ("the first hangs", [DEAD, 1, 1], (0, 1))],
)
def test_one_that_hangs_ends_the_others_after_the_limit(found, name, status, who):
    case = found[name]
    assert case["status"] == status and LIMIT - 2 <= case["seconds"] < LIMIT + 30
    told = (
        f"process {who[0]} of 3 has not answered for 0.05 minutes (parallel.timeout_minutes); process {who[1]} ends too"
    )
    assert case["said"].count(f"\nerror: {told}\n") == 1


def test_one_that_has_said_why_it_ends_is_not_spoken_of(found):
    case = found["the second leaves"]
    assert case["status"] == [1, 3, 1] and case["seconds"] < 30
    assert case["said"].startswith("error: the disk is full\n") and "has died" not in case["said"]
    case = found["the last raises"]
    assert case["status"] == [1, 1, 1] and case["seconds"] < 30
    assert "KeyError: 'a fault of ours'\n" in case["said"] and "has died" not in case["said"]
