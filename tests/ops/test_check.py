import pytest
import torch
from packaging.version import Version

from tcal_components.ops.check import _problems, check_gdn_backend

GOOD = {
    "fla": Version("0.6.0"),
    "triton": Version("3.6.0"),
    "hopper": True,
    "tilelang": True,
    "tilelang_disabled": False,
    "nvcc": True,
}


def test_the_cpu_needs_nothing():
    assert check_gdn_backend("cpu") == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_device_is_named():
    (problem,) = check_gdn_backend("cuda")
    assert "no CUDA device" in problem


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"hopper": False, "tilelang": False},
        {"triton": Version("3.7.1"), "tilelang": False},
        {"triton": Version("3.3.1")},
    ],
)
def test_sound_installations_pass(change):
    assert _problems(**{**GOOD, **change}) == []


@pytest.mark.parametrize(
    ("change", "command"),
    [
        ({"tilelang": False}, "pip install tilelang"),
        ({"nvcc": False}, "export CUDA_HOME"),
        ({"tilelang_disabled": True}, "unset FLA_TILELANG"),
        ({"triton": None}, "pip install triton"),
        ({"fla": None}, "pip install 'flash-linear-attention"),
        ({"fla": Version("0.4.2")}, "pip install -U 'flash-linear-attention"),
    ],
)
def test_each_fault_comes_with_the_command_that_mends_it(change, command):
    (problem,) = _problems(**{**GOOD, **change})
    assert command in problem and "\n" not in problem
