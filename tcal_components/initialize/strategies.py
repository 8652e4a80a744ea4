"""How a Gated DeltaNet layer starts: a table of strategies, each composed of small steps. None takes a gradient step.

A step changes ``start.mixer`` in place. Steps run in three phases: ``weights`` see the teacher's weights and statistics,
``first_batch`` see the layer's input, output and context on one batch, ``regression`` see the sums over all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tcal_components.distributed.collectives import all_rows, all_sum_
from tcal_components.initialize import closed_form as analytic
from tcal_components.initialize.layer import LayerBatch, LayerStart
from tcal_components.initialize.projections import copy_projections_, read_values
from tcal_components.modules.gated_delta_net import GatedDeltaNet


def copy(start: LayerStart) -> None:
    """W_q, W_k, W_v, W_o from the teacher; convolutions the identity; the rest stays at its library default."""
    copy_projections_(start.mixer, start.source, w_star=start.w_star if start.fold else None)


def close_gate(start: LayerStart) -> None:
    """W_g = 0: the layer starts as a no-op."""
    start.mixer.g_proj.weight.zero_()


def open_gate(start: LayerStart) -> None:
    """W_g = random at full library scale + 1.28 w*."""
    rows = analytic.open_gate_rows(start.mixer.g_proj.weight, start.w_star, analytic.OPEN_GATE)
    start.mixer.g_proj.weight.copy_(rows)


def centre_keys(start: LayerStart) -> None:
    """The mean key of each head is taken out of W_k."""
    if start.options.centre_keys:
        keys = start.mixer.k_proj.weight
        keys.copy_(analytic.centred_rows(keys, start.stats.mean_x.to(keys.device), start.w_star))


def small_values(start: LayerStart) -> None:
    """W_v scaled down, so that silu(v) is close to v / 2 and not half of the values is lost."""
    start.mixer.v_proj.weight.mul_(start.options.value_scale)


def low_write_gate(start: LayerStart) -> None:
    """W_b[h] = logit(0.2) w* for every head; ``write_level`` None leaves the library default."""
    level = start.options.write_level
    if level is not None:
        rows = start.mixer.b_proj.weight
        rows.copy_(analytic.write_gate_rows(torch.full((rows.shape[0],), level, device=rows.device), start.w_star))


def half_life(start: LayerStart, distance: Tensor) -> Tensor:
    """A distance of the statistics as a half-life, at least one token, on the mixer's device, shape [H]."""
    return distance.to(start.mixer.decay.A_log.device).clamp_min(1.0)


def constant_decay(start: LayerStart) -> None:
    """Published decay: W_a = 0, A_log = 0, dt_bias = softplus^-1(ln 2 / d_h), so the realised half-life is exactly d_h."""
    start.mixer.a_proj.weight.zero_()
    start.mixer.decay.A_log.zero_()
    start.mixer.decay.dt_bias.copy_(analytic.decay_bias(half_life(start, start.stats.distance)))


def centred_decay(start: LayerStart, batch: LayerBatch) -> None:
    """W_a stays random, A_log = 0, and dt_bias makes the *realised* half-life the median distance without the sink."""
    decay = start.mixer.decay
    preactivation = all_rows(start.mixer.a_proj(batch.x[batch.valid].float()))
    decay.A_log.zero_()
    target = half_life(start, start.stats.median_distance)
    dt_bias = analytic.fit_decay_bias(preactivation.double(), decay.A_log.double(), target)
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
    """Published output gate: W_g = alpha N, a small perturbation with RMS(W_g x) = RMS(y), the teacher's output scale."""
    rows = start.mixer.g_proj
    preactivation, y = rows(batch.x[batch.valid].float()), batch.y[batch.valid]
    sums = all_sum_(torch.stack([part.double().square().sum() for part in (preactivation, y)]))
    mean_square = sums / torch.tensor([rows.out_features, rows.in_features], dtype=sums.dtype, device=sums.device)
    alpha = float((mean_square[1] / mean_square[0].clamp_min(torch.finfo(sums.dtype).tiny)).sqrt())
    rows.weight.mul_(alpha)
    start.notes["alpha"] = alpha


def norm_scale(start: LayerStart) -> None:
    """One factor in o_norm, by OLS of y on the layer's output with the copied W_o."""
    assert start.sums is not None
    sums, weight = start.sums, start.mixer.output_proj.weight.double()
    factor = analytic.output_scale(sums.gram, sums.target, weight, float(sums.energy))
    start.mixer.o_norm.scale.mul_(factor)
    sums.scale_(factor)
    start.notes["o_norm"] = factor


def head_scales(start: LayerStart) -> None:
    """One factor for each head's columns of the copied W_o, all heads jointly by OLS: what the ridge is pulled to."""
    assert start.sums is not None
    mixer = start.mixer
    scales = analytic.head_scales(
        start.sums.gram, start.sums.target, mixer.output_proj.weight.double(), mixer.num_heads
    ).float()
    mixer.output_proj.weight.mul_(scales.repeat_interleave(mixer.value_head_dim)[None, :])
    start.notes["head_scales"] = scales.tolist()


def ridge_output(start: LayerStart) -> None:
    """W_o by ridge regression on y, pulled to the copied weights."""
    assert start.sums is not None
    sums, weight = start.sums, start.mixer.output_proj.weight
    solved = analytic.ridge_output_projection(sums.gram, sums.target, weight.double(), start.options.pull)
    weight.copy_(solved)
    start.notes["fit_error"] = sums.error(solved)


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
    "taylor": Strategy(
        "gates half open, keys centred, small values, low write gates, half-lives from sink-free median distances, "
        "scales in o_norm and heads, then W_o by ridge regression",
        (copy, centre_keys, small_values, low_write_gate, open_gate),
        (centred_decay,),
        (norm_scale, head_scales, ridge_output),
        needs_statistics=True,
        folds=True,
    ),
}
