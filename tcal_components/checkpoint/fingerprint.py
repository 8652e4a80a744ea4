"""Fingerprints of inputs and of model folders, and in what inputs differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PIECE = 1 << 22  # bytes
_READERS = 4
_SHORT = 24  # characters of a value that is shown


def fingerprint(*parts: Any) -> str:
    """Hash of JSON-serialisable inputs; the order of a mapping's keys does not count.

    Args:
        *parts: numbers, strings, lists, mappings; paths and other objects count by their text.

    Returns:
        32 hexadecimal digits.
    """
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def plain(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs as they come back from JSON, and as :func:`fingerprint` sees them."""
    found: dict[str, Any] = json.loads(json.dumps(inputs, default=str))
    return found


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In what inputs differ.

    Args:
        before: nested values by key, of :func:`plain`.
        now: likewise.

    Returns:
        list: such as ``align.steps 8 -> 4``; of long values, such as fingerprints, the key alone.
    """
    old, new = _flat(before), _flat(now)
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new or old[key] != new[key]:
            values = [json.dumps(side[key]) if key in side else "nothing" for side in (old, new)]
            short = max(map(len, values)) <= _SHORT
            found.append(f"{key} {values[0]} -> {values[1]}" if short else key)
    return found


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def folder_fingerprint(folder: str | Path) -> str:
    """Hash of a checkpoint folder: every byte of its safetensors files and of config.json.

    Files are read side by side, about as fast as the disk gives them; they are in the system's cache afterwards, from which
    the weights are loaded next.

    Args:
        folder: Hugging Face model folder.

    Returns:
        32 hexadecimal digits.
    """
    paths = [*sorted(Path(folder).glob("*.safetensors")), Path(folder) / "config.json"]
    paths = [path for path in paths if path.is_file()]  # a pipe would be waited for
    with ThreadPoolExecutor(_READERS) as pool:
        digests = list(pool.map(_digest, paths))
    return fingerprint([(path.name, digest) for path, digest in zip(paths, digests, strict=True)])


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):  # hashing releases the interpreter
            digest.update(piece)
    return digest.hexdigest()
