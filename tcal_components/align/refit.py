"""Closed-form end of an alignment: W_o of every layer solved once more over many tokens, kept where it lowers the error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.align.aligner import AlignResult
from tcal_components.align.config import AlignConfig
from tcal_components.data import BatchStream
from tcal_components.distributed.collectives import world_size
from tcal_components.initialize.output_projection import RegressionSums, best_ridge
from tcal_components.measure.capture import AttentionCapture, capture_batch, student_precision
from tcal_components.measure.sums import batch_documents
from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


def refit_batches(stream: BatchStream, config: AlignConfig) -> Iterator[dict[str, Tensor]]:
    """The batches that follow the alignment's own in its stream, ``refit_tokens`` of them: text that it has not seen.

    Of a text shorter than ``config.text_tokens`` some is read again, but never more than one pass over it.

    Args:
        stream: of the alignment; its position does not matter and stays.
        config: numbers of the run.

    Yields:
        This process's part of each batch, on the CPU.
    """
    available = max(len(stream.dataset) // config.batch_size, 1)  # type: ignore[arg-type]
    for step in range(config.steps, config.steps + min(config.refit_steps, available)):
        yield stream.batch(step)


def refit_alignment(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Iterable[Batch],
    heldout_batches: Sequence[Batch],
    result: AlignResult,
    *,
    config: AlignConfig,
    autocast_dtype: torch.dtype | None = None,
) -> AlignResult:
    """Refits the mixers of an alignment.

    Args:
        teacher: plain or under FSDP2.
        mixers: as the alignment left them: plain modules, the same on every process; W_o changes in place.
        batches: prepared training batches, this process's part, the same number on every process.
        heldout_batches: those of the alignment.
        result: of the alignment.
        config: numbers of the run.
        autocast_dtype: run the teacher under autocast to this type.

    Returns:
        AlignResult: with the new W_o; ``error`` has the new error as ``last`` and besides ``trained`` (before the refit)
        and ``pull`` (None where the trained W_o stayed). The same object where ``config`` asks for no refit.
    """
    if not config.refit_steps:
        return result
    text = list(batches)
    notes = refit_outputs(teacher, mixers, text, heldout_batches, config=config, autocast_dtype=autocast_dtype)
    weights, error = dict(result.weights), dict(result.error)
    for layer in notes:
        weight = mixers[str(layer)].output_proj.weight  # type: ignore[union-attr]
        weights[f"layers.{layer}.attn.output_proj.weight"] = weight.detach().float().cpu().clone()  # type: ignore[operator]
        error[layer] = {
            **error[layer],
            "trained": error[layer]["last"],
            "last": notes[layer]["after"],
            "pull": notes[layer]["pull"],
        }
    seen = sum(batch["tokens"].numel() for batch in text) * world_size()
    return replace(result, weights=weights, error=error, tokens=result.tokens + seen)


@torch.no_grad()
def refit_outputs(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Sequence[Batch],
    heldout_batches: Sequence[Batch],
    *,
    config: AlignConfig,
    autocast_dtype: torch.dtype | None = None,
) -> dict[int, dict[str, float | None]]:
    """Solves W_o of every mixer by ridge regression pulled to the W_o that it has; the features stay as they are.

    On the teacher's inputs and for the relative error that the alignment minimises: one pass of the teacher over the text,
    with the sums of all layers in memory (four float64 matrices of size H V x H V or H V x E each).

    Args:
        teacher: plain or under FSDP2.
        mixers: plain modules, the same on every process; W_o changes in place.
        batches: prepared training batches, this process's part.
        heldout_batches: prepared batches of other text, by which the strength of the pull is chosen in each layer.
        config: ``refit_pulls``.
        autocast_dtype: run the teacher under autocast to this type.

    Returns:
        dict: by layer held-out error ``before`` and ``after`` and the ``pull``; the
        trained W_o stays, with pull None, where nothing lowers the error.

    Raises:
        ValueError: no training or no held-out batch.
    """
    for given, name in ((batches, "training"), (heldout_batches, "held-out")):
        if not given:
            raise ValueError(f"align.refit_tokens needs at least one {name} batch, but none was given")
    fit = _teacher_forced_sums(teacher, mixers, batches, autocast_dtype)
    heldout = _teacher_forced_sums(teacher, mixers, heldout_batches, autocast_dtype)
    return {layer: _solve(mixers[str(layer)], fit.pop(layer), heldout.pop(layer), config) for layer in sorted(fit)}


def _solve(
    mixer: nn.Module, fit: RegressionSums, heldout: RegressionSums, config: AlignConfig
) -> dict[str, float | None]:
    fit.all_reduce_()
    heldout.all_reduce_()
    assert isinstance(mixer, GatedDeltaNet)
    found = best_ridge(fit, heldout, mixer.output_proj.weight, config.refit_pulls)
    if found.pull is not None:
        mixer.output_proj.weight.copy_(found.weight)
    return {"before": found.before, "after": found.error, "pull": found.pull}


def _empty(mixer: nn.Module, device: torch.device) -> RegressionSums:
    assert isinstance(mixer, GatedDeltaNet)
    embed_dim, size = mixer.output_proj.weight.shape
    return RegressionSums.zeros(size, embed_dim, device)


def _teacher_forced_sums(
    teacher: HybridDecoder, mixers: nn.ModuleDict, batches: Sequence[Batch], autocast_dtype: torch.dtype | None
) -> dict[int, RegressionSums]:
    layers = sorted(int(layer) for layer in mixers)
    sums = {layer: _empty(mixers[str(layer)], batches[0]["tokens"].device) for layer in layers}
    for batch in batches:
        valid = batch_documents(batch) >= 0

        def add(capture: AttentionCapture, valid: Tensor = valid) -> None:
            mixer: Any = mixers[str(capture.layer)]
            with student_precision(capture.y):
                features = mixer.features(capture.x, input_pos=capture.input_pos)
            sums[capture.layer].add_(features[valid], capture.y[valid])

        capture_batch(teacher, layers, batch, add, with_qkv=False, autocast_dtype=autocast_dtype)
    return sums
