"""How a mixer behaves on held-out text: relative error, realised half-life, gates."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tcal_components.distributed.collectives import all_sum_
from tcal_components.initialize.closed_form import LN2
from tcal_components.initialize.layer import LayerBatch
from tcal_components.measure.capture import student_precision
from tcal_components.modules.gated_delta_net import GatedDeltaNet


@dataclass
class HeldoutSums:
    """Sums over held-out tokens of one mixer, float64.

    Attributes:
        tokens: number of tokens.
        error: sum of |student(x) - y|^2.
        energy: sum of |y|^2.
        decay: sum of -g, shape [H].
        beta: sum of write gates, shape [H].
        write_logit: sum of their pre-activations, shape [H].
        gate: sum over tokens of the mean output gate.
    """

    tokens: Tensor
    error: Tensor
    energy: Tensor
    decay: Tensor
    beta: Tensor
    write_logit: Tensor
    gate: Tensor

    @classmethod
    def zeros(cls, num_heads: int, device: torch.device) -> HeldoutSums:
        """Empty sums for ``num_heads`` heads on ``device``."""
        per_head = ("decay", "beta", "write_logit")
        return cls(
            **{
                item.name: torch.zeros(
                    (num_heads,) if item.name in per_head else (), dtype=torch.float64, device=device
                )
                for item in fields(cls)
            }
        )

    def add_(self, mixer: GatedDeltaNet, batch: LayerBatch) -> None:
        """Adds the tokens of one batch that are no padding."""
        with student_precision(batch.y):
            output = mixer(batch.x, input_pos=batch.input_pos)[batch.valid].double()
        y, x = batch.y[batch.valid].double(), batch.x[batch.valid].float()
        self.tokens += y.shape[0]
        self.error += (output - y).square().sum()
        self.energy += y.square().sum()
        logits = mixer.b_proj(x).double()
        self.decay -= mixer.decay(mixer.a_proj(x)).double().sum(dim=0)
        self.gate += F.silu(mixer.g_proj(x)).double().mean(dim=1).sum()
        self.write_logit += logits.sum(dim=0)
        self.beta += logits.sigmoid().sum(dim=0)

    def all_reduce_(self) -> None:
        """Adds the sums of all processes, in place."""
        for item in fields(self):
            all_sum_(getattr(self, item.name))

    def notes(self) -> dict[str, Any]:
        """Means for the report.

        Returns:
            dict: ``heldout_error``, ``half_life``, ``beta`` and ``write_logit`` per head, ``gate``.
        """
        tokens = self.tokens.clamp_min(1.0)
        return {
            "heldout_error": float(self.error / self.energy.clamp_min(torch.finfo(torch.float64).tiny)),
            "half_life": (LN2 * tokens / self.decay).tolist(),
            "beta": (self.beta / tokens).tolist(),
            "write_logit": (self.write_logit / tokens).tolist(),
            "gate": float(self.gate / tokens),
        }
