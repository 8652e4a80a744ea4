"""Naive float64 references of the ops."""

import pytest
import torch


def _naive_gated_delta_rule(q, k, v, g, beta, initial_state=None, starts=None):
    """The recurrence token by token. q, k [B, T, H, K]; v [B, T, H, V]; g, beta [B, T, H]; starts [B, T]."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q / q.shape[-1] ** 0.5
    batch, length, heads, key_dim = k.shape
    state = q.new_zeros(batch, heads, key_dim, v.shape[-1]) if initial_state is None else initial_state
    outputs = []
    for t in range(length):
        if starts is not None:
            state = torch.where(starts[:, t, None, None, None], torch.zeros_like(state), state)
        state = state * g[:, t].exp()[..., None, None]
        read = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], (v[:, t] - read) * beta[:, t, :, None])
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, dim=1), state


def _naive_short_conv(x, weight, starts=None):
    """silu of the causal depthwise convolution, tap by tap, cut at document starts. x [B, T, C]; weight [C, 1, W]."""
    width = weight.shape[-1]
    rows = []
    for b in range(x.shape[0]):
        out, begin = [], 0
        for t in range(x.shape[1]):
            if starts is not None and starts[b, t]:
                begin = t
            out.append(sum(x[b, t - lag] * weight[:, 0, width - 1 - lag] for lag in range(width) if t - lag >= begin))
        rows.append(torch.stack(out))
    y = torch.stack(rows)
    return y * y.sigmoid()


def _relative(actual, expected):
    """Norm of the difference over the norm of the expected tensor, in float64; not a number never passes."""
    actual, expected = (x.detach().to("cpu", torch.float64) for x in (actual, expected))
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def _delta_rule_inputs(batch=2, length=75, heads=2, key_dim=16, value_dim=16, seed=0):
    """float64 leaves by name, with decays from strong to weak."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    inputs = {
        "q": normal(batch, length, heads, key_dim),
        "k": normal(batch, length, heads, key_dim),
        "v": normal(batch, length, heads, value_dim),
        "g": -torch.exp(normal(batch, length, heads) * 1.5 - 2.0),
        "beta": normal(batch, length, heads).sigmoid(),
        "initial_state": normal(batch, heads, key_dim, value_dim),
    }
    return {name: x.requires_grad_() for name, x in inputs.items()}


@pytest.fixture
def naive_gated_delta_rule():
    return _naive_gated_delta_rule


@pytest.fixture
def naive_short_conv():
    return _naive_short_conv


@pytest.fixture
def relative():
    return _relative


@pytest.fixture
def delta_rule_inputs():
    return _delta_rule_inputs
