"""Closed forms for a Gated DeltaNet layer from statistics of the attention that it replaces (pure functions).

Notation, per head h: q, k L2-normalised,

    beta_t = sigmoid(W_b x_t)                                           write gate
    g_t    = -exp(A_log) softplus(W_a x_t + dt_bias)                    log decay
    S_t    = exp(g_t) S_{t-1} (I - beta_t k_t k_t^T) + beta_t v_t k_t^T
    o_t    = S_t q_t / sqrt(D)
    y_t    = W_o [rmsnorm(o_t) * o_norm * silu(W_g x_t)]

Sources: Taylor-Calibrate (arXiv 2606.16429), Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LN2 = math.log(2.0)
# silu(1.28) = 1.0: a gate whose pre-activation has this mean lets its channel pass unchanged on average.
OPEN_GATE = 1.28


def inverse_softplus(value: Tensor) -> Tensor:
    """Solves softplus(x) = value, stable for small and large values.

    Args:
        value: positive numbers, any shape.

    Returns:
        Tensor: log(exp(value) - 1), same shape.
    """
    return value + torch.log(-torch.expm1(-value))


def decay_bias(half_life: Tensor, A_log: Tensor | None = None) -> Tensor:
    """dt_bias at which the state halves after ``half_life`` tokens, for W_a = 0.

    dt_bias_h = softplus^-1( ln 2 / (exp(A_log_h) d_h) )

    Args:
        half_life: d_h in tokens, positive, shape [H].
        A_log: shape [H]. Default: zeros.

    Returns:
        Tensor: dt_bias, shape [H].
    """
    rate = LN2 / half_life
    return inverse_softplus(rate if A_log is None else rate * torch.exp(-A_log))


def log_decay(preactivation: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) softplus(a + dt_bias).

    Args:
        preactivation: a = W_a x, shape [..., H].
        A_log: shape [H].
        dt_bias: shape [H].

    Returns:
        Tensor: g, shape [..., H].
    """
    return -torch.exp(A_log) * torch.nn.functional.softplus(preactivation + dt_bias)


def fit_decay_bias(preactivation: Tensor, A_log: Tensor, half_life: Tensor, steps: int = 80) -> Tensor:
    """dt_bias at which the *realised* half-life, ln 2 / mean(-g), is ``half_life`` although W_a is not zero.

    Solves mean_t softplus(a_t,h + dt_bias_h) = ln 2 / (exp(A_log_h) d_h) by bisection; the left side grows with dt_bias.

    Args:
        preactivation: a = W_a x on calibration tokens, shape [N, H].
        A_log: shape [H].
        half_life: d_h in tokens, shape [H].
        steps: halvings of the interval.

    Returns:
        Tensor: dt_bias, shape [H].
    """
    closed = decay_bias(half_life, A_log)
    # With a in [min, max] the root lies in closed - [max, min].
    low, high = closed - preactivation.amax(dim=0), closed - preactivation.amin(dim=0)
    target = LN2 / half_life * torch.exp(-A_log)
    for _ in range(steps):
        middle = (low + high) / 2
        above = torch.nn.functional.softplus(preactivation + middle).mean(dim=0) > target
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2


def entropy_concentration(normalised_entropy: Tensor) -> Tensor:
    """c_h = 1 - mean_t H(A_h(t)) / log(t + 1), in [0, 1].

    The entropy is normalised by its own maximum and not by the spread over the heads of a layer: a min-max spans 0 to 1
    even when all heads agree.

    Args:
        normalised_entropy: mean of H / log(t + 1), shape [H].

    Returns:
        Tensor: shape [H].
    """
    return (1.0 - normalised_entropy).clamp(0.0, 1.0)


def beta_target(concentration: Tensor, low: float = 0.3, span: float = 0.4) -> Tensor:
    """beta*_h = 0.3 + 0.4 c_h: heads that look at few tokens write strongly.

    Args:
        concentration: c_h in [0, 1], shape [H].
        low: beta at c = 0.
        span: added at c = 1.

    Returns:
        Tensor: shape [H].
    """
    return low + span * concentration


def write_gate_rows(target: Tensor, w_star: Tensor) -> Tensor:
    """W_b[h] = logit(beta*_h) w*, so the mean pre-sigmoid value is logit(beta*_h).

    Args:
        target: beta*_h in (0, 1), shape [H].
        w_star: shape [E].

    Returns:
        Tensor: W_b, shape [H, E].
    """
    return torch.logit(target)[:, None] * w_star[None, :]


def centred_rows(weight: Tensor, mean_x: Tensor, w_star: Tensor) -> Tensor:
    """W - (W E[x]) w*^T: the mean of W x over tokens becomes zero, and nothing else changes where w* . x = 1.

    Softmax attention does not see a shift that all keys share. The delta rule does: keys with a large common part are
    nearly collinear after the L2 norm, so every write erases the others.

    Args:
        weight: shape [F, E].
        mean_x: E[x], shape [E].
        w_star: shape [E], w* . E[x] = 1.

    Returns:
        Tensor: shape [F, E].
    """
    return weight - (weight @ mean_x)[:, None] * w_star[None, :]


