"""How a recipe reads its command line and says what is wrong with it: in one line."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import yaml
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from torchtune import config as torchtune_config

from tcal_components.config.schema import ConfigError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a user's mistake into one line on stderr and exit status 2; anything else keeps its traceback.

    Only for the part of a recipe that checks its input: there a ValueError is the user's, later it is ours.
    """
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        _refuse(error)


def _refuse(error: Exception) -> NoReturn:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(10)  # a mistake that the first process made too ends this one meanwhile: it is said once
    # What the system says of a file without the number of the error, but with the file.
    told = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    line = " ".join(told.split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    print(f"error: {line}", file=sys.stderr, flush=True)
    raise SystemExit(2) from error


def command_line(main: Callable[[DictConfig], Any]) -> Callable[[], Any]:
    """Decorator of a recipe's main function: torchtune's ``config.parse``, with a broken file or argument said in one line.

    Args:
        main: takes the config; its own errors are its own.

    Returns:
        Reads the command line, calls ``main`` and exits.
    """
    started = False

    @functools.wraps(main)
    def begin(cfg: DictConfig) -> Any:
        nonlocal started
        started = True
        return main(cfg)

    def run() -> Any:
        try:
            torchtune_config.parse(begin)()
        except (
            yaml.YAMLError,
            ValueError,
            OSError,
            OmegaConfBaseException,
            TypeError,
            AssertionError,
            RecursionError,
        ) as error:
            if started:
                raise
            reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error
            _refuse(ConfigError(f"the config cannot be read: {reason}"))

    return run
