"""Ridge regression for W_o from streamed sums, and the choice of its strength by the error on held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tcal_components.distributed.collectives import all_sum_
from tcal_components.initialize import closed_form as analytic


@dataclass
class RegressionSums:
    """Sums over the tokens of one layer, float64.

    Attributes:
        gram: sum of f f^T of the features f before W_o, shape [H V, H V].
        target: sum of f y^T, shape [H V, E].
        energy: sum of |y|^2, scalar.
    """

    gram: Tensor
    target: Tensor
    energy: Tensor

    @classmethod
    def zeros(cls, size: int, embed_dim: int, device: torch.device) -> RegressionSums:
        """Empty sums.

        Args:
            size: H V.
            embed_dim: E.
            device: where the sums live.

        Returns:
            RegressionSums: all zero.
        """
        shapes = ((size, size), (size, embed_dim), ())
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def add_(self, features: Tensor, y: Tensor) -> None:
        """Adds tokens.

        Args:
            features: shape [N, H V].
            y: shape [N, E].
        """
        features, y = features.double(), y.double()
        self.gram.addmm_(features.T, features)
        self.target.addmm_(features.T, y)
        self.energy += y.square().sum()

    def scale_(self, factor: float) -> None:
        """The sums of ``factor`` times the features, in place."""
        self.gram *= factor**2
        self.target *= factor

    def all_reduce_(self) -> None:
        """Adds the sums of all processes, in place."""
        for item in fields(self):
            all_sum_(getattr(self, item.name))

    def error(self, weight: Tensor) -> float:
        """Squared error of an output projection, relative to the energy of the targets.

        Args:
            weight: W_o, shape [E, H V].

        Returns:
            float: at least 0.
        """
        energy = float(self.energy)
        return analytic.squared_error(self.gram, self.target, weight.double(), energy) / max(energy, 1e-300)


@dataclass(frozen=True, eq=False)
class RidgeChoice:
    """Outcome of :func:`best_ridge`.

    Attributes:
        weight: W_o, float64, shape [E, H V].
        pull: its strength; None where the given W_o stayed.
        error: its held-out error.
        before: held-out error of the given W_o.
    """

    weight: Tensor
    pull: float | None
    error: float
    before: float


def best_ridge(fit: RegressionSums, heldout: RegressionSums, weight: Tensor, pulls: Sequence[float]) -> RidgeChoice:
    """Solves W_o for each strength of the pull and takes the best on held-out text, which may be the given one.

    Args:
        fit: sums over the text that is fitted.
        heldout: sums over other text.
        weight: W_o that the solutions are pulled to, shape [E, H V].
        pulls: strengths, relative to the mean diagonal of the Gram matrix.

    Returns:
        RidgeChoice: the same on every process where the sums are.
    """
    given = weight.double()
    before = heldout.error(given)
    best = RidgeChoice(given, None, before, before)
    for pull in pulls:
        solved = analytic.ridge_output_projection(fit.gram, fit.target, given, pull)
        error = heldout.error(solved)
        if error < best.error:
            best = RidgeChoice(solved, pull, error, before)
    return best
