import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from tcal_components.ops import chunked_gated_delta_rule, documents_from_starts, gated_delta_rule, gated_delta_rule_step

cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _starts(batch, length, *positions_of_rows):
    starts = torch.zeros(batch, length, dtype=torch.bool)
    for row, positions in enumerate(positions_of_rows):
        starts[row, list(positions)] = True
    return starts


def _clones(inputs, dtype=torch.float64, device="cpu"):
    return {name: x.detach().to(device, dtype).requires_grad_() for name, x in inputs.items()}


def _run(function, inputs, weights, **kwargs):
    """Outputs, final state and every gradient of a fixed linear function of both."""
    o, state = function(**inputs, **kwargs)
    loss = (o * weights[0].to(o)).sum() + (state * weights[1].to(state)).sum()
    grads = torch.autograd.grad(loss, list(inputs.values()))
    return {"o": o, "state": state} | {f"d{name}": grad for name, grad in zip(inputs, grads)}


def _compare(
    inputs, naive, relative, *, dtype, tolerance, starts=None, device="cpu", low_precision_inputs=("q", "k", "v")
):
    o_shape = inputs["v"].shape
    rng = torch.Generator().manual_seed(1)
    weights = [
        torch.randn(shape, generator=rng, dtype=torch.float64) for shape in (o_shape, inputs["initial_state"].shape)
    ]
    # Gates and state stay in float32 at least, as the mixer gives them.
    gate_dtype = torch.promote_types(dtype, torch.float32)
    actual_inputs = {
        name: x.detach().to(device, dtype if name in low_precision_inputs else gate_dtype).requires_grad_()
        for name, x in inputs.items()
    }
    # The reference starts from the same rounded numbers.
    reference_inputs = {name: x.detach().to("cpu", torch.float64).requires_grad_() for name, x in actual_inputs.items()}
    expected = _run(naive, reference_inputs, weights, starts=starts)
    documents = None if starts is None else documents_from_starts(starts.to(device))
    actual = _run(gated_delta_rule, actual_inputs, weights, output_final_state=True, documents=documents)
    errors = {name: relative(actual[name], expected[name]) for name in expected}
    assert all(error <= tolerance for error in errors.values()), errors
    return actual


@pytest.mark.parametrize("length", [1, 63, 64, 65, 75])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_outputs_and_gradients_match_the_recurrence(
    length, head_dim, delta_rule_inputs, naive_gated_delta_rule, relative
):
    inputs = delta_rule_inputs(batch=1, length=length, key_dim=head_dim, value_dim=head_dim)
    _compare(inputs, naive_gated_delta_rule, relative, dtype=torch.float64, tolerance=1e-11)
    _compare(inputs, naive_gated_delta_rule, relative, dtype=torch.float32, tolerance=1e-5)


def test_long_run_and_unequal_head_sizes(delta_rule_inputs, naive_gated_delta_rule, relative):
    inputs = delta_rule_inputs(length=500, key_dim=32, value_dim=16)
    _compare(inputs, naive_gated_delta_rule, relative, dtype=torch.float32, tolerance=1e-5)


def test_gradcheck(delta_rule_inputs):
    inputs = delta_rule_inputs(batch=1, length=9, heads=1, key_dim=3, value_dim=2)
    documents = documents_from_starts(_starts(1, 9, [0, 3, 5]))

    def function(q, k, v, g, beta, initial_state):
        return gated_delta_rule(
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=True,
            documents=documents,
            chunk_size=4,
        )

    assert torch.autograd.gradcheck(function, list(inputs.values()))


@pytest.mark.parametrize("chunk_size", [16, 64])
def test_document_starts_match_the_recurrence(chunk_size, delta_rule_inputs, naive_gated_delta_rule, relative):
    inputs = delta_rule_inputs(length=140)
    # Row 0: starts within, at and across chunk borders; row 1: continues its initial state, then 70 padding tokens.
    starts = _starts(2, 140, [0, 1, 16, 64, 65, 127, 128, 139], range(20, 90))
    _compare(inputs, naive_gated_delta_rule, relative, dtype=torch.float64, tolerance=1e-11, starts=starts)
    _compare(inputs, naive_gated_delta_rule, relative, dtype=torch.float32, tolerance=1e-5, starts=starts)


def test_packed_documents_equal_separate_sequences(delta_rule_inputs, relative):
    inputs = {name: x.detach().float() for name, x in delta_rule_inputs(batch=1, length=150).items()}
    state = inputs.pop("initial_state")
    bounds = [0, 1, 40, 104, 150]
    packed, final = gated_delta_rule(
        **inputs,
        initial_state=torch.full_like(state, float("nan")),  # must not be read: the row begins a document
        output_final_state=True,
        document_starts=_starts(1, 150, bounds[:-1]),
    )
    for begin, end in pairwise(bounds):
        alone, alone_state = gated_delta_rule(
            **{n: x[:, begin:end] for n, x in inputs.items()}, output_final_state=True
        )
        assert relative(packed[:, begin:end], alone) <= 1e-5
    assert relative(final, alone_state) <= 1e-5


