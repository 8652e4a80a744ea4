import importlib.util
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("distributed_worker.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def worker():
    spec = importlib.util.spec_from_file_location("distributed_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(teacher, make_batch, worker, tmp_path):
    """Results of one process, and of two ranks with plain and with sharded modules."""
    batches = [make_batch(seed, rows=4, lengths=[12, 20]) for seed in range(4)]
    batches[0]["document"][:1, -20:] = -1  # ranks with different numbers of tokens
    job = {"spec": asdict(teacher.spec), "teacher": teacher.state_dict(), "batches": batches}
    torch.save(job, tmp_path / "job.pt")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    single = worker.run(job, 0, 1, sharded=False)
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()[-2000:]
    finally:
        for process in ranks:
            process.kill()
    return single, [torch.load(tmp_path / f"result{rank}.pt") for rank in range(2)]


def close(got, expected, tolerance):
    scale = expected.double().abs().max().clamp_min(1e-6)
    return float((got.double() - expected.double()).abs().max() / scale) < tolerance


def test_two_ranks_equal_one_process(results):
    single, ranks = results
    for kind in ("plain", "sharded"):
        for name, value in ranks[0][kind]["weights"].items():
            assert torch.equal(value, ranks[1][kind]["weights"][name]), "ranks agree"
        got = ranks[0][kind]
        for layer, statistics in single["statistics"].items():
            for name, value in statistics.items():
                assert close(got["statistics"][layer][name], value, 1e-6), (kind, layer, name)
        for strategy, weights in single["starts"].items():
            for name, value in weights.items():
                assert close(got["starts"][strategy][name], value, 1e-5), (kind, strategy, name)
            for layer, notes in single["notes"][strategy].items():
                assert got["notes"][strategy][layer]["heldout_error"] == pytest.approx(notes["heldout_error"], rel=1e-5)
        for layer, notes in single["refitted"].items():
            assert got["refitted"][layer]["pull"] == notes["pull"]
            assert got["refitted"][layer]["after"] == pytest.approx(notes["after"], rel=1e-3), (kind, layer)
        for point, expected in zip(got["joint_curve"], single["joint_curve"], strict=True):
            assert point["kl"] == pytest.approx(expected["kl"], rel=1e-4), kind
        for name, value in single["joint_weights"].items():
            assert close(got["joint_weights"][name], value, 2e-3), (kind, name)
            assert torch.equal(got["joint_weights"][name], ranks[1][kind]["joint_weights"][name]), "ranks agree"
        assert close(got["gates"], single["gates"], 1e-4), kind
        assert got["tokens"] == single["tokens"] == 4 * 4 * 32
        for point, expected in zip(got["curve"], single["curve"], strict=True):
            assert point["step"] == expected["step"]
            for layer, error in expected["error"].items():
                assert point["error"][layer] == pytest.approx(error, rel=1e-5), (kind, layer)
        for name, value in single["weights"].items():
            assert close(got["weights"][name], value, 2e-3), (kind, name)  # Adam divides rounding by tiny gradients
        assert got["resumed_curve"] == got["curve"], "resume with shards equals the unbroken run"
        for name, value in got["weights"].items():
            assert torch.equal(value, got["resumed_weights"][name])
