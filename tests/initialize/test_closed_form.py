import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tcal_components.initialize import closed_form as analytic
from tcal_components.initialize import weights
from tcal_components.measure.constant_direction import constant_direction


def realised_half_life(g):
    """Tokens after which the state has halved at the mean decay."""
    return math.log(2.0) / -g.mean(0)


def test_inverse_softplus():
    value = torch.tensor([1e-6, 1e-3, 0.5, 3.0, 30.0], dtype=torch.float64)
    torch.testing.assert_close(F.softplus(analytic.inverse_softplus(value)), value)


def test_state_halves_after_the_half_life():
    half_life, A_log = torch.tensor([1.0, 7.0, 300.0]).double(), torch.tensor([0.0, 1.5, -2.0]).double()
    for log_rate in (None, A_log):
        bias = analytic.decay_bias(half_life, log_rate)
        g = analytic.log_decay(
            torch.zeros(5, 3).double(), torch.zeros(3).double() if log_rate is None else log_rate, bias
        )
        torch.testing.assert_close(torch.exp(g[0] * half_life), torch.full((3,), 0.5).double())
        torch.testing.assert_close(realised_half_life(g), half_life)


def test_random_decay_rows_move_the_half_life_and_the_fit_takes_it_back():
    torch.manual_seed(0)
    preactivation = 2.0 * torch.randn(400, 3).double() + torch.tensor([0.0, 1.0, -3.0])
    half_life, A_log = torch.tensor([1.5, 10.0, 200.0]).double(), torch.tensor([0.0, 1.0, 2.0]).double()
    closed = analytic.log_decay(preactivation, A_log, analytic.decay_bias(half_life, A_log))
    assert ((realised_half_life(closed) / half_life).log().abs() > 0.5).all()
    bias = analytic.fit_decay_bias(preactivation, A_log, half_life)
    torch.testing.assert_close(realised_half_life(analytic.log_decay(preactivation, A_log, bias)), half_life)


def test_concentration_is_not_stretched_over_the_heads_of_a_layer():
    agreeing = analytic.entropy_concentration(torch.tensor([0.50, 0.51, 0.52]))
    assert float(agreeing.max() - agreeing.min()) < 0.03
    torch.testing.assert_close(analytic.beta_target(torch.tensor([0.0, 0.5, 1.0])), torch.tensor([0.3, 0.5, 0.7]))


def test_write_gate_mean_moves_only_along_w_star():
    torch.manual_seed(0)
    x = torch.randn(500, 16).double() + 2.0 * F.normalize(torch.randn(16).double(), dim=0)
    mean = x.mean(0)
    w_star, std = constant_direction(x.T @ x / 500, mean)
    values = x @ w_star
    assert float(values.mean()) == pytest.approx(1.0, abs=1e-9)
    assert float(values.std(unbiased=False)) == pytest.approx(float(std), rel=1e-6)
    target = torch.tensor([0.3, 0.5, 0.66]).double()
    rows = analytic.write_gate_rows(target, w_star)
    torch.testing.assert_close((x @ rows.T).mean(0), torch.logit(target))
    # A row orthogonal to the mean: no factor gives it the wanted mean.
    row = torch.randn(16).double()
    row -= row @ mean / (mean @ mean) * mean
    assert float((x @ (1000.0 * row)).mean().abs()) < 1e-9
    with pytest.raises(ValueError, match="mean input of the layer is zero"):
        constant_direction(torch.eye(3), torch.zeros(3))


def test_open_gate_and_folded_bias():
    torch.manual_seed(0)
    w_star = torch.randn(8).double()
    x = torch.randn(20, 8).double()
    x += (1.0 - x @ w_star)[:, None] * w_star / (w_star @ w_star)  # w* . x = 1 exactly
    gate = F.silu(x @ analytic.open_gate_rows(torch.zeros(5, 8).double(), w_star).T)
    torch.testing.assert_close(gate, torch.ones_like(gate), atol=2e-3, rtol=0)
    weight, bias = torch.randn(5, 8).double(), torch.randn(5).double()
    torch.testing.assert_close(x @ weights.fold_bias(weight, bias, w_star).T, x @ weight.T + bias)


