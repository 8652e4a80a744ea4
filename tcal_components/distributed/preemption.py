"""Ends a stage in an orderly way when the machine is about to be taken away."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class Stopped(Exception):
    """A stage has saved its state and ended before its end, because it was asked to.

    Args:
        step: steps made.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class StopRequest:
    """Becomes true when a signal arrives; pass it as a stage's ``should_stop``."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __call__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_on_signals(*signals: signal.Signals) -> Iterator[StopRequest]:
    """Turn the first of some signals into a request to save and stop; a second one acts as it always does.

    Schedulers send a signal and kill later: SIGTERM everywhere, SIGUSR1 on request with Slurm's ``--signal``.

    Args:
        *signals: default SIGTERM and SIGUSR1.

    Yields:
        The request; the handlers that were there come back afterwards.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in signals or (signal.SIGTERM, signal.SIGUSR1)}

    def handle(number: int, frame: Any) -> None:
        request.signal = signal.Signals(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
