import pytest
import torch

from tcal_components.ops import documents_from_starts, short_conv, short_conv_step


def _inputs(length=12, width=4, channels=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, length, channels, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, 1, width, generator=rng, dtype=torch.float64, requires_grad=True)
    return x, weight


def _starts(length=12):
    starts = torch.zeros(2, length, dtype=torch.bool)
    starts[0, [0, 1, 5]] = True
    starts[1, [4, 5, 6, 7, 10]] = True
    return starts[:, :length]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_gradients_match_the_taps(width, packed, naive_short_conv, relative):
    x, weight = _inputs(width=width)
    starts = _starts() if packed else None
    documents = documents_from_starts(starts) if packed else None
    y, state = short_conv(x, weight, documents=documents)
    expected = naive_short_conv(x, weight, starts)
    assert state is None
    assert relative(y, expected) <= 1e-14
    upstream = torch.randn_like(y)
    actual, reference = (torch.autograd.grad((out * upstream).sum(), (x, weight)) for out in (y, expected))
    assert all(relative(a, b) <= 1e-14 for a, b in zip(actual, reference))
    assert torch.autograd.gradcheck(lambda x, w: short_conv(x, w, documents=documents)[0], (x, weight))


def test_it_is_the_convolution_of_torch(relative):
    x, weight = _inputs()
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    expected = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, weight, groups=3)).transpose(1, 2)
    assert relative(short_conv(x, weight)[0], expected) <= 1e-14


@pytest.mark.parametrize("cut", [1, 2, 11])
def test_state_continues_a_run(cut, relative):
    x, weight = (t.detach() for t in _inputs())
    whole, final = short_conv(x, weight, output_final_state=True)
    head, state = short_conv(x[:, :cut], weight, output_final_state=True)
    tail, state = short_conv(x[:, cut:], weight, initial_state=state, output_final_state=True)
    assert relative(torch.cat([head, tail], dim=1), whole) <= 1e-14
    assert torch.equal(state, final)


@torch.no_grad()
def _stepwise(x, weight, *, after):
    """The tokens after the first ``after``, one by one; a window of W inputs, the oldest of which is never read."""
    window = torch.cat([torch.full_like(x[:, :1], float("nan")), x[:, after - 3 : after]], dim=1).mT.contiguous()
    steps = [short_conv_step(x[:, t : t + 1], weight, window=window) for t in range(after, x.shape[1])]
    return torch.cat(steps, dim=1), window


def test_steps_continue_a_run(relative):
    x, weight = (t.detach() for t in _inputs())
    out, window = _stepwise(x, weight, after=5)
    assert relative(out, short_conv(x, weight)[0][:, 5:]) <= 1e-14
    assert torch.equal(window.mT, x[:, -4:])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_steps_of_the_kernel(dtype, tolerance, relative):
    x, weight = (t.detach().to(dtype) for t in _inputs(channels=192))
    expected = short_conv(x.double(), weight.double())[0][:, 5:]
    out, window = _stepwise(x.cuda(), weight.cuda(), after=5)
    assert relative(out.cpu().double(), expected) <= tolerance
    assert torch.equal(window.mT.cpu(), x[:, -4:])


def test_nothing_is_read_over_a_start(relative):
    x, weight = (t.detach() for t in _inputs())
    starts = torch.zeros(2, 12, dtype=torch.bool)
    starts[:, [0, 10]] = True
    poisoned = x.clone()
    poisoned[:, :10] = float("nan")
    stale = torch.full((2, 3, 3), float("nan"), dtype=torch.float64)
    y, state = short_conv(
        poisoned, weight, documents=documents_from_starts(starts), initial_state=stale, output_final_state=True
    )
    assert relative(y[:, 10:], short_conv(x[:, 10:], weight)[0]) <= 1e-14
    expected = torch.cat([torch.zeros(2, 1, 3, dtype=torch.float64), x[:, 10:]], dim=1)
    assert torch.equal(state, expected)


def test_bf16_sums_in_float32_under_autocast():
    x, weight = (t.detach().to(torch.bfloat16) for t in _inputs())
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = short_conv(x, weight)
    assert torch.equal(y, short_conv(x.float(), weight.float())[0].to(torch.bfloat16))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-5)])
def test_kernel_matches_the_taps(packed, dtype, tolerance, naive_short_conv, relative):
    x, weight = (t.detach().to("cuda", dtype).requires_grad_() for t in _inputs(channels=128))
    reference = [t.detach().to("cpu", torch.float64).requires_grad_() for t in (x, weight)]
    starts = _starts() if packed else None
    documents = documents_from_starts(starts.cuda()) if packed else None
    y, _ = short_conv(x, weight, documents=documents)
    expected = naive_short_conv(*reference, starts)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    actual = torch.autograd.grad((y * upstream.cuda()).sum(), (x, weight))
    wanted = torch.autograd.grad((expected * upstream.double()).sum(), reference)
    assert relative(y, expected) <= tolerance
    assert all(relative(a, b) <= tolerance for a, b in zip(actual, wanted))
    # The path with a state is PyTorch's; both must agree.
    assert relative(short_conv(x, weight, documents=documents, output_final_state=True)[0], expected) <= tolerance
