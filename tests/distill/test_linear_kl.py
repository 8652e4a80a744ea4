"""LinearKL against a dense float64 formula: values, every gradient, and the size of what it allocates."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.modules import TiedLinear

from tcal_components.distill import LinearKL
from tcal_components.distill.loss import build_loss
from tcal_components.ops import chunked_losses, linear_kl

IGNORE = -100


def dense(student, teacher, labels, *, temperature, direction, kd_ratio):
    """The loss as written in textbooks, over all logits at once [N, V]."""
    counted = labels != IGNORE
    p = F.softmax(teacher / temperature, -1)
    q = F.softmax(student / temperature, -1)
    forward = (p * (p.log() - q.log())).sum(-1)
    reverse = (q * (q.log() - p.log())).sum(-1)
    m = (p + q) / 2
    jensen_shannon = ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2
    kl = {
        "forward": forward,
        "reverse": reverse,
        "symmetric": (forward + reverse) / 2,
        "jensen_shannon": jensen_shannon,
    }[direction]
    kl_sum = kl[counted].sum()
    ce_sum = F.cross_entropy(student[counted], labels[counted], reduction="sum")
    return kd_ratio * temperature**2 * kl_sum + (1 - kd_ratio) * ce_sum, kl_sum, ce_sum


def make(n=13, v=29, e=7, e_teacher=5, dtype=torch.float64, ignored=True):
    torch.manual_seed(0)
    labels = torch.randint(v, (n,))
    if ignored:
        labels[[0, 5, n - 1]] = IGNORE
    return (
        torch.randn(n, e, dtype=dtype, requires_grad=True),
        torch.randn(v, e, dtype=dtype, requires_grad=True),
        torch.randn(n, e_teacher, dtype=dtype),
        torch.randn(v, e_teacher, dtype=dtype),
        labels,
    )


@pytest.mark.parametrize("chunk", [1, 4, 13, 1000])
@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric", "jensen_shannon"])
@pytest.mark.parametrize(("temperature", "kd_ratio"), [(1.0, 1.0), (2.5, 1.0), (1.0, 0.3), (0.7, 0.0)])
@pytest.mark.parametrize("head", ["weight", "callable"])
def test_equals_the_dense_formula(chunk, direction, temperature, kd_ratio, head, monkeypatch):
    if chunk == 13:  # softmax in blocks of 3 rows
        monkeypatch.setattr(chunked_losses, "_SOFTMAX_ELEMENTS", 3 * 29)
    hidden, weight, teacher_hidden, teacher_weight, labels = make()
    want = dense(
        hidden @ weight.t(),
        teacher_hidden @ teacher_weight.t(),
        labels,
        temperature=temperature,
        direction=direction,
        kd_ratio=kd_ratio,
    )
    want_grads = torch.autograd.grad(want[0] * 0.37, (hidden, weight))

    loss = LinearKL(temperature=temperature, direction=direction, kd_ratio=kd_ratio, chunk_tokens=chunk)
    heads = (weight, teacher_weight)
    if head == "callable":
        heads = (lambda h: h @ weight.t(), lambda h: h @ teacher_weight.t())
    total, parts = loss(hidden, heads[0], teacher_hidden, heads[1], labels)
    grads = torch.autograd.grad(total * 0.37, (hidden, weight))

    torch.testing.assert_close(total, want[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(parts["kl_sum"], want[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(parts["ce_sum"], want[2], rtol=1e-10, atol=1e-10)
    assert parts["tokens"] == (labels != IGNORE).sum()
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-10)


def test_true_kl_is_zero_at_the_teacher_and_ignored_tokens_get_no_gradient():
    hidden, weight, *_, labels = make(dtype=torch.float32)
    total, _ = LinearKL()(hidden, weight, hidden.detach(), weight.detach(), labels)
    assert total.item() == pytest.approx(0.0, abs=1e-5)
    hidden, weight, teacher_hidden, teacher_weight, labels = make()
    LinearKL(chunk_tokens=4)(hidden, weight, teacher_hidden, teacher_weight, labels)[0].backward()
    assert hidden.grad[labels == IGNORE].abs().max() == 0
    assert (hidden.grad[labels != IGNORE].abs().amax(-1) > 0).all()  # the last, partial chunk too


def test_no_counted_token_and_no_token_at_all():
    hidden, weight, teacher_hidden, teacher_weight, labels = make()
    total, parts = LinearKL()(hidden, weight, teacher_hidden, teacher_weight, torch.full_like(labels, IGNORE))
    total.backward()
    assert total == 0 and parts["tokens"] == 0 and hidden.grad.abs().max() == 0
    total, _ = LinearKL()(hidden[:0], weight, teacher_hidden[:0], teacher_weight, labels[:0])
    assert total == 0


@pytest.mark.parametrize("kind", ["linear", "linear with bias", "tied"])
def test_head_modules(kind):
    hidden, weight, teacher_hidden, teacher_weight, labels = make()
    v, e = weight.shape
    if kind == "tied":
        embedding = nn.Embedding(v, e, dtype=torch.float64)
        embedding.weight.data.copy_(weight.detach())
        head, parameter = TiedLinear(embedding), embedding.weight
    else:
        head = nn.Linear(e, v, bias=kind.endswith("bias"), dtype=torch.float64)
        head.weight.data.copy_(weight.detach())
        parameter = head.weight
    bias = head.bias if kind == "linear with bias" else 0.0
    total, _ = LinearKL(chunk_tokens=5)(hidden, head, teacher_hidden, teacher_weight, labels)
    want, *_ = dense(
        hidden @ parameter.t() + bias,
        teacher_hidden @ teacher_weight.t(),
        labels,
        temperature=1.0,
        direction="forward",
        kd_ratio=1.0,
    )
    torch.testing.assert_close(
        torch.autograd.grad(total, parameter)[0], torch.autograd.grad(want, parameter)[0], rtol=1e-9, atol=1e-10
    )


def test_low_precision_accumulates_in_the_weights_dtype():
    """bf16 products: the gradient of an fp32 weight is summed over chunks in fp32."""
    hidden, weight, teacher_hidden, teacher_weight, labels = make(n=64, v=50, dtype=torch.float32)
    want, *_ = dense(
        (hidden @ weight.t()).double(),
        (teacher_hidden @ teacher_weight.t()).double(),
        labels,
        temperature=1.0,
        direction="forward",
        kd_ratio=1.0,
    )
    want_grads = torch.autograd.grad(want, (hidden, weight))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total, _ = LinearKL(chunk_tokens=2)(hidden, weight, teacher_hidden, teacher_weight, labels)
    grads = torch.autograd.grad(total, (hidden, weight))
    assert total.dtype == torch.float32
    for got, expected in zip(grads, want_grads, strict=True):
        assert got.dtype == torch.float32
        assert (got - expected).norm() / expected.norm() < 0.02


def test_without_grad_and_second_backward():
    hidden, weight, teacher_hidden, teacher_weight, labels = make()
    with torch.no_grad():
        total, _ = LinearKL()(hidden, weight, teacher_hidden, teacher_weight, labels)
    assert not total.requires_grad
    total, _ = LinearKL()(hidden, weight, teacher_hidden, teacher_weight, labels)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        total.backward()


class Largest(TorchDispatchMode):
    """The largest tensor any operation returns, in elements."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("head", ["weight", "callable"])
