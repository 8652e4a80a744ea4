"""The best weights of a distillation by held-out loss, its start among them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torchtune import utils

from tcal_components.checkpoint.run_state import RunState

log = utils.get_logger("INFO")

_ALL = 2**31  # checkpoints kept: which ones are dropped is decided here
_FIRST_LOOKS = 3  # at the held-out loss, in which a rise is said to come of the learning rate


class BestWeights:
    """Keeps the weights that had the least held-out loss; every process of the run calls every method together.

    They are written beside the checkpoints that the run continues from, sharded as the model is; a run that saves nothing
    copies them. Those that the last checkpoint knows as the best stay until the next one is written.

    Args:
        student: whose weights they are.
        run_state: of the distillation; None copies.

    Attributes:
        step: of the best weights; None before anything was measured.
        loss: theirs.
        first: the loss at the start.
        last: the latest loss.
        looks: losses measured.
    """

    def __init__(self, student: nn.Module, run_state: RunState | None) -> None:
        self.student = student
        self.state = None if run_state is None else RunState(run_state.directory / "best", keep_last=_ALL)
        self.step: int | None = None
        self.loss = self.first = self.last = math.inf
        self.looks = 0
        self._in_checkpoint: int | None = None
        self._copy: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Forgets what an earlier run left."""
        if self.state is not None:
            self.state.clear()

    def offer(self, step: int, loss: float) -> bool:
        """Takes the student's present weights if they are the best so far.

        Args:
            step: optimizer steps done.
            loss: held-out loss, the same in all processes; one that is not finite is never the best but at the start.

        Returns:
            bool: whether this is a rise above the start, in the first looks and for the first time.
        """
        rises = 0 < self.looks < _FIRST_LOOKS and loss > self.first >= self.last
        self.looks, self.last = self.looks + 1, loss
        if self.step is None:
            self.first = loss
        elif not loss < self.loss:
            return rises
        self.step, self.loss = step, loss if math.isfinite(loss) else math.inf
        if self.state is None:
            self._copy = {name: tensor.detach().clone() for name, tensor in self.student.state_dict().items()}
        else:
            self.state.save(step, {"model": self.student.state_dict()})
            self.state.keep({step, self._in_checkpoint})
        return rises

    def in_checkpoint(self) -> None:
        """Says that a checkpoint with :meth:`extra` has been written: it needs no older weights."""
        self._in_checkpoint = self.step
        if self.state is not None and self.step is not None:
            self.state.keep({self.step})

    def extra(self) -> dict[str, Any] | None:
        """What a checkpoint has to remember."""
        if self.step is None:
            return None
        numbers = {"loss": self.loss, "first": self.first, "last": self.last}
        plain = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"step": self.step, "looks": self.looks, **plain}

    def resume(self, extra: Mapping[str, Any] | None) -> None:
        """Continues from what :meth:`extra` gave; weights of later steps are forgotten."""
        if extra is None or self.state is None or extra["step"] not in self.state.steps():
            return self.begin()
        self.step, self.looks = extra["step"], extra["looks"]
        self.loss, self.first, self.last = (
            math.inf if extra[name] is None else extra[name] for name in ("loss", "first", "last")
        )
        return self.in_checkpoint()

    def restore(self) -> None:
        """Gives the student its best weights."""
        if self.state is not None:
            self.state.load({"model": self.student.state_dict()}, self.step)
            return
        for name, tensor in self.student.state_dict().items():
            tensor.detach().copy_(self._copy[name])
