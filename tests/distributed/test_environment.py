"""The start-up check: every problem is a line with the command that mends it."""

import re

import pytest
import torch

from tcal_components.distributed import ParallelContext, environment
from tcal_components.distributed.environment import startup_report

CPU = ParallelContext(device=torch.device("cpu"))


def test_nothing_to_say_on_a_sound_machine():
    report = startup_report(CPU, needed_bytes=1000)
    assert report.problems == ()
    report.raise_for_problems()
    assert "torchtune 0.6.1" in report.facts[0] and "GiB free" in report.facts[-1]


def test_each_problem_names_its_cure(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchtune": "0.6.1", "torchao": "0.17.0", "transformers": None}
    monkeypatch.setattr(environment, "_version", lambda name: versions.get(name))
    report = startup_report(CPU, needed_bytes=1 << 60, float8=True)
    text = "\n".join(report.problems)
    assert "torchao is 0.17.0" in text and "`pip install 'torchao<0.16,>=0.13'`" in text
    assert "transformers is not installed; run `pip install 'transformers" in text
    assert "GiB are free" in text and "AdamW8bit" in text
    assert "float8 needs a CUDA device" in text
    assert "torch is" not in text
    assert len(report.problems) == 4 and all("\n" not in problem for problem in report.problems)
    with pytest.raises(ValueError, match="torchao is"):
        report.raise_for_problems()


@pytest.mark.parametrize("processes", [1, 4])
def test_memory_asks_for_enough_processes(processes):
    ctx = ParallelContext(device=torch.device("cuda", 0), world_size=processes)
    gib = float(2**30)
    assert environment._memory_problem(10 * gib, 20 * gib, ctx) == []
    (line,) = environment._memory_problem(50 * gib, 20 * gib, ctx)
    wanted = int(re.search(r"nproc_per_node (\d+)", line)[1])
    assert 50 * processes / wanted <= 20
