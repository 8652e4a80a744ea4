"""Aligns each converted layer with the attention that it replaces, on fresh text and chosen by held-out error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tcal_components.align.aligner import Aligner
from tcal_components.align.config import AlignConfig
from tcal_components.align.training import AlignResult
from tcal_components.distributed.collectives import rank
from tcal_components.modules.hybrid_decoder import HybridDecoder

__all__ = ["AlignConfig", "AlignResult", "Aligner", "align"]

Batch = Mapping[str, Any]
Log = Callable[[dict[str, float], int], None]


def align(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    train_stream: Iterable[Batch],
    heldout_batches: Sequence[Batch],
    *,
    config: AlignConfig,
    log: Log | None = None,
    on_step: Callable[[Aligner], None] | None = None,
    progress: bool = True,
    resume: Mapping[str, Any] | None = None,
    autocast_dtype: torch.dtype | None = None,
) -> AlignResult:
    """Aligns all mixers and returns, per layer, the weights of the lowest held-out error.

    Args:
        teacher: see :class:`Aligner`.
        mixers: see :class:`Aligner`; hold the chosen weights afterwards.
        train_stream: prepared batches, this process's part of each; on resume it starts at step
            ``resume["progress"]["step"]``.
        heldout_batches: prepared batches of other text; this process's part.
        config: numbers of the run.
        log: called with metrics and the number of steps made. ``align/error/{layer}``, ``align/error_mean``,
            ``align/error_worst``, ``align/grad_norm_max`` and ``align/lr`` every step; ``align/heldout_error/{layer}``,
            ``align/heldout_error_mean`` and ``align/heldout_error_worst`` at evaluations.
        on_step: called after each step and its evaluation, for example to save ``aligner.state_dict()``.
        progress: show a progress bar on rank 0.
        resume: a state of ``Aligner.state_dict()``.
        autocast_dtype: see :class:`Aligner`.

    Returns:
        AlignResult: weights, errors and curve.

    Raises:
        ValueError: no held-out batch, a stream that ends early, or a state of another student.
        FloatingPointError: a loss that is no longer finite; names layer and step.
    """
    aligner = Aligner(teacher=teacher, mixers=mixers, config=config, autocast_dtype=autocast_dtype)
    if resume is not None:
        aligner.load_state_dict(resume)

    def evaluate() -> None:
        errors = aligner.evaluate(heldout_batches)
        if log is not None:
            log(_metrics("align/heldout_error", errors), aligner.step)

    if not aligner.curve:
        evaluate()
    stream = iter(train_stream)
    with tqdm(
        total=config.steps, initial=aligner.step, desc="align", unit="step", disable=not progress or rank() != 0
    ) as bar:
        while aligner.step < config.steps:
            try:
                batch = next(stream)
            except StopIteration:
                raise ValueError(
                    f"the alignment data ended after {aligner.step} of align.steps {config.steps} steps"
                ) from None
            factor = config.schedule(aligner.step)
            measured = aligner.train_step(batch)
            if log is not None:
                metrics = _metrics("align/error", measured["error"])
                metrics["align/grad_norm_max"] = max(measured["grad_norm"].values())
                metrics["align/lr"] = aligner.rates.others * factor
                log(metrics, aligner.step)
            if aligner.step % config.eval_every == 0 or aligner.step == config.steps:
                evaluate()
            heldout = aligner.curve[-1]["error"]
            worst = max(heldout, key=lambda layer: heldout[layer])
            bar.set_postfix_str(
                f"held-out error {sum(heldout.values()) / len(heldout):.4f}, worst {heldout[worst]:.4f} (layer {worst})",
                refresh=False,
            )
            bar.update()
            if on_step is not None:
                on_step(aligner)
    return aligner.result()


def _metrics(prefix: str, errors: Mapping[int, float]) -> dict[str, float]:
    metrics = {f"{prefix}/{layer}": value for layer, value in errors.items()}
    metrics[f"{prefix}_mean"] = sum(errors.values()) / len(errors)
    metrics[f"{prefix}_worst"] = max(errors.values())
    return metrics