def open_gate_rows(random_rows: Tensor, w_star: Tensor, level: float = OPEN_GATE) -> Tensor:
    """W_g = random part at full scale + 1.28 w*: gates half open that still differ by channel and token.

    Args:
        random_rows: W_g at its library default, shape [H V, E].
        w_star: shape [E].
        level: mean pre-activation.

    Returns:
        Tensor: W_g, shape [H V, E].
    """
    return random_rows + level * w_star[None, :]


def ols_scale(target_dot_feature: Tensor, feature_dot_feature: Tensor) -> Tensor:
    """sigma = <c, o> / <o, o>, the least-squares scale of o towards c.

    Args:
        target_dot_feature: sums of c . o, any shape.
        feature_dot_feature: sums of o . o, same shape.

    Returns:
        Tensor: same shape; 0 where o is zero.
    """
    tiny = torch.finfo(feature_dot_feature.dtype).tiny
    return target_dot_feature / feature_dot_feature.clamp_min(tiny)


def output_scale(features_gram: Tensor, features_target: Tensor, weight: Tensor, target_energy: float) -> float:
    """One factor s for all features such that W (s f) is closest to y: s = <y, W f> / <W f, W f>.

    It belongs in o_norm, behind the norm that would cancel it anywhere earlier. Where the fit is poor the OLS factor
    shrinks towards 0 (or turns negative) and would take the layer out of the network, so it is kept above a tenth of the
    factor that matches the RMS.

    Args:
        features_gram: sum of f f^T, shape [F, F].
        features_target: sum of f y^T, shape [F, E].
        weight: output projection W, shape [E, F].
        target_energy: sum of |y|^2.

    Returns:
        float: s.
    """
    dot = float((weight.T * features_target).sum())
    energy = float(((weight @ features_gram) * weight).sum())
    if energy <= 0.0:
        return 1.0
    return max(dot / energy, 0.1 * math.sqrt(target_energy / energy))


def head_scales(
    features_gram: Tensor, features_target: Tensor, weight: Tensor, num_heads: int, ridge: float = 1e-4
) -> Tensor:
    """One factor for each head's columns of W, all heads jointly: argmin_s sum_t |sum_h s_h W_h f_h,t - y_t|^2.

    Args:
        features_gram: sum of f f^T, shape [H V, H V].
        features_target: sum of f y^T, shape [H V, E].
        weight: W, shape [E, H V].
        num_heads: H.
        ridge: added to the diagonal, relative to its mean.

    Returns:
        Tensor: s, shape [H].
    """
    size = weight.shape[1] // num_heads
    # <W_i f_i, W_j f_j> = sum of (W_i^T W_j) * (f_i f_j^T), block by block
    products = ((weight.T @ weight) * features_gram).unflatten(0, (num_heads, size)).unflatten(2, (num_heads, size))
    left = products.sum(dim=(1, 3))
    right = (weight.T * features_target).sum(dim=1).unflatten(0, (num_heads, size)).sum(dim=1)
    strength = ridge * left.diagonal().mean()
    if not float(strength) > 0.0:
        return torch.ones_like(right)
    left.diagonal().add_(strength)
    return torch.linalg.solve(left, right)


def ridge_output_projection(
    features_gram: Tensor, features_target: Tensor, copied_weight: Tensor, pull: float
) -> Tensor:
    """W_o by ridge regression pulled to the copied weights.

    argmin_W  sum_t |W f_t - y_t|^2 + lambda |W - W_0|^2,   lambda = pull x mean diagonal of sum f f^T
    W = (sum y f^T + lambda W_0) (sum f f^T + lambda I)^-1

    Args:
        features_gram: sum of f f^T, shape [F, F].
        features_target: sum of f y^T, shape [F, E].
        copied_weight: W_0, shape [E, F].
        pull: strength; 0 is plain least squares.

    Returns:
        Tensor: W_o, shape [E, F].
    """
    strength = pull * features_gram.diagonal().mean()
    left = features_gram.clone()
    left.diagonal().add_(strength)
    right = features_target + strength * copied_weight.T
    factor, info = torch.linalg.cholesky_ex(left)
    if int(info) == 0:
        return torch.cholesky_solve(right, factor).T.contiguous()
    # Singular (no pull and fewer tokens than features): the minimum-norm solution.
    return (torch.linalg.pinv(left, hermitian=True) @ right).T.contiguous()


def squared_error(features_gram: Tensor, features_target: Tensor, weight: Tensor, target_energy: float) -> float:
    """sum_t |W f_t - y_t|^2 from the sums alone.

    Args:
        features_gram: sum of f f^T, shape [F, F].
        features_target: sum of f y^T, shape [F, E].
        weight: W, shape [E, F].
        target_energy: sum of |y|^2.

    Returns:
        float: the squared error, at least 0.
    """
    quadratic = float(((weight @ features_gram) * weight).sum())
    return max(quadratic - 2.0 * float((weight.T * features_target).sum()) + target_energy, 0.0)
