"""Runs the programs that a model writes against their tests, for lm-eval's code tasks (humaneval, mbpp).

lm-eval 0.4.13 takes this from ``evaluate``'s metric ``code_eval``, which is a script on a hub and is fetched even to read
the task's config. The same is done here without a download.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

SECONDS = 10.0  # that a program may take, starting Python included
MEMORY = 4 << 30  # bytes that it may address

_LIMITS = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))\n"


def passes(program: str, *, seconds: float = SECONDS) -> bool:
    """Whether a program runs to its end without an error.

    It runs in a process and an empty folder of its own, without this process's environment, for a limited time and in
    limited memory. That stops accidents; it is no wall against a program that means harm.

    Args:
        program: Python source.
        seconds: That it may take.

    Returns:
        bool: False also for one that takes too long or ends by ``exit``.
    """
    # An `exit()` in the program would pass without its tests: what counts is that its last line was reached.
    source = f"{_LIMITS}{program}\nimport os; os._exit(77)\n"
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", source],
                cwd=folder,
                env={"PATH": os.defpath, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError, ValueError):  # ValueError: a null character in the program
            return False
    return done.returncode == 77


class CodeEval:
    """Stands for the metric ``code_eval``, for k = 1.

    Args:
        allowed: Whether programs may run.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,), **_: Any
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Share of the candidates that pass their tests, all problems together.

        Raises:
            ValueError: If programs may not run, or for another k.
        """
        if not self.allowed:
            return {"pass@1": 0.0}, {}  # lm-eval tries it when it reads the task, and refuses to go on by itself
        if list(k) != [1]:
            raise ValueError(f"pass@k for k {list(k)}, expected [1]")
        found = [
            sum(passes(f"{candidate}\n{test}") for candidate in candidates) / len(candidates)
            for test, candidates in zip(references, predictions, strict=True)
        ]
        return {"pass@1": sum(found) / len(found)}, {}


@contextlib.contextmanager
def local_code_eval(allowed: bool) -> Iterator[None]:
    """Within it, ``evaluate.load("code_eval")`` is :class:`CodeEval`.

    Args:
        allowed: Whether programs may run.
    """
    import evaluate

    load = evaluate.load

    def local(path: str, *args: Any, **options: Any) -> Any:
        return CodeEval(allowed) if path == "code_eval" else load(path, *args, **options)

    with mock.patch.object(evaluate, "load", local):
        yield
