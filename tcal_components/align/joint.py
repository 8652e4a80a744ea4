"""All converted layers together, towards the teacher's next-token distribution, through layers that stay as they are.

Layers that were aligned on their own repeat the teacher's attention as well as each of them can; what is left is for the
layers to make up for one another. Only the mixers are trained, so a student costs its mixers' optimizer state and one copy of
the teacher, and the layers that keep attention stay the teacher's, bit for bit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.align.config import AlignConfig
from tcal_components.align.optimizer import LearningRates, MixerOptimizer
from tcal_components.align.training import Batch, MixerTraining
from tcal_components.distributed.collectives import all_sum_, rank, world_size
from tcal_components.distributed.parallel import reshard
from tcal_components.measure.divergence import divergence
from tcal_components.modules.conversion import converted
from tcal_components.modules.hybrid_decoder import HybridDecoder


class JointAligner(MixerTraining):
    """Minimises KL(teacher || student) over the mixers, one step at a time.

    Args:
        teacher: ``HybridDecoder`` teacher, plain or under FSDP2; the student is the teacher with its attention exchanged.
        mixers: by layer index (as text), aligned, float32; trained in place.
        config: numbers of the run; those of ``joint`` replace steps and warm-up.
        rates: peak learning rates of the alignment, of which ``joint.lr_scale`` is taken.
        autocast_dtype: run teacher and student under autocast to this type.

    Attributes:
        curve: one ``{"step", "kl"}`` per held-out evaluation.
    """

    def __init__(
        self,
        *,
        teacher: HybridDecoder,
        mixers: nn.ModuleDict,
        config: AlignConfig,
        rates: LearningRates,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(teacher=teacher, mixers=mixers, config=config, autocast_dtype=autocast_dtype)
        joint = config.joint
        self.numbers = dataclasses.replace(config, steps=joint.steps, warmup_steps=joint.warmup_steps)
        self.rates = rates.scaled(joint.lr_scale)
        chosen = [mixers[str(layer)] for layer in self.layers]
        self.optimizer = MixerOptimizer(chosen, self.numbers, rates=self.rates)

    def train_step(self, batch: Batch) -> tuple[float, float]:
        """One forward of the teacher and one of the student, and one optimizer step.

        Args:
            batch: this process's part of the prepared batch.

        Returns:
            tuple: mean KL in nats a token before the step, and the largest gradient norm of a layer.

        Raises:
            FloatingPointError: the divergence is no longer finite.
        """
        with torch.enable_grad():
            total, counted = self._divergence(batch)
            counted = all_sum_(counted).clamp_min(1)
            (total / counted).backward()
        reshard(self.teacher)
        norms = self.optimizer.step(self.step)
        mean, norm = torch.stack([all_sum_(total.detach().double()) / counted, norms.double().max()]).tolist()
        self._check_finite(mean, "training")
        self.step += 1
        self.tokens += batch["tokens"].numel() * world_size()
        return mean, norm

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> float:
        """Mean KL on held-out text in nats a token; keeps the weights if it is the lowest so far.

        Args:
            batches: this process's held-out batches, the same number on every process.

        Raises:
            FloatingPointError: it is not finite.
        """
        sums = torch.stack([torch.stack(self._divergence(batch)).double() for batch in batches]).sum(0)
        reshard(self.teacher)
        total, counted = all_sum_(sums).tolist()
        mean = total / max(counted, 1.0)
        self._check_finite(mean, "held-out")
        self.curve.append({"step": self.step, "kl": mean})
        self.keep_better(dict.fromkeys(self.layers, mean))
        return mean

    def _divergence(self, batch: Batch) -> tuple[Tensor, Tensor]:
        exchanged = converted(self.teacher, self.mixers)
        return divergence(self.teacher, exchanged, batch, autocast_dtype=self.autocast_dtype)

    def _check_finite(self, value: float, kind: str) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"the {kind} divergence is {value} at step {self.step} of align.joint: lower align.joint.lr_scale "
                f"({self.config.joint.lr_scale:.3g}), or look for NaN in the teacher"
            )


def align_jointly(
    aligner: JointAligner,
    train_stream: Iterable[Batch],
    heldout_batches: Sequence[Batch],
    *,
    log: Callable[[dict[str, float], int], None] | None = None,
    on_step: Callable[[JointAligner], None] | None = None,
) -> Mapping[str, Tensor]:
    """Runs the joint part to its end, or on from where ``aligner`` is.

    Args:
        aligner: with its mixers, fresh or with a loaded state.
        train_stream: prepared batches, this process's part of each, from step ``aligner.step`` on.
        heldout_batches: prepared batches of other text, by which the weights are chosen.
        log: called with ``align/joint_kl``, ``align/joint_grad_norm_max``, ``align/joint_heldout_kl`` and the step.
        on_step: called after each step and its evaluation, for example to save ``aligner.state_dict()``.

    Returns:
        Mapping: ``layers.{i}.attn.{name}`` to float32 tensors on the CPU: the best by held-out divergence, which may be
        those of the start.
    """
    joint, tell = aligner.config.joint, log or (lambda values, step: None)

    def evaluate() -> None:
        tell({"align/joint_heldout_kl": aligner.evaluate(heldout_batches)}, aligner.step)

    if not aligner.curve:
        evaluate()
    bar: Any = tqdm(total=joint.steps, initial=aligner.step, desc="align jointly", unit="step", disable=rank() != 0)
    with bar:
        for batch in train_stream:
            if aligner.step >= joint.steps:
                break
            kl, norm = aligner.train_step(batch)
            tell({"align/joint_kl": kl, "align/joint_grad_norm_max": norm}, aligner.step)
            if aligner.step % joint.eval_every == 0 or aligner.step == joint.steps:
                evaluate()
            bar.set_postfix_str(f"held-out KL {aligner.curve[-1]['kl']:.4f}", refresh=False)
            bar.update()
            if on_step is not None:
                on_step(aligner)
    return aligner.best_weights()
