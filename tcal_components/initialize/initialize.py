"""Starts the Gated DeltaNet layers of a student from its teacher, without a gradient step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from torch import Tensor
from tqdm import tqdm

from tcal_components.config import OneOf
from tcal_components.distributed.collectives import rank
from tcal_components.initialize.held_out_sums import HeldoutSums
from tcal_components.initialize.layer import InitializeOptions, LayerBatch, LayerStart
from tcal_components.initialize.output_projection import RegressionSums
from tcal_components.initialize.projections import check_head_sizes, read_attention
from tcal_components.initialize.strategies import STRATEGIES, Strategy
from tcal_components.measure.capture import AttentionCapture, capture_batch, student_precision
from tcal_components.measure.statistics import LayerStatistics, Statistics
from tcal_components.measure.sums import batch_documents
from tcal_components.modules.conversion import build_mixers
from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import GatedDeltaNetSpec

__all__ = ["STRATEGIES", "Initialization", "InitializeOptions", "StartConfig", "initialize_mixers"]

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class StartConfig(InitializeOptions):
    """A start as a config gives it: a strategy of ``STRATEGIES`` and its numbers."""

    strategy: Annotated[str, OneOf(STRATEGIES)] = "taylor"

    @property
    def options(self) -> InitializeOptions:
        """The numbers alone."""
        return InitializeOptions(**{field.name: getattr(self, field.name) for field in fields(InitializeOptions)})


@dataclass(frozen=True)
class Initialization:
    """Result of :func:`initialize_mixers`.

    Attributes:
        weights: ``layers.{i}.attn.{name}`` to float32 tensors on the CPU.
        diagnostics: by layer, JSON-serialisable: ``heldout_error`` (relative, null without batches), realised
            ``half_life`` and mean ``beta`` per head, mean ``gate``, ``folded``, ``dropped`` and what the steps note.
    """

    weights: dict[str, Tensor]
    diagnostics: dict[int, dict[str, Any]]


@torch.no_grad()
def initialize_mixers(
    strategy: str,
    *,
    teacher: HybridDecoder,
    layers: Sequence[int],
    gdn_spec: GatedDeltaNetSpec,
    statistics: Statistics | None,
    batches: Iterable[Batch],
    heldout_batches: Iterable[Batch] | None = None,
    seed: int = 0,
    options: InitializeOptions | None = None,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = "initialize",
) -> Initialization:
    """Weights of the mixers by one of the ``STRATEGIES``.

    One forward of the teacher over each batch serves all layers (of a group, with ``options.layers_per_pass``). In a
    distributed run every process calls this with its own batches, and all get the same weights.

    Args:
        strategy: a key of ``STRATEGIES``.
        teacher: ``HybridDecoder`` teacher, plain or under FSDP2.
        layers: indices of the converted layers.
        gdn_spec: sizes of the mixers.
        statistics: of the measure stage; may be None for strategies that need none.
        batches: prepared calibration batches; may be empty for strategies that need none.
        heldout_batches: batches on which the reported error is measured. None: the last of ``batches``, which is then
            not fitted unless it is the only one.
        seed: of everything random; each layer draws from its own generator, so a layer does not depend on the others.
        options: numbers of the strategies. Default: all defaults.
        autocast_dtype: run the teacher under autocast to this type.
        progress: label of a progress bar, on rank 0; None shows none.

    Returns:
        Initialization: weights and diagnostics.

    Raises:
        ValueError: an unknown strategy, head sizes that cannot be filled, missing statistics or missing batches.
    """
    options = options or InitializeOptions()
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown initialize.strategy {strategy!r}; allowed: {', '.join(STRATEGIES)}")
    plan = STRATEGIES[strategy]
    check_head_sizes(teacher.spec, gdn_spec)
    _check_statistics(strategy, plan, layers, statistics)
    fit, heldout = _split(list(batches), None if heldout_batches is None else list(heldout_batches))
    if not fit and (plan.first_batch or plan.regression):
        raise ValueError(f"initialize.strategy {strategy} needs calibration batches, but none was given")

    # Where the batches are: with CPU offload the weights of a sharded teacher are elsewhere.
    device = heldout[0]["tokens"].device if heldout else next(teacher.parameters()).device
    ordered = sorted(set(layers))
    known = statistics.layers if statistics is not None else {}

    weights: dict[str, Tensor] = {}
    diagnostics: dict[int, dict[str, Any]] = {}
    group_size = options.layers_per_pass or max(len(ordered), 1)
    groups = [ordered[begin : begin + group_size] for begin in range(0, len(ordered), group_size)]
    fit = fit if plan.regression else fit[: bool(plan.first_batch)]
    solved = len(ordered) if plan.regression else 0
    total = len(groups) * (len(fit) + len(heldout)) + solved
    hidden = progress is None or rank() != 0 or not total
    with tqdm(total=total, desc=progress, unit="step", disable=hidden) as bar:
        for group in groups:
            starts = {i: _candidates(plan, teacher, i, gdn_spec, known.get(i), seed, options, device) for i in group}
            _fit(plan, teacher, starts, fit, autocast_dtype, bar)
            for index, start in _choose(teacher, starts, heldout, autocast_dtype, bar).items():
                for name, value in start.mixer.state_dict().items():
                    weights[f"layers.{index}.attn.{name}"] = value.float().cpu()
                start.notes.update(folded=start.fold, dropped=["rope"] + ([] if start.fold else start.source.drops))
                diagnostics[index] = start.notes
    return Initialization(weights=weights, diagnostics=diagnostics)


def _check_statistics(name: str, plan: Strategy, layers: Sequence[int], statistics: Statistics | None) -> None:
    if not plan.needs_statistics:
        return
    missing = [index for index in layers if statistics is None or index not in statistics.layers]
    if missing:
        raise ValueError(
            f"initialize.strategy {name} needs the statistics of layer {missing[0]}: run stage measure first"
        )


def _split(batches: list[Batch], heldout: list[Batch] | None) -> tuple[list[Batch], list[Batch]]:
    if heldout is not None:
        return batches, heldout
    return (batches[:-1], batches[-1:]) if len(batches) > 1 else (batches, batches)


def _candidates(
    plan: Strategy,
    teacher: HybridDecoder,
    layer: int,
    gdn_spec: GatedDeltaNetSpec,
    statistics: LayerStatistics | None,
    seed: int,
    options: InitializeOptions,
    device: torch.device,
) -> list[LayerStart]:
    """The ways in which a layer is tried: with and without fold where the teacher has something to fold."""
    blocks: Any = teacher.layers
    source = read_attention(blocks[layer].attn, teacher.spec, device)
    foldable = plan.folds and bool(source.drops) and options.fold != "never"
    starts = []
    for fold in ([False, True] if options.fold == "auto" else [True]) if foldable else [False]:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed * 1_000_003 + layer)
            mixer = build_mixers(teacher.spec, gdn_spec, [layer], device=device)[str(layer)]
        assert isinstance(mixer, GatedDeltaNet)
        start = LayerStart(
            layer=layer,
            mixer=mixer.to(torch.float32).requires_grad_(False),
            source=source,
            statistics=statistics,
            options=options,
            fold=fold,
        )
        for step in plan.weights:
            step(start)
        starts.append(start)
    return starts


def _layer_batch(capture: AttentionCapture, batch: Batch) -> LayerBatch:
    context = None if capture.context is None else capture.context.transpose(1, 2)
    valid = batch_documents(batch) >= 0
    return LayerBatch(x=capture.x, y=capture.y, context=context, input_pos=capture.input_pos, valid=valid)


def _fit(
    plan: Strategy,
    teacher: HybridDecoder,
    starts: Mapping[int, list[LayerStart]],
    batches: Sequence[Batch],
    autocast_dtype: torch.dtype | None,
    bar: tqdm,
) -> None:
    """Runs the steps that need data: one forward of the teacher a batch."""
    for number, batch in enumerate(batches):

        def look(capture: AttentionCapture, batch: Batch = batch, first: bool = number == 0) -> None:
            data = _layer_batch(capture, batch)
            for start in starts[capture.layer]:
                for step in plan.first_batch if first else ():
                    step(start, _full_precision(data))
                if plan.regression:
                    with student_precision(data.y):
                        features = start.mixer.features(data.x, input_pos=data.input_pos)
                    _sums_of(start, features, data.y).add_(features[data.valid], data.y[data.valid])

        capture_batch(
            teacher,
            sorted(starts),
            batch,
            look,
            with_qkv=bool(plan.first_batch) and number == 0,
            autocast_dtype=autocast_dtype,
        )
        bar.update()
    for index in sorted(starts) if plan.regression else ():
        for start in starts[index]:
            assert start.sums is not None
            start.sums.all_reduce_()
            for step in plan.regression:
                step(start)
            start.sums = None  # the largest tensors of this stage
        bar.update()


def _full_precision(data: LayerBatch) -> LayerBatch:
    return LayerBatch(
        x=data.x.float(), y=data.y.float(), context=data.context, input_pos=data.input_pos, valid=data.valid
    )


def _sums_of(start: LayerStart, features: Tensor, y: Tensor) -> RegressionSums:
    if start.sums is None:
        start.sums = RegressionSums.zeros(features.shape[-1], y.shape[-1], y.device)
    return start.sums


def _choose(
    teacher: HybridDecoder,
    starts: Mapping[int, list[LayerStart]],
    heldout: Sequence[Batch],
    autocast_dtype: torch.dtype | None,
    bar: tqdm,
) -> dict[int, LayerStart]:
    """Measures every candidate on held-out text and keeps the better one of each layer."""
    sums: dict[tuple[int, bool], HeldoutSums] = {}
    for batch in heldout:

        def look(capture: AttentionCapture, batch: Batch = batch) -> None:
            data = _layer_batch(capture, batch)
            for start in starts[capture.layer]:
                if (capture.layer, start.fold) not in sums:
                    sums[capture.layer, start.fold] = HeldoutSums.zeros(start.mixer.num_heads, data.y.device)
                sums[capture.layer, start.fold].add_(start.mixer, data)

        capture_batch(teacher, sorted(starts), batch, look, with_qkv=False, autocast_dtype=autocast_dtype)
        bar.update()
    for key in sorted(sums):
        sums[key].all_reduce_()
    chosen = {}
    for index, candidates in starts.items():
        for start in candidates:
            measured = sums.get((index, start.fold))
            start.notes.update({"heldout_error": None} if measured is None else measured.notes())
        chosen[index] = min(candidates, key=lambda start: start.notes["heldout_error"] or 0.0)
    return chosen
