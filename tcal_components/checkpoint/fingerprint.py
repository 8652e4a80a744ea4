"""Fingerprints: whether a stage's output was made from what the config asks for now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PIECE = 1 << 22  # bytes
_READERS = 4


def fingerprint(*parts: Any) -> str:
    """Hash of JSON-serialisable inputs; the order of a mapping's keys does not count.

    Args:
        *parts: numbers, strings, lists, mappings; paths and other objects count by their text.

    Returns:
        32 hexadecimal digits.
    """
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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


def stored_fingerprint(path: str | Path) -> str | None:
    """Fingerprint in the metadata of a safetensors file.

    Args:
        path: the file.

    Returns:
        The fingerprint; None where there is no readable file or no fingerprint in it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    return metadata.get("fingerprint")
