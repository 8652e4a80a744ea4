"""What the two stages that train are given: student, text, rates, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcal_components.align.resumable import resumable_alignment
from tcal_components.align.training import AlignResult
from tcal_components.checkpoint.run_state import RunState
from tcal_components.distill import Distiller
from tcal_components.distributed.preemption import StopRequest
from tcal_components.pipeline.config import PipelineConfig
from tcal_components.pipeline.models import Models
from tcal_components.pipeline.stages import Stages


def align_layers(
    models: Models,
    stages: Stages,
    config: PipelineConfig,
    *,
    state: RunState,
    resume: bool,
    stop: StopRequest,
    log: Callable[[dict[str, float], int], None],
) -> AlignResult:
    """Aligns the mixers that stage ``initialize`` left: each on its own, the outputs by regression, then jointly if asked.

    Args:
        models: of the run.
        stages: what they left.
        config: its sections.
        state: where an interrupted alignment is kept.
        resume: continue it.
        stop: whether a signal came.
        log: called with numbers and the step that they are of.

    Returns:
        Weights of the least held-out error, curves and counts; see :func:`~tcal_components.align.resumable.resumable_alignment`.

    Raises:
        Stopped: by a signal; what is done is saved.
    """
    bench, align = models.bench, config.align
    text = bench.training_data(align.seq_len, align.text_tokens)
    return resumable_alignment(
        state,
        resume=resume,
        teacher=models.teacher,
        mixers=bench.mixers(stages.read("initialize")),
        stream=bench.stream(text, align.batch_size, seed=bench.seed),
        prepare=bench.prepare,
        heldout_batches=list(bench.calibration_batches(align.batch_size, "heldout")),
        config=align,
        joint_stream=bench.joint_stream(align, seed=bench.seed + 2),
        save_every=bench.run.save_every,
        autocast_dtype=bench.ctx.autocast_dtype,
        log=log,
        should_stop=stop,
    )


def distiller(
    models: Models, stages: Stages, config: PipelineConfig, *, state: RunState, resume: bool
) -> tuple[Distiller, dict[str, Any]]:
    """The student (the mixers of the stage before in the teacher's other weights) with all that trains it.

    Args:
        models: of the run.
        stages: what they left.
        config: its sections; ``distill`` is one of them.
        state: where checkpoints are kept.
        resume: continue from the latest.

    Returns:
        Optimizer, schedule, checkpoints and best weights; and for the report what of the student computes in float8.
    """
    bench, distill = models.bench, config.distill
    assert distill is not None
    student, float8 = models.student(models.student_weights(stages.mixers))
    share = (distill.micro_batch_size or distill.batch_size // bench.ctx.world_size) * bench.ctx.world_size
    trainer = Distiller(
        student,
        models.teacher,
        bench.stream(bench.data["training"], distill.batch_size, seed=bench.seed + 1),
        config=distill,
        ctx=bench.ctx,
        loss=config.loss,
        run_state=state,
        resume=resume,
        heldout=lambda: bench.calibration_batches(share, "heldout"),
    )
    return trainer, float8
