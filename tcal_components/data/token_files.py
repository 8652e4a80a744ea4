"""Texts tokenised once: one process of a machine writes the token ids, all map the file, and the next run finds it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torchtune import utils

from tcal_components.assets import resolve
from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.files import save_whole
from tcal_components.checkpoint.fingerprint import fingerprint
from tcal_components.data.chat import BUILDERS
from tcal_components.data.disjoint import PackedDocument
from tcal_components.data.packed import Pack, PackedTextDataset
from tcal_components.data.sources import hub_commit, is_local
from tcal_components.distributed.watch import barrier, is_first, is_first_of_machine, shared

log = utils.get_logger("INFO")

# Components that are functions of their arguments and of the files which these name.
_KNOWN = ("tcal_components.", "torchtune.")
# What tokenizers and texts are read from; weights may lie beside them.
_SUFFIXES = {".txt", ".jsonl", ".parquet", ".npy", ".arrow", ".csv", ".json", ".jinja", ".model"}
# Files of more than this count by size and times, which a change of their content changes too.
_READ_WHOLE = 1 << 28
_LIBRARIES = ("tokenizers", "transformers", "torchtune", "datasets", "numpy")


class TokenFiles:
    """The packed texts of a run, each in a file of its own.

    A file is used as long as it was made of the same: the text's content, the tokenizer's files, the settings of both, this
    package's code and the libraries. Any other file, or a damaged one, is made anew. Text whose content cannot be told (of
    a component from elsewhere, a pattern of names, a web address) is tokenised at every start. All processes of a run ask
    for the same texts in the same order; the first process says which file is the right one.

    Args:
        folder: where the files go. Machines may share it or have one each.
        tokenizer: of all texts.
        section: its config section, resolved.

    Attributes:
        made_of (dict[str, str]): fingerprint of each text by name.
    """

    def __init__(self, folder: Path, tokenizer: Any, section: Mapping[str, Any]) -> None:
        self.folder, self.tokenizer, self._section = folder, tokenizer, section
        self.made_of: dict[str, str] = {}
        if is_first():  # what a killed run was writing
            for path in folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def get(self, name: str, section: Mapping[str, Any], make: Callable[[], PackedTextDataset]) -> PackedTextDataset:
        """A text, from its file if possible.

        Args:
            name: of the file, and for the log.
            section: the text's config section with the arguments that ``make`` passes in place of its own, resolved.
            make: reads and tokenises the text.

        Returns:
            PackedTextDataset: its arrays are mapped from the file, pages of which all processes share.

        Raises:
            WriteError: the file cannot be written; one line that names it.
        """
        path = self.folder / f"{name}.safetensors"
        made_of = self.made_of[name] = shared(self._fingerprint(section) if is_first() else "")
        made = None
        # One after the other: the first process may have written what the first one of another machine finds.
        for turn in (is_first(), is_first_of_machine() and not is_first()):
            if turn and self._read(path, made_of, whole=True) is None:
                began = time.monotonic()
                made = make()
                seconds = time.monotonic() - began
                log.info(f"tokenised {name}: {made.num_tokens} tokens in {seconds:.1f} s")
                if type(made) is PackedTextDataset:
                    _write(path, made, made_of)
            barrier()
        found = self._read(path, made_of) or made  # neither is empty
        return make() if found is None else found

    def once(self, name: str, texts: Sequence[str], find: Callable[[], Any]) -> Any:
        """What the first process finds out about texts, kept as long as they stay the same.

        Args:
            name: of the file.
            texts: their names.
            find: gives what JSON can hold.
        """
        kept = Artifact(self.folder / f"{name}.json", {text: self.made_of[text] for text in texts})
        if is_first() and not kept.current():
            kept.save({"found": find()})
        return shared(kept.load()["found"] if is_first() else None)

    def _fingerprint(self, section: Mapping[str, Any]) -> str:
        try:
            content = [_content(self._section), _content(section)]
        except (OSError, ValueError):  # the component itself says what is wrong, if anything is
            content = [secrets.token_hex(16)]
        code = _digest(Path(__file__).parent, {".py"})
        return fingerprint(content, code, [metadata.version(library) for library in _LIBRARIES])

    def _read(self, path: Path, made_of: str, *, whole: bool = False) -> PackedTextDataset | None:
        """The text of a file; None if it was made of something else, or is damaged: ``whole`` looks at every byte."""
        try:
            with safe_open(str(path), framework="pt") as file:
                notes = file.metadata() or {}
                if notes.get("fingerprint") != made_of:
                    return None
                arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (OSError, SafetensorError):
            return None
        if whole and _checksum(arrays) != notes["sha256"]:
            return None
        ends, text = arrays["where_ends"].tolist(), arrays["where"].tobytes()
        where = (text[begin:end].decode("utf-8", "surrogateescape") for begin, end in zip([0, *ends], ends))
        digests = map(bytes, arrays["digests"])
        places = zip(where, digests, arrays["document_starts"].tolist(), arrays["document_lengths"].tolist())
        pack = Pack(
            tokens=arrays["tokens"],
            starts=arrays["starts"],
            targets=arrays.get("targets"),
            used=arrays.get("used"),
            documents=[PackedDocument(*place) for place in places],
            sources=json.loads(notes["sources"]),
        )
        tokenizer = self.tokenizer if json.loads(notes["has_tokenizer"]) else None
        return PackedTextDataset(pack=pack, seq_len=int(notes["seq_len"]), tokenizer=tokenizer)


def _write(path: Path, dataset: PackedTextDataset, made_of: str) -> None:
    pack, documents = dataset.pack, dataset.documents
    where = [document.where.encode("utf-8", "surrogateescape") for document in documents]
    optional = {"targets": pack.targets, "used": pack.used}
    arrays: dict[str, np.ndarray] = {
        "tokens": pack.tokens,
        "starts": pack.starts,
        **{name: array for name, array in optional.items() if array is not None},
        "document_starts": np.asarray([document.start for document in documents], dtype=np.int64),
        "document_lengths": np.asarray([document.length for document in documents], dtype=np.int64),
        "digests": np.frombuffer(bytearray(b"".join(d.digest for d in documents)), np.uint8).reshape(-1, 16),
        "where": np.frombuffer(bytearray(b"".join(where)), np.uint8),
        "where_ends": np.cumsum([len(text) for text in where], dtype=np.int64),
    }
    notes = {
        "fingerprint": made_of,
        "sha256": _checksum(arrays),
        "sources": json.dumps(pack.sources),
        "seq_len": str(dataset.seq_len),
        "has_tokenizer": json.dumps(dataset.tokenizer is not None),
    }
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    save_whole(path, tensors, notes)


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def _content(value: Any) -> Any:
    """A config section with the content of all that it names: files and folders here, datasets of a hub.

    Raises:
        ValueError: it cannot be told.
        OSError: a file cannot be read.
    """
    if isinstance(value, Mapping):
        component, source = str(value.get("_component_", "")), value.get("source")
        if component and not component.startswith(_KNOWN):
            raise ValueError(f"nobody knows what {component} reads")
        found = {key: _content(entry) for key, entry in value.items()}
        if source in BUILDERS:
            files = found.get("data_files")
            if not all(isinstance(file, tuple) for file in (files if isinstance(files, list) else [files])):
                raise ValueError("the names of the files are a pattern or an address")
        elif isinstance(source, str) and not is_local(source):
            found["commit"] = hub_commit(source, value.get("subset", value.get("name")), value.get("revision"))
        elif source is None and component.startswith("torchtune.datasets."):
            raise ValueError(f"{component} names its source itself")
        return found
    if isinstance(value, list):
        return [_content(entry) for entry in value]
    if isinstance(value, str) and value and os.path.exists(resolve(value)):
        return value, _digest(resolve(value), _SUFFIXES)
    return value


def _digest(path: Path, suffixes: Collection[str]) -> str:
    """Hash of a file, or of names and content of the files below a folder; see :data:`_READ_WHOLE`."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in suffixes and file.is_file())
    elif not path.is_file():
        raise ValueError(f"{path} is a pipe or device")
    found = [file.stat() for file in files]
    whole = sum(stat.st_size for stat in found) <= _READ_WHOLE
    digest = hashlib.sha256()
    for file, stat in zip(files, found):
        digest.update(os.fsencode(file.relative_to(path)) + f" {stat.st_size} ".encode())
        if whole:
            digest.update(file.read_bytes())
        else:
            digest.update(f"{stat.st_mtime_ns} {stat.st_ctime_ns} ".encode())
    return digest.hexdigest()
