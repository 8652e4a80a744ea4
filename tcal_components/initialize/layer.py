"""One layer while it is initialised: options, sums and what the steps of a strategy read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from torch import Tensor

from tcal_components.config import Count, OneOf, Positive, Range, Settings
from tcal_components.initialize.output_projection import RegressionSums
from tcal_components.initialize.projections import TeacherAttention
from tcal_components.measure.statistics import LayerStatistics
from tcal_components.modules.gated_delta_net import GatedDeltaNet

FOLDS = ("auto", "always", "never")  # not on and off: YAML 1.1 reads those as booleans


@dataclass(frozen=True)
class InitializeOptions(Settings):
    """Numbers of the strategies (config section ``initialize``).

    Args:
        pull: strength of the pull of the ridge regression for W_o to the copied weights, relative to the mean diagonal.
        fold: fold q/k/v biases and q/k norm weights of the teacher into the projections: ``always``, ``never``, or ``auto``
            (both are tried in each layer and the lower held-out error stays). Only strategies with a regression fold.
        centre_keys: take the mean key of each head out of W_k (``taylor``).
        write_level: mean write gate of every head (likewise); None leaves W_b at its library default.
        value_scale: factor of W_v (likewise): the norm cancels it, but silu is nearly linear where its input is small.
        layers_per_pass: layers whose regression sums are held at once (two float64 matrices of size H V x H V and
            H V x E each); one pass of the teacher for each group. None: all in one pass.
    """

    pull: Annotated[float, Range(0, 1e12)] = 10.0
    fold: Annotated[str, OneOf(FOLDS)] = "auto"
    centre_keys: bool = True
    write_level: Annotated[float, Range(above=0, below=1)] | None = 0.2
    value_scale: Positive = 0.25
    layers_per_pass: Count | None = None


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
