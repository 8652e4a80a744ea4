"""Launch configurations of flash-linear-attention's kernels."""

import importlib
from types import SimpleNamespace

import pytest

from tcal_components.ops import kernels

NAME = "fla.ops.common.chunk_o.chunk_fwd_kernel_o"


def _tuner(*configurations):
    return SimpleNamespace(
        configs=[
            SimpleNamespace(kwargs=kwargs, num_warps=warps, num_stages=stages)
            for kwargs, warps, stages in configurations
        ]
    )


@pytest.fixture
def fresh():
    """The state of the module before and after."""
    kernels.fla_function.cache_clear()
    yield
    kernels.tune_kernels(False)
    kernels.fla_function.cache_clear()


def test_one_configuration_is_left_of_the_kernels_in_the_table(monkeypatch):
    wanted, other = kernels._LAUNCH[NAME], ({"BK": 32, "BV": 32}, 2, 3)
    ours, theirs = _tuner(other, wanted), _tuner(other, wanted)
    monkeypatch.setattr(kernels, "_tuners", lambda: [(NAME, ours), ("fla.ops.rwkv7.kernel", theirs)])
    assert kernels.fix_launch_configurations() == [NAME]
    assert [(c.kwargs, c.num_warps, c.num_stages) for c in ours.configs] == [wanted]
    assert len(theirs.configs) == 2


def test_a_kernel_without_the_configuration_of_the_table_is_tuned(monkeypatch):
    tuner = _tuner(({"BK": 32, "BV": 32}, 2, 3), ({"BK": 16, "BV": 16}, 2, 3))
    monkeypatch.setattr(kernels, "_tuners", lambda: [(NAME, tuner)])
    assert kernels.fix_launch_configurations() == []
    assert len(tuner.configs) == 2


@pytest.mark.parametrize("tune", [False, True])
def test_functions_are_fixed_unless_kernels_are_tuned(monkeypatch, fresh, tune):
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    tuner = _tuner(({"BK": 32, "BV": 32}, 2, 3), kernels._LAUNCH[NAME])
    monkeypatch.setattr(kernels, "_tuners", lambda: [(NAME, tuner)])
    kernels.tune_kernels(tune)
    assert kernels.fla_function("math", "sqrt")(4.0) == 2.0
    assert len(tuner.configs) == (2 if tune else 1)


def test_every_entry_of_the_table_is_a_configuration_of_the_library():
    pytest.importorskip("triton", reason="needs triton, which comes with CUDA builds of torch")
    for module in ("fla.ops.gated_delta_rule", "fla.modules.convolution", "fla.modules.fused_norm_gate"):
        importlib.import_module(module)
    found = dict(kernels._tuners())
    for name, wanted in kernels._LAUNCH.items():
        assert wanted in [(c.kwargs, c.num_warps, c.num_stages) for c in found[name].configs], name
