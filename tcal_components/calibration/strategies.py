"""How a Gated DeltaNet layer starts: a table of strategies, each composed of small steps. None takes a gradient step.

A step changes ``start.mixer`` in place. Steps run in three phases: ``weights`` see the teacher's weights and statistics,
``first_batch`` see the layer's input, output and context on one batch, ``regression`` see the sums over all batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tcal_components.calibration import analytic
from tcal_components.calibration.collectives import all_rows, all_sum_
from tcal_components.calibration.projections import TeacherAttention, copy_projections_, read_values
from tcal_components.calibration.statistics import LayerStatistics
from tcal_components.modules.gated_delta_net import GatedDeltaNet

DISTANCES = {"mean": "distance", "mean_without_sink": "distance_without_sink", "median": "median_distance"}
FOLDS = ("auto", "on", "off")
MAX_GATE_TOKENS = 2048  # tokens on which the published output gate is matched: its scale is one number


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


def copy(start: LayerStart) -> None:
    """W_q, W_k, W_v, W_o from the teacher; convolutions the identity; the rest stays at its library default."""
    copy_projections_(start.mixer, start.source, w_star=start.w_star if start.fold else None)


def close_gate(start: LayerStart) -> None:
    """W_g = 0: the layer starts as a no-op."""
    start.mixer.g_proj.weight.zero_()


def open_gate(start: LayerStart) -> None:
    """W_g = random at full library scale + 1.28 w*."""
    rows = analytic.open_gate_rows(start.mixer.g_proj.weight, start.w_star, start.options.gate_level)
    start.mixer.g_proj.weight.copy_(rows)


def target_half_life(start: LayerStart, default: str) -> Tensor:
    """Half-life that the statistics ask for, shape [H]."""
    values = getattr(start.stats, DISTANCES[start.options.distance or default])
    return values.to(start.mixer.decay.A_log.device).clamp_min(start.options.min_half_life)


def constant_decay(start: LayerStart) -> None:
    """Published decay: W_a = 0, A_log = 0, dt_bias = softplus^-1(ln 2 / d_h), so the realised half-life is exactly d_h."""
    start.mixer.a_proj.weight.zero_()
    start.mixer.decay.A_log.zero_()
    start.mixer.decay.dt_bias.copy_(analytic.decay_bias(target_half_life(start, "mean")))


def centred_decay(start: LayerStart, batch: LayerBatch) -> None:
    """W_a stays random, A_log = 0, and dt_bias makes the *realised* half-life the median distance without the sink."""
    decay = start.mixer.decay
    preactivation = all_rows(start.mixer.a_proj(batch.x[batch.valid].float()))
    decay.A_log.zero_()
    dt_bias = analytic.fit_decay_bias(preactivation.double(), decay.A_log.double(), target_half_life(start, "median"))
    decay.dt_bias.copy_(dt_bias)


def write_gate(start: LayerStart) -> None:
    """Published write gate: W_b[h] = logit(beta*_h) w*."""
    concentration = analytic.entropy_concentration(start.stats.entropy)
    target = analytic.beta_target(concentration).to(start.w_star.device)
    start.mixer.b_proj.weight.copy_(analytic.write_gate_rows(target, start.w_star))
    start.notes["beta_target"] = target.tolist()


def normalised_state(mixer: GatedDeltaNet, x: Tensor, input_pos: Tensor | None) -> Tensor:
    """rmsnorm(o) * o_norm: what the output gate multiplies.

    Args:
        mixer: the layer.
        x: input, shape [B, T, E].
        input_pos: positions, shape [B, T], or None.

    Returns:
        Tensor: shape [B, T, H, V].
    """
    norm = mixer.o_norm
    output = mixer.state_output(x, input_pos=input_pos)
    return F.rms_norm(output, (output.shape[-1],), norm.scale.to(output.dtype), norm.eps)


def context_scale(start: LayerStart, batch: LayerBatch) -> None:
    """Published value scale: sigma_h by OLS of the context on the normalised state output, in the columns of W_o.

    The norm after the recurrence cancels any scale before it; so sigma is fitted behind the norm and goes behind it.
    """
    mixer = start.mixer
    assert batch.context is not None
    normalised = normalised_state(mixer, batch.x, batch.input_pos)[batch.valid].double()
    context = batch.context[batch.valid].double()
    output = read_values(normalised, context.shape[-1])  # [N, H, D]
    sums = all_sum_(torch.stack([(context * output).sum(dim=(0, 2)), output.square().sum(dim=(0, 2))]))
    sigma = analytic.ols_scale(sums[0], sums[1]).float()
    mixer.output_proj.weight.mul_(sigma.repeat_interleave(mixer.value_head_dim)[None, :])
    start.notes["sigma"] = sigma.tolist()


def matched_gate(start: LayerStart, batch: LayerBatch) -> None:
    """Published output gate: W_g = alpha N with N at library scale, alpha such that the output has the teacher's RMS."""
    mixer = start.mixer
    normalised = normalised_state(mixer, batch.x, batch.input_pos)[batch.valid][:MAX_GATE_TOKENS]
    preactivation = mixer.g_proj(batch.x[batch.valid][:MAX_GATE_TOKENS].float())
    target = all_sum_(batch.y[batch.valid][:MAX_GATE_TOKENS].double().square().sum())
    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(30):
        middle = (low + high) / 2
        gate = F.silu(math.exp(middle) * preactivation)
        energy = all_sum_(mixer.output_proj(normalised.flatten(1).float() * gate).double().square().sum())
        low, high = (low, middle) if float(energy) > float(target) else (middle, high)
    alpha = math.exp((low + high) / 2)
    mixer.g_proj.weight.mul_(alpha)
    start.notes["alpha"] = alpha


