"""The start-up check: every problem is a line with the command that mends it."""

import re

import pytest
import torch

from tcal_components.distributed import ParallelContext, environment
from tcal_components.distributed.environment import GIB, startup_report
from tcal_components.models import estimate_memory, qwen3

CPU = ParallelContext(device=torch.device("cpu"))


def test_nothing_to_say_on_a_sound_machine():
    report = startup_report(CPU, needed_bytes=lambda processes: 1000)
    assert report.problems == ()
    report.raise_for_problems()
    assert "torchtune 0.6.1" in report.facts[0] and "GiB free" in report.facts[-1]


def test_each_problem_names_its_cure(monkeypatch):
    versions = {"torch": "2.13.0+cpu", "torchtune": "0.6.1", "torchao": "0.17.0", "transformers": None}
    monkeypatch.setattr(environment, "_version", lambda name: versions.get(name))
    report = startup_report(CPU, needed_bytes=lambda processes: 1 << 60, float8=True)
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
    assert environment._memory_problem(lambda n: 10 * gib, 20 * gib, ctx) == []
    (line,) = environment._memory_problem(lambda n: 50 * gib * processes / n, 20 * gib, ctx)
    wanted = int(re.search(r"nproc_per_node (\d+)", line)[1])
    assert 50 * processes / wanted <= 20 < 50 * processes / (wanted - 1)
    (line,) = environment._memory_problem(lambda n: (21 + 50 / n) * gib, 20 * gib, ctx)
    assert "nproc" not in line and "; take a smaller model, " in line, "every process holds more than there is"


def test_memory_of_groups_that_hold_a_copy_each():
    estimate = estimate_memory(qwen3.SPECS["qwen3_8b"], retained_layers=range(3, 36, 4))
    ctx = ParallelContext(device=torch.device("cuda", 0), world_size=8, dp_replicate=4)

    def needed(processes):
        return estimate.of_process(["distill"], processes=processes, dp_replicate=4)

    (line,) = environment._memory_problem(needed, 70 * GIB, ctx)
    assert line.startswith(
        "about 77.2 GiB are needed a process before activations and 70.0 GiB are free; run `tune run "
    )
    assert "--nproc_per_node 12 " in line


def test_its_own_advice_mends_it():
    """Qwen3-8B with float32 weights on one H200."""
    ctx, free = ParallelContext(device=torch.device("cuda", 0)), 139 * GIB
    for optimizer, refused in (("torch.optim.AdamW", True), ("torchao.optim.AdamW8bit", False)):
        estimate = estimate_memory(
            qwen3.SPECS["qwen3_8b"], retained_layers=range(3, 36, 4), optimizer={"_component_": optimizer}
        )
        needed = estimate.of_process(["distill"], processes=1)
        found = environment._memory_problem(lambda processes, needed=needed: needed / processes, free, ctx)
        assert bool(found) is refused
        assert not found or "optimizer._component_=torchao.optim.AdamW8bit" in found[0]
