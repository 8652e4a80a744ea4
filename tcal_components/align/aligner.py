"""One step at a time: the alignment of all converted layers from one teacher forward a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tcal_components.align.config import AlignConfig
from tcal_components.align.optimizer import MixerOptimizer
from tcal_components.align.stack import LayerStack
from tcal_components.align.training import AlignResult, Batch, MixerTraining
from tcal_components.distributed.collectives import all_sum_, world_size
from tcal_components.measure.capture import AttentionCapture, capture_batch, student_precision
from tcal_components.measure.sums import batch_documents
from tcal_components.modules.hybrid_decoder import HybridDecoder


class Aligner(MixerTraining):
    """Teacher-forced alignment of all converted layers, one step at a time.

    Each layer minimises |student(x) - y|^2 / |y|^2 (or the mean square, as published) on its own; its backward runs right
    after the teacher's layer, so the activations of one layer at a time are alive. Mixers may be plain modules
    (the same on every process; gradients are summed) or modules sharded by FSDP2, each on its own.

    Args:
        teacher: ``HybridDecoder`` teacher, plain or under FSDP2.
        mixers: by layer index (as text), float32, on the device of the batches; trained in place.
        config: numbers of the run.
        autocast_dtype: run the teacher under autocast to this type; mixers compute in the type of its outputs.

    Attributes:
        step: optimizer steps made.
        tokens: tokens seen.
        curve: held-out errors so far, see :class:`AlignResult`.
    """

    def __init__(
        self,
        *,
        teacher: HybridDecoder,
        mixers: nn.ModuleDict,
        config: AlignConfig,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(teacher=teacher, mixers=mixers, config=config, autocast_dtype=autocast_dtype)
        chosen = [mixers[str(layer)] for layer in self.layers]
        self._stack = LayerStack(chosen) if config.stack_layers and LayerStack.fits(chosen) else None
        self.optimizer = MixerOptimizer(chosen, config, stack=self._stack)
        self.rates = self.optimizer.rates

    def train_step(self, batch: Batch) -> dict[str, dict[int, float]]:
        """One forward of the teacher and one optimizer step of every layer.

        Args:
            batch: this process's part of the prepared batch.

        Returns:
            dict: ``error`` (relative, of this batch before the step) and ``grad_norm`` by layer.

        Raises:
            FloatingPointError: the loss of a layer is no longer finite.
        """
        valid = batch_documents(batch) >= 0
        if self._stack is not None:
            with torch.enable_grad():
                errors = self._backward(*self._stacked_error(self._stack, batch, valid), valid)
        else:
            found: list[Tensor] = []

            def train(capture: AttentionCapture) -> None:
                with torch.enable_grad():
                    sums = _error_and_energy(self.mixers[str(capture.layer)], capture, valid)
                    found.append(self._backward(*sums, valid))

            self._forward(batch, train)
            errors = torch.stack(found)
        norms = self.optimizer.step(self.step)
        # The one moment at which the host waits for the device.
        values, lengths = torch.stack([all_sum_(errors).double(), norms.double()]).tolist()
        self._check_finite(values, "training")
        self.step += 1
        self.tokens += batch["tokens"].numel() * world_size()
        return {
            "error": dict(zip(self.layers, values)),
            "grad_norm": dict(zip(self.layers, lengths)),
        }

    def _backward(self, error: Tensor, energy: Tensor, valid: Tensor) -> Tensor:
        """Gradients of one layer or, with a first dimension, of all; returns the relative error of this process's share."""
        # The sum over all processes: then the result does not depend on how a batch is split.
        energy = all_sum_(energy).clamp_min(torch.finfo(energy.dtype).tiny)
        scale = energy
        if not self.config.relative:
            scale = all_sum_(valid.sum().to(energy.dtype)).clamp_min(1.0) * self.teacher.spec.embed_dim
        (error / scale).sum().backward()
        return error.detach() / energy

    def _stacked_error(self, stack: LayerStack, batch: Batch, valid: Tensor) -> tuple[Tensor, Tensor]:
        """As :func:`_error_and_energy`, of all layers: shape [L] each."""
        seen: list[AttentionCapture] = []
        self._forward(batch, seen.append)
        x, y = (torch.stack([getattr(capture, name) for capture in seen]) for name in ("x", "y"))
        with student_precision(y):
            output = stack(x, input_pos=seen[0].input_pos)
        return _squares(output, y, valid)

    def _errors(self, batch: Batch) -> Tensor:
        """Sums |student - y|^2 and |y|^2 of every layer, shape [L, 2]."""
        valid = batch_documents(batch) >= 0
        if self._stack is not None:
            return torch.stack(self._stacked_error(self._stack, batch, valid), dim=-1)
        rows: list[Tensor] = []

        def add(capture: AttentionCapture) -> None:
            mixer = self.mixers[str(capture.layer)]
            rows.append(torch.stack(_error_and_energy(mixer, capture, valid)))
            if isinstance(mixer, FSDPModule):
                mixer.reshard()  # FSDP2 keeps a root's gathered weights after a forward without backward

        self._forward(batch, add)
        return torch.stack(rows)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> dict[int, float]:
        """Measures the held-out error and keeps the weights of every layer that improved.

        The copies are taken here, from the very weights that were measured.

        Args:
            batches: this process's held-out batches, the same number on every process.

        Returns:
            dict: relative error by layer.

        Raises:
            ValueError: no batch.
            FloatingPointError: an error that is not finite.
        """
        sums = [self._errors(batch).double() for batch in batches]
        if not sums:
            raise ValueError("alignment needs at least one held-out batch to choose weights by, but none was given")
        totals = all_sum_(torch.stack(sums).sum(dim=0))
        values = (totals[:, 0] / totals[:, 1].clamp_min(torch.finfo(torch.float64).tiny)).tolist()
        self._check_finite(values, "held-out")
        result = dict(zip(self.layers, values))
        self.curve.append({"step": self.step, "error": result})
        self.keep_better(result)
        return result

    @torch.no_grad()
    def result(self) -> AlignResult:
        """The best weights of each layer, which the mixers hold afterwards (every process must call this)."""
        first = self.curve[0]["error"]
        error = {
            layer: {"first": first[layer], "last": self._best_loss[layer], "step": self._best_step[layer]}
            for layer in self.layers
        }
        return AlignResult(
            weights=self.best_weights(), error=error, curve=self.curve, steps=self.step, tokens=self.tokens
        )

    def _point(self, point: Mapping[str, Any]) -> dict[str, Any]:
        # JSON turns integer keys into text.
        return {"step": point["step"], "error": {int(layer): value for layer, value in point["error"].items()}}

    def _forward(self, batch: Batch, callback: Callable[[AttentionCapture], None]) -> None:
        capture_batch(self.teacher, self.layers, batch, callback, with_qkv=False, autocast_dtype=self.autocast_dtype)

    def _check_finite(self, values: Sequence[float], kind: str) -> None:
        for layer, value in zip(self.layers, values):
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"the {kind} error of layer {layer} is {value} at alignment step {self.step}: lower align.lr "
                    f"({self.rates.gates:.3g}) and align.projection_lr ({self.rates.projections:.3g}), or look for NaN in the teacher"
                )


def _error_and_energy(mixer: nn.Module, capture: AttentionCapture, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sums |student(x) - y|^2 and |y|^2 over the tokens that are no padding, in at least float32."""
    with student_precision(capture.y):
        output = mixer(capture.x, input_pos=capture.input_pos)
    return _squares(output, capture.y, valid)


def _squares(output: Tensor, y: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over tokens and features [..., B, T, E]; ``valid`` is [B, T]."""
    dtype = torch.promote_types(y.dtype, torch.float32)
    y = y.to(dtype) * valid[..., None]
    error = output.to(dtype) * valid[..., None] - y
    return error.square().sum((-3, -2, -1)), y.square().sum((-3, -2, -1))
