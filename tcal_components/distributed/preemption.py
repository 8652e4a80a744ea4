"""How a run ends before its end: by a signal with everything saved, or with one line where the machine is at fault."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

# Ctrl-C reaches all processes of a terminal, and `torchrun` then sends each of its own the same signal once more.
_THE_SAME = 2.0


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
    """Turn the first of some signals into a request to save and stop; a second one ends the process at once.

    Schedulers send a signal and kill later: SIGTERM everywhere, SIGUSR1 on request with Slurm's ``--signal``. A terminal sends
    SIGINT for Ctrl-C and SIGHUP when it is closed. What is ignored stays ignored, such as SIGHUP under ``nohup``.

    Args:
        *signals: default ``SIGNALS``.

    Yields:
        The request; the handlers that were there come back afterwards.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in signals or SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        # A Python handler waits for the interpreter, which may be in a collective that never ends: hence a thread and a pipe.
        first = 0.0
        while number := os.read(reading, 1):
            if number[0] not in before:  # of somebody else's handler
                continue
            if request.signal is None:
                request.signal, first = signal.Signals(number[0]), time.monotonic()
            elif not dist.is_torchelastic_launched() or time.monotonic() - first > _THE_SAME:
                os._exit(128 + number[0])

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    for number in before:
        signal.signal(number, lambda *_: None)
    awake = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread.start()
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(awake)
        os.close(writing)
        thread.join()
        os.close(reading)


@contextlib.contextmanager
def one_line_ending() -> Iterator[None]:
    """Ends a run that cannot go on through no fault of the code with one line on stderr and a status that is not zero.

    That is a full disk or a file that cannot be written or read, numbers that are no longer finite, and Ctrl-C where nothing
    is to be saved. Whatever else is raised keeps its traceback.
    """
    try:
        yield
        return
    except (KeyboardInterrupt, OSError, FloatingPointError) as error:
        cause = error
    text, code = " ".join(str(cause).split()), 1
    if isinstance(cause, KeyboardInterrupt):
        text, code = "stopped by SIGINT; what is finished is kept", 128 + signal.SIGINT
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(3)  # what the first process finds too ends this one meanwhile: it is said once
    print(f"\nerror: {text}", file=sys.stderr, flush=True)
    raise SystemExit(code) from cause
