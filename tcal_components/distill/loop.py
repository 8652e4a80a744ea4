"""The distillation's loop, for those who need none of their own; the recipe has its own, in sight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tcal_components.data import BatchStream
from tcal_components.distill.config import DistillResult
from tcal_components.distill.trainer import Distiller
from tcal_components.modules.hybrid_decoder import HybridDecoder

OnEval = Callable[[int], Mapping[str, float]]
OnLog = Callable[[dict[str, float], int], None]


def distill(
    student: HybridDecoder,
    teacher: HybridDecoder,
    stream: BatchStream,
    *,
    on_eval: OnEval | None = None,
    on_log: OnLog | None = None,
    should_stop: Callable[[], bool] | None = None,
    **options: Any,
) -> DistillResult:
    """Distils from the first step, or the latest checkpoint, to the last.

    Args:
        student: see :class:`Distiller`, as the following and ``options``.
        teacher: likewise.
        stream: likewise.
        on_eval: see :func:`train`, as the following.
        on_log: likewise.
        should_stop: likewise.
        **options: ``config``, ``ctx``, ``loss``, ``run_state``, ``resume``, ``heldout`` and ``progress``.

    Returns:
        DistillResult: the curve and the counts.

    Raises:
        ValueError: if the stream and the config disagree, or a checkpoint does not fit.
        NonFiniteLossError: see :func:`train`.
    """
    trainer = Distiller(student, teacher, stream, **options)
    return train(trainer, on_eval=on_eval, on_log=on_log, should_stop=should_stop)


def train(
    trainer: Distiller,
    *,
    on_eval: OnEval | None = None,
    on_log: OnLog | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> DistillResult:
    """Takes all steps that are left.

    Args:
        trainer: of every process.
        on_eval: called by every process with the step, after ``config.eval_every_steps`` and at the end, in evaluation mode;
            its numbers join the curve.
        on_log: called by the first process with numbers and step, such as a torchtune metric logger's ``log_dict``.
        should_stop: asked before every step; any process's yes saves and ends the loop, as before a preemption.

    Returns:
        DistillResult: the curve and the counts.

    Raises:
        NonFiniteLossError: if a loss or gradient is not finite; the last good state is saved first.
    """
    config = trainer.config

    def report(values: dict[str, float]) -> None:
        if on_log is not None and trainer.ctx.is_first:
            on_log(values, trainer.step)

    trainer.begin()
    with trainer.progress_bar() as advance:
        while trainer.step < config.steps:
            batch = trainer.stream.batch(trainer.step)
            counted, stopping = trainer.agree(batch, should_stop is not None and should_stop())
            if stopping:
                break
            rate = trainer.rate
            trainer.seed()
            kl, ce, loss = backward(trainer, batch, counted)
            norm = trainer.clip()
            trainer.check_finite(loss, norm)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
            trainer.schedule.step()
            trainer.step += 1
            advance(kl)
            row: dict[str, float] = {}
            if trainer.due(config.log_every_steps):
                row = {"loss": kl, "ce": ce, "lr": rate, "grad_norm": norm}
                report({**row, **trainer.speed()})
            if trainer.due(config.eval_every_steps):
                found = trainer.judge()
                if on_eval is not None:
                    with trainer.evaluation():
                        found |= {name: float(value) for name, value in on_eval(trainer.step).items()}
                if found:
                    report(found)
                row |= found
            trainer.record(row)
            if trainer.due(config.save_every_steps):
                trainer.save()
    return trainer.end()


def backward(trainer: Distiller, batch: Mapping[str, Tensor], counted: int) -> list[float]:
    """Gradients of the mean loss over the global batch.

    Args:
        trainer: whose student gets them.
        batch: this process's part, tensors [B, T].
        counted: tokens with a label, of all processes.

    Returns:
        Means over the global batch: KL, cross-entropy, and the loss that is trained, in nats a token.
    """
    ctx = trainer.ctx
    sums = torch.zeros(3, dtype=torch.float64, device=ctx.device)
    for micro in trainer.micro_batches(batch):
        with ctx.autocast():
            total, parts = trainer.model(**micro)
        # FSDP2 averages gradients over processes; the sum over all tokens is wanted.
        (total * (ctx.world_size / counted)).backward()
        sums += torch.stack([parts["kl_sum"], parts["ce_sum"], total.detach()])
    means: list[float] = (ctx.all_sum(sums) / counted).tolist()
    return means
