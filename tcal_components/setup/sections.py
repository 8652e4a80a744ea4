"""Config sections and keys that every recipe has."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from tcal_components.config import (
    Count,
    Range,
    RunConfig,
    Settings,
    Steps,
    keys_of,
)

TEXTS = ("calibration_dataset", "dataset", "validation_dataset")
COMPONENTS = ("tokenizer", "teacher_checkpointer", "teacher_model", "model", *TEXTS)
# What the recipes themselves pass to a component.
SUPPLIED = {
    "model": ("retained_layers",),
    **dict.fromkeys(TEXTS, ("tokenizer",)),
    "optimizer": ("params",),
    "lr_scheduler": ("optimizer", "num_training_steps", "last_epoch"),
}
# Where each part of the text has its length from.
ROLES = {
    "calibration": "calibration_dataset",
    "heldout": "align",
    "training": "dataset",
    "evaluation": "validation_dataset",
}


@dataclasses.dataclass(frozen=True)
class BenchConfig(RunConfig):
    """Top-level keys that hold a single value.

    Args:
        validation_batch_size: sequences a batch of the evaluation text, over all processes.
        save_every: alignment steps between states that an interrupted run continues from.
    """

    validation_batch_size: Count = 8
    save_every: Steps = 100


# `checkpointer` is torchtune's name for the teacher's where a config has no other.
COMMON_KEYS = (*COMPONENTS, "checkpointer", *keys_of(BenchConfig), "retain", "parallel", "align")


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Settings):
    """The config section ``parallel``: how weights are spread over processes.

    Args:
        dp_replicate: groups of processes that each hold a whole, sharded copy (HSDP); 1 shards over all of them.
        reshard_after_forward: free a layer's gathered weights between forward and backward: less memory, more traffic.
        cpu_offload: keep sharded weights and optimizer state in host memory; slow, needs several processes.
        timeout_minutes: a process that has not answered for so long ends the run, and so does one that keeps the others
            waiting in a computation; reading, writing, checking an export and tokenising may take hours. One that has died
            ends the others at once.
    """

    dp_replicate: Count = 1
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    timeout_minutes: Annotated[float, Range(above=0, most=7 * 24 * 60)] = 10.0
