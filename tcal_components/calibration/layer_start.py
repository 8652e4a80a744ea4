"""One layer while it is initialised: options, sums and what the steps of a strategy read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tcal_components.calibration import analytic
from tcal_components.calibration.projections import TeacherAttention
from tcal_components.calibration.statistics import LayerStatistics
from tcal_components.modules.gated_delta_net import GatedDeltaNet

DISTANCES = {"mean": "distance", "mean_without_sink": "distance_without_sink", "median": "median_distance"}
FOLDS = ("auto", "on", "off")


@dataclass(frozen=True)
class InitializeOptions:
    """Numbers of the strategies (config section ``initialize``).

    Args:
        pull: strength of the pull of the ridge regression for W_o to the copied weights, relative to the mean diagonal.
        fold: fold q/k/v biases and q/k norm weights of the teacher into the projections: ``on``, ``off``, or ``auto``
            (both are tried in each layer and the lower held-out error stays). Only ``ridge`` and ``taylor`` fold.
        distance: statistic that sets the half-life: ``mean``, ``mean_without_sink`` or ``median``. None: the strategy's.
        min_half_life: shortest half-life in tokens.
        gate_level: mean pre-activation of the output gates of ``taylor``; silu(1.28) = 1.
        layers_per_pass: layers whose regression sums are held at once (two float64 matrices of size H V x H V and
            H V x E each); one pass of the teacher for each group. None: all in one pass.

    Raises:
        ValueError: a value out of range.
    """

    pull: float = 10.0
    fold: str = "auto"
    distance: str | None = None
    min_half_life: float = 1.0
    gate_level: float = analytic.OPEN_GATE
    layers_per_pass: int | None = None

    def __post_init__(self) -> None:
        if self.fold not in FOLDS:
            raise ValueError(f"initialize.fold is {self.fold!r}; allowed: {', '.join(FOLDS)}")
        if self.distance is not None and self.distance not in DISTANCES:
            raise ValueError(f"initialize.distance is {self.distance!r}; allowed: {', '.join(DISTANCES)}")
        if self.pull < 0:
            raise ValueError(f"initialize.pull is {self.pull}; it must be at least 0")
        if self.min_half_life <= 0:
            raise ValueError(f"initialize.min_half_life is {self.min_half_life}; it must be positive")
        if self.layers_per_pass is not None and self.layers_per_pass < 1:
            raise ValueError(f"initialize.layers_per_pass is {self.layers_per_pass}; it must be at least 1")


@dataclass
class RegressionSums:
    """Sums over the calibration tokens of one layer, float64.

    Attributes:
        gram: sum of f f^T of the features f before W_o, shape [H V, H V].
        target: sum of f y^T, shape [H V, E].
        energy: sum of |y|^2, scalar.
    """

    gram: Tensor
    target: Tensor
    energy: Tensor

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


@dataclass
class LayerStart:
    """One layer while it is initialised.

    Attributes:
        layer: index.
        mixer: Gated DeltaNet at its library defaults, drawn from the layer's own seed.
        source: the teacher's weights.
        statistics: the teacher's statistics, None for strategies that need none.
        options: numbers of the strategies.
        fold: whether biases and norm weights are folded in.
        sums: for the regression.
        notes: diagnostics for the report.
    """

    layer: int
    mixer: GatedDeltaNet
    source: TeacherAttention
    statistics: LayerStatistics | None
    options: InitializeOptions
    fold: bool = False
    sums: RegressionSums | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def stats(self) -> LayerStatistics:
        """The statistics of a strategy that needs them."""
        assert self.statistics is not None
        return self.statistics

    @property
    def w_star(self) -> Tensor:
        """w* on the device of the mixer, shape [E]."""
        return self.stats.w_star.to(self.mixer.b_proj.weight.device)


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """Tokens of one batch at one layer.

    Attributes:
        x: input, shape [B, T, E].
        y: the teacher's output, shape [B, T, E].
        context: the teacher's context, shape [B, T, H, D].
        input_pos: positions, shape [B, T], or None.
        valid: tokens that are no padding, shape [B, T].
    """

    x: Tensor
    y: Tensor
    context: Tensor | None
    input_pos: Tensor | None
    valid: Tensor
