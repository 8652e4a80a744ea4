"""Fits the output projections layer by layer, each on the hidden states that the student itself feeds the layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tcal_components.calibration.analytic import constant_direction
from tcal_components.calibration.collectives import all_sum_, rank
from tcal_components.calibration.layer_start import InitializeOptions, LayerBatch, LayerStart
from tcal_components.calibration.lockstep import Lockstep
from tcal_components.calibration.regression import RegressionSums
from tcal_components.calibration.statistics import LayerStatistics
from tcal_components.calibration.strategies import Strategy
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


def fit_in_sequence(
    plan: Strategy,
    teacher: HybridDecoder,
    statistics: Mapping[int, LayerStatistics],
    candidates: Callable[[int, LayerStatistics], list[LayerStart]],
    fit: Sequence[Batch],
    heldout: Sequence[Batch],
    options: InitializeOptions,
    autocast_dtype: torch.dtype | None,
) -> dict[int, list[LayerStart]]:
    """Initialises the layers in order and lets the student's stream pass through each before the next is fitted.

    Attention statistics stay the teacher's; mean input and w* are taken from the student's stream.

    Args:
        plan: a sequential strategy.
        teacher: plain or under FSDP2.
        statistics: of each converted layer.
        candidates: gives the ways in which a layer is tried; the one of the lower held-out error stays.
        fit: this process's batches for the regression.
        heldout: batches by which strengths and candidates are chosen.
        options: numbers of the strategy.
        autocast_dtype: run the teacher under autocast to this type.

    Returns:
        dict: by layer a list of the one start that was chosen.
    """
    streams = Lockstep(
        teacher,
        [*fit, *heldout],
        gamma=options.gamma,
        forced=options.forcing == "student",
        autocast_dtype=autocast_dtype,
        offload=options.offload,
    )
    chosen: dict[int, list[LayerStart]] = {}
    last = max(statistics, default=-1)
    for layer in tqdm(range(last + 1), desc="initialize", unit="layer", disable=rank() != 0, leave=False):
        with streams.enter(layer):
            if layer not in statistics:
                streams.advance(None)
                continue
            starts = candidates(layer, _of_stream(statistics[layer], streams, len(fit)))
            _prepare(plan, starts, streams)
            _add_tokens(starts, streams, len(fit))
            for start in starts:
                for step in plan.regression:
                    step(start)
                start.sums = start.heldout = None  # the largest tensors of this stage
            best = min(starts, key=lambda start: start.notes["sequential_error"])
            chosen[layer] = [best]
            if layer < last:
                streams.advance(best.mixer)
    return chosen


def _of_stream(statistics: LayerStatistics, streams: Lockstep, count: int) -> LayerStatistics:
    """The statistics with mean input and w* of the first ``count`` batches of the student's stream."""
    size = statistics.mean_x.shape[0]
    device = streams.batches[0]["tokens"].device
    sums = torch.zeros(size + 1, size, dtype=torch.float64, device=device)
    tokens = torch.zeros((), dtype=torch.float64, device=device)
    for number, (x, valid) in enumerate(streams.inputs()):
        if number == count:
            break
        rows = x[valid].double()
        sums[:size].addmm_(rows.T, rows)
        sums[size] += rows.sum(dim=0)
        tokens += rows.shape[0]
    mean = all_sum_(sums) / all_sum_(tokens)
    w_star, std = constant_direction(mean[:size], mean[size])
    values = {"mean_x": mean[size], "w_star": w_star, "w_star_std": std}
    return replace(statistics, **{name: value.float().cpu() for name, value in values.items()})


def _prepare(plan: Strategy, starts: Sequence[LayerStart], streams: Lockstep) -> None:
    """Runs the steps that see one batch; the steps of sequential strategies read only x of it."""
    x, valid = next(streams.inputs())
    data = LayerBatch(
        x=x.float(), y=x.float(), context=None, input_pos=streams.batches[0].get("input_pos"), valid=valid
    )
    for start in starts:
        for step in plan.first_batch:
            step(start, data)


def _add_tokens(starts: Sequence[LayerStart], streams: Lockstep, count: int) -> None:
    """Regression sums of every candidate: the first ``count`` batches are fitted, the others held out."""
    device = streams.batches[0]["tokens"].device
    for start in starts:
        embed_dim, size = start.mixer.output_proj.weight.shape
        start.sums = RegressionSums.zeros(size, embed_dim, device)
        start.heldout = RegressionSums.zeros(size, embed_dim, device)
    for tokens in streams.targets():
        valid: Tensor = tokens.valid
        for start in starts:
            with streams.precision():
                features = start.mixer.features(tokens.x, input_pos=tokens.input_pos)
            sums = start.sums if tokens.number < count else start.heldout
            assert sums is not None
            sums.add_(features[valid], tokens.target[valid], tokens.weight[valid])
    for start in starts:
        assert start.sums is not None and start.heldout is not None
        start.sums.all_reduce_()
        start.heldout.all_reduce_()
