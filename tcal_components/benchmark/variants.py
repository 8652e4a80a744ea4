"""What one row of the training benchmark runs."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from tcal_components.config import ConfigError, Count, Length, OneOf, Range, Settings
from tcal_components.precision.float8 import RECIPES

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"_component_": "torch.optim.AdamW", "betas": [0.9, 0.95]},
    "adamw8bit": {"_component_": "torchao.optim.AdamW8bit", "betas": [0.9, 0.95]},
}


@dataclasses.dataclass(frozen=True)
class Variant(Settings):
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

    stage: Annotated[str, OneOf(("distill", "align"))] = "distill"
    student: Annotated[str, OneOf(("bf16", "float8"))] = "bf16"
    teacher: Annotated[str, OneOf(("bf16", "float8"))] = "bf16"
    loss: Annotated[str, OneOf(("linear", "dense"))] = "linear"
    optimizer: Annotated[str, OneOf(OPTIMIZERS)] = "adamw8bit"
    weights: Annotated[str, OneOf(("bf16", "fp32"))] = "bf16"
    activation_checkpointing: bool = True
    compile: bool = False
    reshard_after_forward: bool = True
    batch_size: Count = 4
    seq_len: Length = 4096
    micro_batch_size: Count | None = None
    documents: Count = 2
    warm_up: Annotated[int, Range(0, 2**16)] = 2
    steps: Count = 3
    float8_recipe: Annotated[str, OneOf(RECIPES)] = "tensorwise"
    emulate_float8: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_len < 2 * self.documents:
            raise ConfigError(
                f"seq_len is {self.seq_len}, expected at least two tokens for each of {self.documents} documents"
            )
