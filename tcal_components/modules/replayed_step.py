"""A decoding step recorded once as a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchtune import utils

log = utils.get_logger("INFO")

WARMUP_STEPS = 2  # run before a step is captured: libraries allocate then what they keep


class ReplayedStep:
    """Calls a step that waits for nothing; as one CUDA graph, as soon as it is warm.

    Args:
        step: Works in place on tensors that stay where they are.
        device: CUDA device to make a graph on; None makes none.
    """

    def __init__(self, step: Callable[[], None], device: torch.device | None) -> None:
        self.step = step
        self.beside = None if device is None else torch.cuda.Stream(device)
        self.warm = 0
        self.graph: Any = None

    def __call__(self) -> None:
        """Runs the step once."""
        if self.graph is None and self.beside is not None and self.warm == WARMUP_STEPS:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        elif self.beside is None:
            self.step()
        else:  # capturing wants what runs before it on another stream than the default one
            self.warm += 1
            current = torch.cuda.current_stream(self.beside.device)
            self.beside.wait_stream(current)
            with torch.cuda.stream(self.beside):
                self.step()
            current.wait_stream(self.beside)

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.step()
            self.graph = graph
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("generation: no CUDA graph of a decoding step: %s", str(error).splitlines()[0])
            self.beside = None
