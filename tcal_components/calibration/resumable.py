"""Stages of the calibration whose output lies in a file: made once, found again, continued after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tcal_components.calibration.alignment import AlignConfig, Aligner, AlignResult, align
from tcal_components.calibration.collectives import all_sum_, rank
from tcal_components.calibration.polish import polish_alignment, polish_batches
from tcal_components.calibration.statistics import Statistics, measure
from tcal_components.checkpoint.run_state import RunState
from tcal_components.data import BatchStream
from tcal_components.distributed import ParallelContext
from tcal_components.distributed.preemption import Stopped
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


def stored_statistics(
    path: str | Path,
    *,
    fingerprint: str,
    teacher: HybridDecoder,
    layers: Sequence[int],
    batches: Callable[[], Iterable[Batch]],
    query_block: int,
    ctx: ParallelContext,
    autocast_dtype: torch.dtype | None = None,
) -> Statistics:
    """Statistics of the teacher's attention, from the file if it was made from the same inputs.

    Args:
        path: the file.
        fingerprint: of the teacher, the text and the layers.
        teacher: plain or under FSDP2.
        layers: to measure.
        batches: gives this process's prepared calibration batches.
        query_block: queries a block.
        ctx: the processes.
        autocast_dtype: run the teacher under autocast to this type.

    Returns:
        Statistics: of all processes.
    """
    path = Path(path)
    if not path.is_file() or Statistics.load(path).metadata.get("fingerprint") != fingerprint:
        sums = measure(teacher, layers, batches(), block_size=query_block, autocast_dtype=autocast_dtype)
        if ctx.world_size > 1:
            sums.all_reduce_()
        if ctx.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            sums.finalise({"fingerprint": fingerprint}).save(path)
        ctx.barrier()
    return Statistics.load(path)


def resumable_alignment(
    directory: str | Path,
    *,
    fingerprint: str,
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    stream: BatchStream,
    prepare: Callable[[Batch], Batch],
    heldout_batches: Sequence[Batch],
    config: AlignConfig,
    save_every: int = 100,
    keep_last: int = 2,
    autocast_dtype: torch.dtype | None = None,
    log: Callable[[dict[str, float], int], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> AlignResult:
    """An alignment that saves its state and continues from it to the same numbers.

    Args:
        directory: of the states; they are removed when the alignment has ended.
        fingerprint: of all that the alignment depends on; states with another one are removed.
        teacher: see :func:`~tcal_components.calibration.alignment.align`.
        mixers: likewise, with the weights of the start.
        stream: this process's part of each batch, by step.
        prepare: moves a batch to the device and adds its mask.
        heldout_batches: prepared batches of other text.
        config: numbers of the run.
        save_every: steps between states.
        keep_last: states kept.
        autocast_dtype: run the teacher under autocast to this type.
        log: see :func:`~tcal_components.calibration.alignment.align`.
        should_stop: asked after every step; any process's yes saves and ends the alignment.

    Returns:
        AlignResult: as of an unbroken run, polished if ``config`` says so.

    Raises:
        Stopped: it was asked to stop before the end; the state is saved.
    """
    state = RunState(directory, keep_last=keep_last)
    resume = _saved(state, teacher, mixers, config) if state.begin(fingerprint) else None
    if resume is not None:
        stream.step = int(resume["progress"]["step"])

    device = next(mixers.parameters()).device

    def save(aligner: Aligner) -> None:
        if aligner.step == config.steps:
            return
        stop = should_stop is not None and bool(all_sum_(torch.tensor(int(should_stop()), device=device)))
        if stop or aligner.step % save_every == 0:
            tensors = aligner.state_dict()
            state.save(aligner.step, tensors, {"progress": tensors.pop("progress")})
        if stop:
            raise Stopped(aligner.step)

    result = align(
        teacher,
        mixers,
        (prepare(batch) for batch in stream),
        heldout_batches,
        config=config,
        log=log,
        on_step=save,
        progress=rank() == 0,
        resume=resume,
        autocast_dtype=autocast_dtype,
    )
    text = (prepare(batch) for batch in polish_batches(stream, config))
    result = polish_alignment(
        teacher, mixers, text, heldout_batches, result, config=config, autocast_dtype=autocast_dtype
    )
    state.remove()
    return result


def _saved(
    state: RunState, teacher: HybridDecoder, mixers: nn.ModuleDict, config: AlignConfig
) -> dict[str, Any] | None:
    if state.latest() is None:
        return None
    # Names and shapes come from a fresh aligner; copies, because the mixers stay at their start if the state is not used.
    template = Aligner(teacher=teacher, mixers=mixers, config=config).state_dict()
    template.pop("progress")
    target = {name: torch.empty_like(tensor) for name, tensor in template.items()}
    _, extra = state.load(target)
    return {**target, "progress": extra["progress"]}
