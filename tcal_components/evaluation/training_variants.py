"""What one row of the training benchmark runs."""

from __future__ import annotations

import dataclasses
from typing import Any

from tcal_components.precision.float8 import RECIPES

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"_component_": "torch.optim.AdamW", "betas": [0.9, 0.95]},
    "adamw8bit": {"_component_": "torchao.optim.AdamW8bit", "betas": [0.9, 0.95]},
}
_CHOICES = {
    "stage": ("distill", "align"),
    "student": ("bf16", "float8"),
    "teacher": ("bf16", "float8"),
    "loss": ("linear", "dense"),
    "optimizer": tuple(OPTIMIZERS),
    "weights": ("bf16", "fp32"),
    "float8_recipe": RECIPES,
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the benchmark (config section ``variants``, with defaults in ``defaults``).

    Args:
        stage: ``distill``, or ``align``: all converted layers from one teacher forward, mixers in float32.
        student: linear layers of the student in the compute dtype (``bf16``) or ``float8``; distillation only.
        teacher: the same of the teacher.
        loss: ``linear`` (from hidden states, in chunks), or ``dense`` (full logits).
        optimizer: ``adamw`` or ``adamw8bit``; distillation only.
        weights: type of the student's stored weights, gradients and AdamW moments; distillation only.
        activation_checkpointing: recompute the student's layers in the backward pass.
        compile: compile each layer.
        reshard_after_forward: free gathered weights between forward and backward.
        batch_size: sequences a step over all processes.
        seq_len: tokens a sequence.
        micro_batch_size: sequences a forward pass of one process; None takes its whole share.
        documents: documents packed into a sequence.
        warm_up: steps that do not count.
        steps: steps that count.
        float8_recipe: of trained or sharded layers.
        emulate_float8: the same numbers without the hardware, slowly.
    """

    stage: str = "distill"
    student: str = "bf16"
    teacher: str = "bf16"
    loss: str = "linear"
    optimizer: str = "adamw8bit"
    weights: str = "bf16"
    activation_checkpointing: bool = True
    compile: bool = False
    reshard_after_forward: bool = True
    batch_size: int = 4
    seq_len: int = 4096
    micro_batch_size: int | None = None
    documents: int = 2
    warm_up: int = 2
    steps: int = 3
    float8_recipe: str = "tensorwise"
    emulate_float8: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"a variant's {name} is '{getattr(self, name)}'; allowed: {', '.join(allowed)}")
        for name in ("batch_size", "documents", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"a variant's {name} is {getattr(self, name)}, expected at least 1")
        if self.warm_up < 0 or self.seq_len < 2 * self.documents:
            raise ValueError(
                f"a variant has warm_up {self.warm_up}, seq_len {self.seq_len} and {self.documents} documents; expected "
                "warm_up of at least 0 and at least two tokens a document"
            )
