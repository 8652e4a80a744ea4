"""Two GPUs over NCCL against one: statistics, alignment, distillation, and a checkpoint between."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tcal_components.distributed import ParallelContext

WORKER = Path(__file__).with_name("nccl_worker.py")
ROOT = Path(__file__).parents[2]


def two_ranks(device, folder):
    """Results of both ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), device, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(2)]


def assert_two_equal_one(device, folder):
    spec = importlib.util.spec_from_file_location("nccl_worker", WORKER)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    one = worker.run(ParallelContext.create(device), folder)
    two, other = two_ranks(device, folder)
    for layer, values in one["statistics"].items():
        for name, value in values.items():
            scale = value.double().abs().max().clamp_min(1e-6)
            difference = (two["statistics"][layer][name].double() - value.double()).abs().max() / scale
            assert difference < 1e-6, (layer, name, float(difference))
    assert len(two["align"]) == len(one["align"]) == 3
    for got, want in zip(two["align"], one["align"], strict=True):
        assert got == pytest.approx(want, rel=1e-5)
    for name, value in two["mixers"].items():
        assert torch.equal(value, other["mixers"][name]), f"ranks disagree in {name}"
    for key in ("loss", "ce"):
        want = pytest.approx([point[key] for point in one["distill"]], rel=1e-5)
        assert [point[key] for point in two["distill"]] == want
        assert [point[key] for point in two["continued"]] == want
    assert [p["grad_norm"] for p in two["distill"]] == pytest.approx([p["grad_norm"] for p in one["distill"]], rel=1e-4)
    assert other["weights"] == {} and two["weights"].keys() == one["weights"].keys()
    for name, value in one["weights"].items():
        # Adam divides rounding by tiny gradients.
        torch.testing.assert_close(two["weights"][name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_equal_one(tmp_path):
    assert_two_equal_one("cuda", tmp_path)