def test_strong_decay_is_finite_and_right(delta_rule_inputs, naive_gated_delta_rule, relative):
    inputs = delta_rule_inputs()
    with torch.no_grad():
        inputs["g"].mul_(200.0)
    actual = _compare(inputs, naive_gated_delta_rule, relative, dtype=torch.float32, tolerance=1e-4)
    assert all(x.isfinite().all() for x in actual.values())


@torch.no_grad()
def _stepwise(inputs, naive_gated_delta_rule, *, device="cpu", dtype=torch.float64):
    """Outputs and state of single steps from random gates, and the float64 recurrence's."""
    length, heads = inputs["q"].shape[1:3]
    a, b = torch.randn(2, 2, length, heads, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    A_log, dt_bias = torch.linspace(-1.0, 1.0, heads).double(), torch.linspace(-2.0, 0.5, heads).double()
    gates = {"g": -A_log.exp() * torch.nn.functional.softplus(a + dt_bias), "beta": b.sigmoid()}
    expected = naive_gated_delta_rule(**{name: x.detach() for name, x in (inputs | gates).items()})
    state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    tokens = [x.detach().to(device, dtype) for x in (*(inputs[name] for name in "qkv"), a, b)]
    state, A_log, dt_bias = (x.detach().to(device, state_dtype) for x in (inputs["initial_state"], A_log, dt_bias))
    outputs = []
    for t in range(length):
        o, state = gated_delta_rule_step(*(x[:, t] for x in tokens), A_log=A_log, dt_bias=dt_bias, state=state)
        assert o.dtype == dtype and state.dtype == state_dtype
        outputs.append(o)
    return (torch.stack(outputs, 1).cpu().double(), state.cpu().double()), expected


def test_steps_equal_the_recurrence(delta_rule_inputs, naive_gated_delta_rule, relative):
    actual, expected = _stepwise(delta_rule_inputs(length=5), naive_gated_delta_rule)
    assert all(relative(x, y) <= 1e-12 for x, y in zip(actual, expected))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("value_dim", [64, 128])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_steps_of_the_kernel(dtype, tolerance, value_dim, delta_rule_inputs, naive_gated_delta_rule, relative):
    inputs = delta_rule_inputs(length=5, key_dim=128, value_dim=value_dim)
    actual, expected = _stepwise(inputs, naive_gated_delta_rule, device="cuda", dtype=dtype)
    assert all(relative(x, y) <= tolerance for x, y in zip(actual, expected))


def test_half_precision_is_computed_in_float32_also_under_autocast(delta_rule_inputs, relative):
    inputs = _clones(delta_rule_inputs(), torch.bfloat16)
    reference, _ = chunked_gated_delta_rule(**{name: x.float() for name, x in inputs.items()})
    with torch.autocast("cpu", torch.bfloat16):
        o, state = chunked_gated_delta_rule(**inputs)
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(o, reference.to(torch.bfloat16))


def test_wrong_shapes_are_named(delta_rule_inputs):
    inputs = {name: x.detach() for name, x in delta_rule_inputs(length=4).items()}
    inputs["beta"] = inputs["beta"][:, :3]
    with pytest.raises(ValueError, match=r"beta has shape \[2, 3, 2\]; expected \[2, 4, 2\]"):
        gated_delta_rule(**inputs)


def test_cpu_path_imports_no_kernel_library():
    code = (
        "import sys, torch, tcal_components.ops as ops\n"
        "x = torch.randn(1, 3, 1, 4)\n"
        "ops.gated_delta_rule(x, x, x, g=-x[..., 0].abs(), beta=x[..., 0])\n"
        "assert 'fla' not in sys.modules  # torch itself imports triton where it is installed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
# float32 runs its products in TF32 on the GPU; bf16 gradients are asked for within 1 %.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 5e-3)])
@pytest.mark.parametrize("length", [75, 256])
class TestCuda:
    pytestmark = cuda

    def test_kernel_matches_the_recurrence(
        self, length, dtype, tolerance, packed, head_dim, delta_rule_inputs, naive_gated_delta_rule, relative
    ):
        inputs = delta_rule_inputs(length=length, key_dim=head_dim, value_dim=head_dim)
        starts = _starts(2, length, [0, 1, 30, 64, 65], range(10, 40)) if packed else None
        _compare(
            inputs, naive_gated_delta_rule, relative, dtype=dtype, tolerance=tolerance, starts=starts, device="cuda"
        )
