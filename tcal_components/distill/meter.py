"""How long a distillation takes, and a bar that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tqdm import tqdm


class Meter:
    """Seconds and tokens a second.

    Args:
        tokens_a_step: of all processes.
        device: whose memory counts.
        step: at which it begins.
        seconds: of earlier runs.
    """

    def __init__(self, tokens_a_step: int, device: torch.device, *, step: int, seconds: float) -> None:
        self.tokens_a_step, self.device = tokens_a_step, device
        now = time.perf_counter()
        self._began = now - seconds
        self._mark, self._mark_step = now, step

    @property
    def seconds(self) -> float:
        """Of this run and earlier ones."""
        return time.perf_counter() - self._began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done within it is no training, and does not count for :meth:`speed`."""
        began = time.perf_counter()
        yield
        self._mark += time.perf_counter() - began

    def speed(self, step: int) -> dict[str, float]:
        """``tokens_per_second`` since the last call, and on a GPU ``peak_memory_gib``.

        Args:
            step: optimizer steps done.
        """
        now = time.perf_counter()
        rate = (step - self._mark_step) * self.tokens_a_step / max(now - self._mark, 1e-9)
        self._mark, self._mark_step = now, step
        if self.device.type != "cuda":  # torchtune 0.6.1's get_memory_stats raises on CPU
            return {"tokens_per_second": rate}
        return {
            "tokens_per_second": rate,
            "peak_memory_gib": torch.cuda.max_memory_allocated(self.device) / 2**30,
        }


@contextmanager
def token_bar(tokens_a_step: int, *, step: int, steps: int, shown: bool) -> Iterator[Callable[[float], None]]:
    """A bar of tokens.

    Args:
        tokens_a_step: of all processes.
        step: at which it begins.
        steps: at which it ends.
        shown: false shows nothing.

    Yields:
        What moves it by one step, called with the step's loss.
    """
    total, initial = steps * tokens_a_step, step * tokens_a_step
    with tqdm(total=total, initial=initial, unit="tok", unit_scale=True, desc="distill", disable=not shown) as bar:

        def advance(loss: float) -> None:
            bar.update(tokens_a_step)
            bar.set_postfix(loss=f"{loss:.4f}", refresh=False)

        yield advance
