"""What every training of mixers shares: their optimizer, the best weights so far, and a state to continue from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.align.config import AlignConfig
from tcal_components.align.optimizer import MixerOptimizer
from tcal_components.initialize.projections import whole
from tcal_components.modules.hybrid_decoder import HybridDecoder

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class AlignResult:
    """Outcome of an alignment.

    Attributes:
        weights: ``layers.{i}.attn.{name}`` to float32 tensors on the CPU: of each layer those of its lowest held-out error.
        error: by layer ``{"first", "last", "step"}``: relative held-out error before the first step, error of the chosen
            weights, and the step after which they were taken; what a polish adds says ``refit_alignment``.
        curve: one ``{"step", "error": {layer: relative held-out error}}`` per evaluation.
        steps: optimizer steps made.
        tokens: tokens seen by all processes, padding included.
        joint_curve: one ``{"step", "kl"}`` per held-out evaluation of the joint part.
    """

    weights: dict[str, Tensor]
    error: dict[int, dict[str, float | None]]
    curve: list[dict[str, Any]]
    steps: int
    tokens: int
    joint_curve: list[dict[str, float]] = field(default_factory=list)


class MixerTraining:
    """Mixers while they are trained against their frozen teacher; of each layer the weights of its lowest held-out loss stay.

    Args:
        teacher: ``HybridDecoder`` teacher, plain or under FSDP2.
        mixers: by layer index (as text), float32, on the device of the batches; trained in place. Plain modules (the same on
            every process; gradients are summed) or modules sharded by FSDP2, each on its own.
        config: numbers of the run.
        autocast_dtype: run the teacher under autocast to this type.

    Attributes:
        step: optimizer steps made.
        tokens: tokens seen by all processes.
        curve: held-out evaluations so far.
    """

    optimizer: MixerOptimizer

    def __init__(
        self,
        *,
        teacher: HybridDecoder,
        mixers: nn.ModuleDict,
        config: AlignConfig,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        self.teacher, self.mixers, self.config = teacher, mixers, config
        self.layers = sorted(int(layer) for layer in mixers)
        self.autocast_dtype = autocast_dtype
        self._best = {layer: self._copy(layer) for layer in self.layers}
        self._best_loss = {layer: math.inf for layer in self.layers}
        self._best_step = {layer: 0 for layer in self.layers}
        self.step = 0
        self.tokens = 0
        self.curve: list[dict[str, Any]] = []

    def keep_better(self, losses: Mapping[int, float]) -> None:
        """Copies the weights of every layer whose held-out loss is the lowest so far.

        Args:
            losses: by layer, measured with the present weights.
        """
        for layer, value in losses.items():
            if value < self._best_loss[layer]:
                self._best_loss[layer], self._best_step[layer] = value, self.step
                for name, parameter in self.mixers[str(layer)].named_parameters():
                    self._best[layer][name].copy_(parameter.detach())

    @torch.no_grad()
    def best_weights(self) -> dict[str, Tensor]:
        """Puts the best weights of each layer into the mixers and gathers them (every process must call this).

        Returns:
            dict: ``layers.{i}.attn.{name}`` to float32 tensors on the CPU.
        """
        weights = {}
        for layer in self.layers:
            for name, parameter in self.mixers[str(layer)].named_parameters():
                parameter.copy_(self._best[layer][name])
                weights[f"layers.{layer}.attn.{name}"] = whole(parameter).float().cpu().clone()
        return weights

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs besides the position of its data, which is ``step``.

        Tensors are the live ones, not copies: save before the next step. Keys are flat, names carry the parameter, and
        sharded tensors stay sharded, as torch.distributed.checkpoint wants them.

        Returns:
            dict: ``mixer.*``, ``exp_avg.*``, ``exp_avg_sq.*``, ``best.*`` tensors and ``progress``, plain numbers.
        """
        progress = {
            "step": self.step,
            "tokens": self.tokens,
            "curve": self.curve,
            "best_loss": self._best_loss,
            "best_step": self._best_step,
        }
        return {**self._tensors(), "progress": progress}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state_dict` gave.

        Args:
            state: of a run with the same converted layers and sizes.

        Raises:
            ValueError: other layers or sizes.
        """
        own = self._tensors()
        if set(own) | {"progress"} != set(state):
            different = sorted(set(own).symmetric_difference(state) - {"progress"})
            raise ValueError(
                f"the alignment state is of another student: {(different or ['progress'])[0]} does not match"
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise ValueError(
                    f"the alignment state has {name} of shape {list(state[name].shape)}, expected {list(tensor.shape)}"
                )
            tensor.copy_(state[name])
        progress = state["progress"]
        self.step, self.tokens = int(progress["step"]), int(progress["tokens"])
        # JSON turns integer keys into text.
        self._best_loss = {int(layer): float(value) for layer, value in progress["best_loss"].items()}
        self._best_step = {int(layer): int(value) for layer, value in progress["best_step"].items()}
        self.curve = [self._point(point) for point in progress["curve"]]
        self.optimizer.set_steps(self.step)

    def _point(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """An entry of the curve as it was before it became JSON."""
        return dict(point)

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for layer in self.layers:
            for name, parameter in self.mixers[str(layer)].named_parameters():
                tensors[f"mixer.{layer}.{name}"] = parameter.detach()
                tensors[f"best.{layer}.{name}"] = self._best[layer][name]
                for moment, value in self.optimizer.moments(parameter).items():
                    tensors[f"{moment}.{layer}.{name}"] = value
        return tensors

    def _copy(self, layer: int) -> dict[str, Tensor]:
        """Copies one layer's weights; whole ones on the CPU, shards where they are."""
        return {
            name: parameter.detach().clone()
            if hasattr(parameter, "full_tensor")
            else parameter.detach().to("cpu", copy=True)
            for name, parameter in self.mixers[str(layer)].named_parameters()
        }
