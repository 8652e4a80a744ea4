"""The one way to say that a file was made from these inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from tcal_components.checkpoint.files import save_whole, write_json
from tcal_components.checkpoint.fingerprint import changes, fingerprint, plain

_MADE_OF, _INPUTS = "made_of", "inputs"


class Artifact:
    """A file that carries the inputs it was made from and their fingerprint.

    A ``.safetensors`` file holds tensors by name and has both in its header; a ``.json`` file holds an object and has them
    beside its other keys.

    Args:
        path: of the file, ``*.safetensors`` or ``*.json``.
        inputs: nested values by key: settings under the names that the config has for them, texts and earlier artifacts by
            their fingerprints.

    Attributes:
        inputs: as they come back from JSON.
        fingerprint: of the inputs, 32 hexadecimal digits; what is made of this artifact has it among its own inputs.
    """

    def __init__(self, path: str | Path, inputs: Mapping[str, Any]) -> None:
        self.path, self.inputs = Path(path), plain(inputs)
        self.fingerprint = fingerprint(self.inputs)

    def current(self) -> bool:
        """Whether the file is there and was made from these inputs."""
        return self._header().get(_MADE_OF) == self.fingerprint

    def why(self) -> str | None:
        """In one line which inputs have changed since the file was made; None where it is current or missing."""
        header = self._header()
        if header.get(_MADE_OF) in (None, self.fingerprint):
            return None
        known = header.get(_INPUTS)
        return ", ".join(changes(known, self.inputs)) if known else "another version of this recipe"

    def load(self) -> dict[str, Any]:
        """The content, whatever it was made from: tensors on the CPU by name, or the object of a JSON file.

        Raises:
            FileNotFoundError: no such file.
        """
        if not self.path.is_file():
            raise FileNotFoundError(f"no file {self.path}")
        if self.path.suffix == ".json":
            return {key: value for key, value in self._header().items() if key not in (_MADE_OF, _INPUTS)}
        tensors: dict[str, Any] = load_file(str(self.path), device="cpu")
        return tensors

    def save(self, content: Mapping[str, Any], **notes: str) -> None:
        """Writes the file whole or not at all; its folder is made.

        Args:
            content: tensors by name, on any device (those that share memory are copied), or what JSON can hold.
            **notes: more of the header of a safetensors file.

        Raises:
            WriteError: in one line; what was there before is still there.
        """
        if self.path.suffix == ".json":
            write_json(self.path, {_MADE_OF: self.fingerprint, _INPUTS: self.inputs, **content})
            return
        header = {"format": "pt", "fingerprint": self.fingerprint, _INPUTS: json.dumps(self.inputs), **notes}
        save_whole(self.path, _apart(content), header)

    def _header(self) -> dict[str, Any]:
        """Fingerprint and inputs of the file, of JSON all of it; empty where the file is missing or damaged."""
        try:
            if self.path.suffix == ".json":
                found = json.loads(self.path.read_text(encoding="utf-8"))
                return found if isinstance(found, dict) else {}
            with safe_open(str(self.path), framework="pt") as file:
                header: Mapping[str, str] = file.metadata() or {}
            return {_MADE_OF: header.get("fingerprint"), _INPUTS: json.loads(header.get(_INPUTS, "null"))}
        except (OSError, ValueError, SafetensorError):
            return {}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: on the CPU, contiguous, none in the memory of another."""
    seen: set[int] = set()
    ready = {}
    for name, tensor in tensors.items():
        value = tensor.detach().to("cpu").contiguous()
        pointer = value.untyped_storage().data_ptr()
        ready[name] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return ready