def test_nothing_larger_than_one_chunk_of_logits_exists(head):
    n, v, chunk = 256, 500, 16
    hidden, weight, teacher_hidden, teacher_weight, labels = make(n=n, v=v, dtype=torch.float32)
    student = weight if head == "weight" else lambda h: h @ weight.t()
    with Largest() as largest:
        total, _ = LinearKL(chunk_tokens=chunk, kd_ratio=0.5)(hidden, student, teacher_hidden, teacher_weight, labels)
        total.backward()
    assert largest.elements == max(chunk * v, weight.numel())


def test_vocabulary_mismatch_is_one_line():
    hidden, weight, teacher_hidden, teacher_weight, labels = make()
    for heads in [(weight, teacher_weight[:-1]), (lambda h: h @ weight.t(), teacher_weight[:-1])]:
        with pytest.raises(ValueError, match="vocabulary sizes differ: student 29, teacher 28"):
            LinearKL()(hidden, heads[0], teacher_hidden, heads[1], labels)
    with pytest.raises(ValueError, match="hidden states"):
        LinearKL()(hidden[:-1], weight, teacher_hidden, teacher_weight, labels)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"direction": "sideways"}, "forward, reverse, symmetric, jensen_shannon"),
        ({"kd_ratio": 1.1}, "kd_ratio"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
    ],
)
def test_arguments_out_of_range(arguments, match):
    with pytest.raises(ValueError, match=match):
        LinearKL(**arguments)


def test_the_loss_of_a_config_takes_hidden_states():
    assert isinstance(build_loss(None), LinearKL)
    assert (
        build_loss({"_component_": "tcal_components.distill.LinearKL", "temperature": 2.0}).settings.temperature == 2.0
    )
    with pytest.raises(ValueError, match="kd_loss makes a ForwardKLLoss; allowed: tcal_components.distill.LinearKL"):
        build_loss({"_component_": "torchtune.modules.loss.ForwardKLLoss"})


@pytest.mark.parametrize("direction", linear_kl.DIRECTIONS)
def test_models_that_exclude_one_another_give_finite_numbers(direction):
    """Logits so far apart that a probability is 0 in float32."""
    hidden = torch.eye(3).mul(400.0).requires_grad_()
    total, parts = LinearKL(direction=direction)(
        hidden, torch.eye(3), torch.eye(3).flip(0) * 400, torch.eye(3), torch.zeros(3, dtype=torch.long)
    )
    (grad,) = torch.autograd.grad(total, hidden)
    assert total.isfinite() and grad.isfinite().all()
    if direction == "jensen_shannon":
        assert float(parts["kl_sum"]) == pytest.approx(2 * math.log(2), rel=1e-5)  # two tokens of three disagree
