"""Files that a config names: JSON of others, and the folder that a run writes to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcal_components.config.schema import ConfigError

# The index of a checkpoint of hundreds of billions of parameters has under a megabyte.
_LARGEST_JSON = 64 << 20
_PACKAGE = Path(__file__).resolve().parents[1]


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that somebody else wrote.

    Args:
        path: the file.

    Returns:
        The object in it.

    Raises:
        FileNotFoundError: no such file, or a folder, pipe or device in its place.
        ValueError: a file that is too large, broken or too deep, that has NaN or infinity in it, or anything but an object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} {'is not a regular file' if path.exists() else 'does not exist'}")
    if path.stat().st_size > _LARGEST_JSON:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, expected a JSON file of at most {_LARGEST_JSON}")

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no number of JSON")

    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
        json.dumps(content, ensure_ascii=False).encode()  # half a character, \ud800, is JSON but no text
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason})") from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{path} holds half a surrogate pair, which is no text") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {json_kind(content)}; a JSON object is needed")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, or {} where there is no file.

    Raises:
        ValueError: If the file holds something else.
    """
    return read_json_object(path) if path.is_file() else {}


def json_kind(value: Any) -> str:
    """What a value read from JSON is, as messages call it."""
    return "null" if value is None else f"a {type(value).__name__}"


def check_output_dir(folder: Path, *, inputs: Sequence[Path] = ()) -> None:
    """Makes the folder that a run writes to, and sees whether it can: hours of work are worth nothing elsewhere.

    Args:
        folder: as the config gives it.
        inputs: folders that the run reads, which it must not write among.

    Raises:
        ConfigError: it lies inside the installed package, is one of ``inputs``, or cannot be written.
    """
    try:
        real = folder.resolve()
        if _PACKAGE in (real, *real.parents):
            raise ConfigError(f"output_dir {folder} lies inside the installed package, expected a folder of your own")
        for other in inputs:
            if other.resolve() in (real, real / "export"):
                raise ConfigError(
                    f"output_dir {folder} would write into {other}, which the run reads; name another folder"
                )
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}.tmp"
        probe.touch()
        probe.unlink()
    except (OSError, RuntimeError) as error:  # resolve raises a RuntimeError for a loop of links
        raise ConfigError(f"output_dir {folder} cannot be written: {getattr(error, 'strerror', error)}") from error
