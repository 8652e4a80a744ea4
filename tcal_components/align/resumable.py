"""An alignment that is continued after an interruption."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig
from tcal_components.align.joint import JointAligner, align_jointly
from tcal_components.align.loop import align
from tcal_components.align.optimizer import learning_rates
from tcal_components.align.refit import refit_alignment, refit_batches
from tcal_components.align.training import AlignResult, MixerTraining
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream
from tcal_components.distributed.collectives import all_sum_, rank
from tcal_components.distributed.preemption import Stopped
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


def resumable_alignment(
    state: RunState,
    *,
    resume: bool,
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    stream: BatchStream,
    prepare: Callable[[Batch], Batch],
    heldout_batches: Sequence[Batch],
    config: AlignConfig,
    joint_stream: BatchStream | None = None,
    save_every: int = 100,
    autocast_dtype: torch.dtype | None = None,
    log: Callable[[dict[str, float], int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> AlignResult:
    """An alignment, its refit and its joint part, which saves its state and continues from it to the same numbers.

    Args:
        state: begun with all that the alignment depends on. It stays: the caller removes it when the result is on disk.
        resume: continue from its latest step, if there is one.
        teacher: see :func:`~tcal_components.align.loop.align`.
        mixers: likewise, with the weights of the start.
        stream: this process's part of each batch, by step.
        prepare: moves a batch to the device and adds its mask.
        heldout_batches: prepared batches of other text.
        config: numbers of the run.
        joint_stream: likewise, of the joint part; needed where ``config.joint`` has steps.
        save_every: steps between states; the last step of the layers on their own is saved too, because a refit and its
            evaluation may take long.
        autocast_dtype: run the teacher under autocast to this type.
        log: see :func:`~tcal_components.align.loop.align`; steps of the joint part follow those of the layers.
        should_stop: asked after every step; any process's yes saves and ends the alignment.

    Returns:
        AlignResult: as of an unbroken run; ``last`` of ``error`` is that of the final weights.

    Raises:
        Stopped: it was asked to stop before the end; the state is saved.
    """
    # Of the weights at the start, which a resumed run has too.
    rates = learning_rates(mixers.values(), config)
    saved = _saved(state, teacher, mixers, config) if resume else None
    device = next(mixers.parameters()).device

    def save(training: MixerTraining, before: int = 0, end: int = config.steps, **notes: Any) -> None:
        step = before + training.step
        stop = should_stop is not None and bool(all_sum_(torch.tensor(int(should_stop()), device=device)))
        if stop or training.step % save_every == 0 or (training.step == end and not before):
            tensors = training.state_dict()
            state.save(step, tensors, {"progress": {**tensors.pop("progress"), **notes}})
        if stop:
            raise Stopped(step)

    options: dict[str, Any] = {"config": config, "autocast_dtype": autocast_dtype}
    if saved is not None and "layers" in saved["progress"]:
        result = _result(saved["progress"].pop("layers"))
    else:
        if saved is not None:
            stream.step = int(saved["progress"]["step"])
        batches = (prepare(batch) for batch in stream)
        result = align(
            teacher, mixers, batches, heldout_batches, **options,
            log=log, on_step=save, progress=rank() == 0, resume=saved,
        )  # fmt: skip
        text = (prepare(batch) for batch in refit_batches(stream, config))
        result, saved = refit_alignment(teacher, mixers, text, heldout_batches, result, **options), None
    if not config.joint.steps:
        return result
    assert joint_stream is not None
    return _joint(
        JointAligner(teacher=teacher, mixers=mixers, rates=rates, **options),
        joint_stream, prepare, heldout_batches, result, saved,
        log=log, on_step=lambda joint: save(joint, config.steps, config.joint.steps, layers=_notes(result)),
    )  # fmt: skip


def _joint(
    aligner: JointAligner,
    stream: BatchStream,
    prepare: Callable[[Batch], Batch],
    heldout_batches: Sequence[Batch],
    result: AlignResult,
    saved: Mapping[str, Any] | None,
    *,
    log: Callable[[dict[str, float], int], None] | None,
    on_step: Callable[[JointAligner], None],
) -> AlignResult:
    """The joint part behind ``result``, from the mixers as they are or from a saved state."""
    if saved is not None:
        aligner.load_state_dict(saved)
        stream.step = aligner.step
    before = result.steps
    weights = align_jointly(
        aligner, (prepare(batch) for batch in stream), heldout_batches, on_step=on_step,
        log=None if log is None else lambda values, step: log(values, before + step),
    )  # fmt: skip
    measured = Aligner(
        teacher=aligner.teacher, mixers=aligner.mixers, config=aligner.config, autocast_dtype=aligner.autocast_dtype
    ).evaluate(heldout_batches)
    error = {
        layer: {**values, "layer": values["last"], "last": measured[layer]} for layer, values in result.error.items()
    }
    return dataclasses.replace(
        result,
        weights=dict(weights),
        error=error,
        steps=before + aligner.step,
        tokens=result.tokens + aligner.tokens,
        joint_curve=aligner.curve,
    )


def _notes(result: AlignResult) -> dict[str, Any]:
    """A result without its weights, which the state of the joint part holds, as JSON can keep it."""
    return {name: getattr(result, name) for name in ("error", "curve", "steps", "tokens")}


def _result(notes: Mapping[str, Any]) -> AlignResult:
    """What :func:`_notes` gave, read from JSON, which turns integer keys into text."""
    curve = [
        {**point, "error": {int(layer): value for layer, value in point["error"].items()}} for point in notes["curve"]
    ]
    error = {int(layer): values for layer, values in notes["error"].items()}
    return AlignResult(weights={}, error=error, curve=curve, steps=notes["steps"], tokens=notes["tokens"])


def _saved(
    state: RunState, teacher: HybridDecoder, mixers: nn.ModuleDict, config: AlignConfig
) -> dict[str, Any] | None:
    if state.latest() is None:
        return None
    # Names and shapes are the same in both parts and come from a fresh aligner; copies, because the mixers stay at their start
    # if the state is not used.
    template = Aligner(teacher=teacher, mixers=mixers, config=config).state_dict()
    template.pop("progress")
    target = {name: torch.empty_like(tensor) for name, tensor in template.items()}
    _, extra = state.load(target)
    return {**target, "progress": extra["progress"]}