def norm_scale(start: LayerStart) -> None:
    """One factor in o_norm, by OLS of y on the layer's output with the copied W_o."""
    assert start.sums is not None
    sums, weight = start.sums, start.mixer.output_proj.weight.double()
    factor = analytic.output_scale(sums.gram, sums.target, weight, float(sums.energy))
    start.mixer.o_norm.scale.mul_(factor)
    sums.scale_(factor)
    start.notes["o_norm"] = factor


def ridge_output(start: LayerStart) -> None:
    """W_o by ridge regression on y, pulled to the copied weights."""
    assert start.sums is not None
    weight = start.mixer.output_proj.weight
    solved = analytic.ridge_output_projection(start.sums.gram, start.sums.target, weight.double(), start.options.pull)
    weight.copy_(solved)


WeightStep = Callable[[LayerStart], None]
BatchStep = Callable[[LayerStart, LayerBatch], None]


@dataclass(frozen=True)
class Strategy:
    """Steps of one strategy.

    Attributes:
        summary: one line for reports.
        weights: steps on weights and statistics.
        first_batch: steps on one batch of the layer's tensors.
        regression: steps on the sums over all batches.
        needs_statistics: whether the teacher must have been measured.
        folds: whether biases and norm weights may be folded in.
    """

    summary: str
    weights: tuple[WeightStep, ...]
    first_batch: tuple[BatchStep, ...] = ()
    regression: tuple[WeightStep, ...] = ()
    needs_statistics: bool = False
    folds: bool = False


STRATEGIES: dict[str, Strategy] = {
    "naive": Strategy("projections copied, library defaults for the rest", (copy,)),
    "zero_gate": Strategy("naive with W_g = 0: converted layers start as no-ops", (copy, close_gate)),
    "taylor_published": Strategy(
        "the four published rules, each one effective",
        (copy, constant_decay, write_gate),
        (context_scale, matched_gate),
        needs_statistics=True,
    ),
    "ridge": Strategy(
        "naive, then W_o by ridge regression", (copy,), regression=(ridge_output,), needs_statistics=True, folds=True
    ),
    "taylor": Strategy(
        "gates half open, half-lives from sink-free median distances, scale in o_norm, then W_o by ridge regression",
        (copy, open_gate),
        (centred_decay,),
        (norm_scale, ridge_output),
        needs_statistics=True,
        folds=True,
    ),
}
