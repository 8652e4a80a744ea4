"""Closed-form end of an alignment: W_o of every layer solved once more over many tokens, kept where it lowers the error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.calibration.aligner import AlignResult
from tcal_components.calibration.capture import AttentionCapture, capture_batch, student_precision
from tcal_components.calibration.collectives import world_size
from tcal_components.calibration.diagnose import diagnose
from tcal_components.calibration.layer_optimizer import AlignConfig
from tcal_components.calibration.layer_sums import batch_documents
from tcal_components.calibration.lockstep import Lockstep
from tcal_components.calibration.regression import RegressionSums, best_ridge
from tcal_components.data import BatchStream
from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


def polish_batches(stream: BatchStream, config: AlignConfig) -> Iterator[dict[str, Tensor]]:
    """The batches that follow the alignment's own in its stream, ``polish_tokens`` of them: text that it has not seen.

    Of a text shorter than ``config.text_tokens`` some is read again, but never more than one pass over it.

    Args:
        stream: of the alignment; its position does not matter and stays.
        config: numbers of the run.

    Yields:
        This process's part of each batch, on the CPU.
    """
    available = max(len(stream.dataset) // config.batch_size, 1)  # type: ignore[arg-type]
    for step in range(config.steps, config.steps + min(config.polish_steps, available)):
        yield stream.batch(step)


def polish_alignment(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Iterable[Batch],
    heldout_batches: Sequence[Batch],
    result: AlignResult,
    *,
    config: AlignConfig,
    autocast_dtype: torch.dtype | None = None,
) -> AlignResult:
    """Polishes the mixers of an alignment.

    Args:
        teacher: plain or under FSDP2.
        mixers: as the alignment left them: plain modules, the same on every process; W_o changes in place.
        batches: prepared training batches, this process's part, the same number on every process.
        heldout_batches: those of the alignment.
        result: of the alignment.
        config: numbers of the run.
        autocast_dtype: run the teacher under autocast to this type.

    Returns:
        AlignResult: with the new W_o; ``error`` has the polished error as ``last`` (that of the layers on the teacher's
        inputs) and besides ``trained`` (before the polish) and ``pull`` (None where the trained W_o stayed). The same
        object where ``config`` asks for no polish.
    """
    if not config.polishes:
        return result
    text = list(batches)
    notes = polish(teacher, mixers, text, heldout_batches, config=config, autocast_dtype=autocast_dtype)
    if config.polish == "sequential":
        found = diagnose(teacher, mixers, heldout_batches, autocast_dtype=autocast_dtype)
        after = {layer: values["heldout_error"] for layer, values in found.items()}
    else:
        after = {layer: values["after"] for layer, values in notes.items()}
    weights, error = dict(result.weights), dict(result.error)
    for layer in notes:
        weight = mixers[str(layer)].output_proj.weight  # type: ignore[union-attr]
        weights[f"layers.{layer}.attn.output_proj.weight"] = weight.detach().float().cpu().clone()  # type: ignore[operator]
        error[layer] = {
            **error[layer],
            "trained": error[layer]["last"],
            "last": after[layer],
            "pull": notes[layer]["pull"],
        }
    seen = sum(batch["tokens"].numel() for batch in text) * world_size()
    return replace(result, weights=weights, error=error, tokens=result.tokens + seen)


@torch.no_grad()
def polish(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Sequence[Batch],
    heldout_batches: Sequence[Batch],
    *,
    config: AlignConfig,
    autocast_dtype: torch.dtype | None = None,
) -> dict[int, dict[str, float | None]]:
    """Solves W_o of every mixer by ridge regression pulled to the W_o that it has; the features stay as they are.

    ``teacher``: on the teacher's inputs, for the relative error that the alignment minimises; one pass of the teacher
    over the text, with the sums of all layers in memory (four float64 matrices of size H V x H V or H V x E each).
    ``sequential``: layer by layer on the student's own hidden states, for the target y + gamma (h_T - h_S); the hidden
    states of all text in memory (4 E bytes a token in bf16), the sums of one layer.

    Args:
        teacher: plain or under FSDP2.
        mixers: plain modules, the same on every process; W_o changes in place.
        batches: prepared training batches, this process's part.
        heldout_batches: prepared batches of other text, by which the strength of the pull is chosen in each layer.
        config: ``polish``, ``polish_pulls`` and ``polish_gamma``.
        autocast_dtype: run the teacher under autocast to this type.

    Returns:
        dict: by layer held-out error ``before`` and ``after`` (of the target that was fitted) and the ``pull``; the
        trained W_o stays, with pull None, where nothing lowers the error.

    Raises:
        ValueError: no training or no held-out batch.
    """
    for given, name in ((batches, "training"), (heldout_batches, "held-out")):
        if not given:
            raise ValueError(f"align.polish {config.polish} needs at least one {name} batch, but none was given")
    if config.polish == "sequential":
        return _polish_in_sequence(teacher, mixers, batches, heldout_batches, config, autocast_dtype)
    fit = _teacher_forced_sums(teacher, mixers, batches, autocast_dtype)
    heldout = _teacher_forced_sums(teacher, mixers, heldout_batches, autocast_dtype)
    return {layer: _solve(mixers[str(layer)], fit.pop(layer), heldout.pop(layer), config) for layer in sorted(fit)}


def _solve(
    mixer: nn.Module, fit: RegressionSums, heldout: RegressionSums, config: AlignConfig
) -> dict[str, float | None]:
    fit.all_reduce_()
    heldout.all_reduce_()
    assert isinstance(mixer, GatedDeltaNet)
    found = best_ridge(fit, heldout, mixer.output_proj.weight, config.polish_pulls, keep=True)
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


def _polish_in_sequence(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Sequence[Batch],
    heldout_batches: Sequence[Batch],
    config: AlignConfig,
    autocast_dtype: torch.dtype | None,
) -> dict[int, dict[str, float | None]]:
    count, device = len(batches), batches[0]["tokens"].device
    streams = Lockstep(teacher, [*batches, *heldout_batches], gamma=config.polish_gamma, autocast_dtype=autocast_dtype)
    notes: dict[int, dict[str, float | None]] = {}
    last = max(int(layer) for layer in mixers)
    for layer in range(last + 1):
        with streams.enter(layer):
            if str(layer) not in mixers:
                streams.advance(None)
                continue
            mixer: Any = mixers[str(layer)]
            fit, heldout = _empty(mixer, device), _empty(mixer, device)
            for tokens in streams.targets():
                with streams.precision():
                    features = mixer.features(tokens.x, input_pos=tokens.input_pos)
                part, valid = fit if tokens.number < count else heldout, tokens.valid
                part.add_(features[valid], tokens.target[valid], tokens.weight[valid])
            notes[layer] = _solve(mixer, fit, heldout, config)
            if layer < last:
                streams.advance(mixer)
    return notes