def test_heads_are_expanded_whole_and_not_row_by_row():
    torch.manual_seed(0)
    weight, x = torch.randn(2 * 3, 5), torch.randn(7, 5)  # H_kv = 2, D = 3, H = 6
    heads = (x @ weight.T).view(7, 2, 3)
    expected = torch.stack([heads[:, h // 3] for h in range(6)], dim=1)
    torch.testing.assert_close((x @ weights.expand_heads(weight, 2, 6).T).view(7, 6, 3), expected)
    mistake = (x @ weight.repeat_interleave(3, dim=0).T).view(7, 6, 3)
    assert not torch.allclose(mistake, expected)
    torch.testing.assert_close(weights.expand_heads(weight, 2, 2), weight)


def test_signed_values_read_back_linearly():
    torch.manual_seed(0)
    x, weight, output = torch.randn(7, 5).double(), torch.randn(6, 5).double(), torch.randn(5, 6).double()
    features = F.silu(x @ weights.signed_rows(weight, 2).T)
    torch.testing.assert_close(features @ weights.signed_columns(output, 2).T, x @ weight.T @ output.T)


def test_ols_scale():
    torch.manual_seed(0)
    o = torch.randn(50, 2).double()
    c = o * torch.tensor([0.3, -2.0]) + 0.01 * torch.randn(50, 2)
    sigma = analytic.ols_scale((c * o).sum(0), (o * o).sum(0))
    torch.testing.assert_close(sigma, torch.linalg.lstsq(torch.block_diag(*o.T.unsqueeze(-1)), c.T.flatten()).solution)
    assert float(analytic.ols_scale(torch.tensor(0.0), torch.tensor(0.0))) == 0.0


def _regression():
    torch.manual_seed(0)
    f, y, copied = torch.randn(40, 6).double(), torch.randn(40, 4).double(), torch.randn(4, 6).double()
    return f, y, copied, f.T @ f, f.T @ y


def test_ridge_solves_its_equation_and_ends_at_both_limits():
    f, y, copied, gram, target = _regression()
    strength = 0.7 * gram.diagonal().mean()
    weight = analytic.ridge_output_projection(gram, target, copied, 0.7).requires_grad_(True)
    loss = (f @ weight.T - y).square().sum() + strength * (weight - copied).square().sum()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert float(gradient.abs().max()) < 1e-9
    plain = torch.linalg.lstsq(f, y).solution.T
    torch.testing.assert_close(analytic.ridge_output_projection(gram, target, copied, 0.0), plain)
    torch.testing.assert_close(
        analytic.ridge_output_projection(gram, target, copied, 1e9), copied, rtol=1e-6, atol=1e-6
    )


def test_ridge_without_pull_and_with_too_few_tokens():
    f, y, copied, *_ = _regression()
    f, y = f[:3], y[:3]
    weight = analytic.ridge_output_projection(f.T @ f, f.T @ y, copied, 0.0)
    torch.testing.assert_close(f @ weight.T, y)


def test_head_scales_solve_the_joint_least_squares():
    f, y, copied, gram, target = _regression()
    outputs = torch.stack([f[:, 2 * h : 2 * h + 2] @ copied[:, 2 * h : 2 * h + 2].T for h in range(3)], dim=-1)
    expected = torch.linalg.lstsq(outputs.flatten(0, 1), y.flatten()).solution
    torch.testing.assert_close(analytic.head_scales(gram, target, copied, 3, ridge=1e-12), expected)
    assert torch.equal(analytic.head_scales(gram * 0, target * 0, copied, 3), torch.ones(3).double())


def test_centred_rows():
    torch.manual_seed(0)
    x = torch.randn(200, 8).double() + 2.0
    w_star, _ = constant_direction(x.T @ x / 200, x.mean(0))
    weight = torch.randn(5, 8).double()
    keys = x @ analytic.centred_rows(weight, x.mean(0), w_star).T
    assert float(keys.mean(0).abs().max()) < 1e-9
    shift = x @ weight.T - keys
    torch.testing.assert_close(shift, (x @ w_star)[:, None] * (weight @ x.mean(0)))


def test_output_scale_and_squared_error():
    f, y, copied, gram, target = _regression()
    energy = float(y.square().sum())
    output = f @ copied.T
    assert analytic.squared_error(gram, target, copied, energy) == pytest.approx(float((output - y).square().sum()))
    floor = 0.1 * math.sqrt(energy / float(output.square().sum()))
    assert analytic.output_scale(gram, target, -copied, energy) >= floor
    best = analytic.output_scale(gram, f.T @ (0.25 * output), copied, float((0.25 * output).square().sum()))
    assert best == pytest.approx(0.25)
    assert analytic.output_scale(gram * 0, target * 0, copied, energy) == 1.0


def test_imports_only_torch():
    tree = ast.parse(Path(analytic.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported == {"__future__", "math", "torch"}
