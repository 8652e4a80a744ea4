"""The direction along which the inputs of a layer are nearly constant."""

from __future__ import annotations

import torch
from torch import Tensor


def constant_direction(gram: Tensor, mean: Tensor, ridge: float = 1e-3) -> tuple[Tensor, Tensor]:
    """w* with w* . x_t close to 1 for every token, and exactly 1 on average.

    Ridge solution (E[x x^T] + lambda I) w = E[x] with lambda = ridge x mean diagonal, then scaled so that w . E[x] = 1.
    A row of a projection can move its mean only along this direction: rescaling a row cannot where E[x] is nearly
    orthogonal to it.

    Args:
        gram: E[x x^T], shape [E, E].
        mean: E[x], shape [E].
        ridge: strength relative to the mean diagonal.

    Returns:
        tuple[Tensor, Tensor]: w*, shape [E], and the standard deviation of w* . x_t, a scalar.

    Raises:
        ValueError: the mean input is zero, so no direction is constant.
    """
    diagonal = torch.full_like(mean, float(gram.diagonal().mean()) * ridge)
    w = torch.linalg.solve(gram + torch.diag(diagonal), mean)
    level = w @ mean
    if not float(level) > 0.0:
        raise ValueError("the mean input of the layer is zero, so no direction w* has w*.x close to 1")
    w = w / level
    return w, (w @ gram @ w - 1.0).clamp_min(0.0).sqrt()
