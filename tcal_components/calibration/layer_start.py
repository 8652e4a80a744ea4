"""One layer while it is initialised: options, sums and what the steps of a strategy read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tcal_components.calibration import analytic
from tcal_components.calibration.projections import TeacherAttention
from tcal_components.calibration.regression import RegressionSums
from tcal_components.calibration.statistics import LayerStatistics
from tcal_components.modules.gated_delta_net import GatedDeltaNet

DISTANCES = {"mean": "distance", "mean_without_sink": "distance_without_sink", "median": "median_distance"}
FOLDS = ("auto", "always", "never")  # not on and off: YAML 1.1 reads those as booleans
FORCINGS = ("student", "teacher")


@dataclass(frozen=True)
class InitializeOptions:
    """Numbers of the strategies (config section ``initialize``).

    Args:
        pull: strength of the pull of the ridge regression for W_o to the copied weights, relative to the mean diagonal.
        fold: fold q/k/v biases and q/k norm weights of the teacher into the projections: ``always``, ``never``, or ``auto``
            (both are tried in each layer and the lower held-out error stays). Only strategies with a regression fold.
        distance: statistic that sets the half-life: ``mean``, ``mean_without_sink`` or ``median``. None: the strategy's.
        min_half_life: shortest half-life in tokens.
        gate_level: mean pre-activation of the output gates of the ``taylor`` family; silu(1.28) = 1.
        centre_keys: take the mean key of each head out of W_k (``taylor``, ``taylor_sequential``).
        write_level: mean write gate of every head (likewise); None leaves W_b at its library default.
        write_random: keep the random part of W_b besides.
        key_scale: factor of W_q and W_k where keys have the teacher's head size (likewise). The L2 norm cancels it, and silu
            is nearly linear where its input is small: 0.1 ends lower after alignment, but starts higher.
        value_scale: factor of W_v (likewise): the norm cancels it, but silu is nearly linear where its input is small.
        forcing: hidden states on which ``taylor_sequential`` fits a layer: the ``student``'s own or the ``teacher``'s.
        gamma: share of the student's drift from the teacher that each of its layers is asked to undo.
        pulls: strengths among which it chooses in each layer by held-out error; ``pull`` is for the other strategies.
        offload: it keeps the hidden states of the calibration text in host memory (2 x tokens x E numbers).
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
    centre_keys: bool = True
    write_level: float | None = 0.2
    write_random: bool = False
    key_scale: float = 1.0
    value_scale: float = 0.25
    forcing: str = "student"
    gamma: float = 0.5
    pulls: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    offload: bool = False
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
        if self.write_level is not None and not 0.0 < self.write_level < 1.0:
            raise ValueError(
                f"initialize.write_level is {self.write_level}; it must lie between 0 and 1, or be null for random rows"
            )
        for name in ("key_scale", "value_scale"):
            if getattr(self, name) <= 0:
                raise ValueError(f"initialize.{name} is {getattr(self, name)}; it must be positive")
        if self.forcing not in FORCINGS:
            raise ValueError(f"initialize.forcing is {self.forcing!r}; allowed: {', '.join(FORCINGS)}")
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"initialize.gamma is {self.gamma}; it must lie in [0, 1]")
        if not self.pulls or min(self.pulls) < 0:
            raise ValueError(f"initialize.pulls is {list(self.pulls)}; it must be a list of numbers of at least 0")
        if self.layers_per_pass is not None and self.layers_per_pass < 1:
            raise ValueError(f"initialize.layers_per_pass is {self.layers_per_pass}; it must be at least 1")


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
        heldout: the same over held-out text, where the strength of the pull is chosen by it.
        notes: diagnostics for the report.
    """

    layer: int
    mixer: GatedDeltaNet
    source: TeacherAttention
    statistics: LayerStatistics | None
    options: InitializeOptions
    fold: bool = False
    sums: RegressionSums | None = None
    heldout: RegressionSums | None = None
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
