"""Torchtune's profiler around the distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.config import instantiate


@contextmanager
def profiled(node: DictConfig | None, device: torch.device) -> Iterator[Callable[[], None] | None]:
    """Profiles what happens inside, by the steps that it is told of.

    Args:
        node: section ``profiler``, as in torchtune's recipes; None, or one that is not ``enabled``, profiles nothing.
        device: of the run; on CUDA ``profile_memory`` records allocations during the active steps.

    Yields:
        To be called after each optimizer step; None where nothing is profiled.
    """
    if node is None or not node.get("enabled"):
        yield None
        return
    # Torchtune 0.6.1 asks for all kinds of devices by default, and torch warns of those that are not there.
    absent = {"cuda": torch.cuda.is_available(), "xpu": torch.xpu.is_available()}
    given: Any = {**{key: False for key, there in absent.items() if not there and key not in node}, **node}
    profiler, settings = instantiate(DictConfig(given))
    records = device.type == "cuda" and settings.profile_memory
    first = settings.wait_steps + settings.warmup_steps
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if records and steps == first:
            torch.cuda.memory._record_memory_history()
        profiler.step()
        if records and steps == first + settings.active_steps:
            torch.cuda.memory._record_memory_history(enabled=None)

    profiler.start()
    try:
        yield step
    finally:
        profiler.stop()
