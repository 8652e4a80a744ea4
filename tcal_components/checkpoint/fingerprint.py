"""Fingerprints: whether a stage's output was made from what the config asks for now."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SAMPLE = 1 << 20


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
    """Hash of a checkpoint folder without reading all of it.

    Of each safetensors file the size, the first and the last mebibyte count (the header with all names and shapes is in
    the first); config.json counts whole.

    Args:
        folder: Hugging Face model folder.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(folder).glob("*.safetensors")) + [Path(folder) / "config.json"]:
        if not path.is_file():  # a pipe would be waited for
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_SAMPLE))
            if size > 2 * _SAMPLE:
                file.seek(-_SAMPLE, 2)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:32]


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
