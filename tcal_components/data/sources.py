"""Documents of a text source, one at a time and in a fixed order: files, folders, Hugging Face datasets."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tcal_components.assets import PREFIX, resolve

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIX = ".npy"


@dataclass(frozen=True)
class Document:
    """One document of a source.

    Attributes:
        where (str): where it stands, for messages: file and line, or dataset row.
        text (str): its text.
    """

    where: str
    text: str


def find_files(path: Path) -> list[Path]:
    """Text files of a folder (recursively, sorted by path) or the one file that ``path`` is.

    Raises:
        FileNotFoundError: if ``path`` does not exist.
        ValueError: if a file has another suffix, or a folder holds no text file.
    """
    if path.is_file():
        if path.suffix not in TEXT_SUFFIXES:
            raise ValueError(
                f"text file must be one of {', '.join(TEXT_SUFFIXES)} (or a {TOKEN_SUFFIX} array), got {path}"
            )
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"no such file or folder: {path}")
    files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise ValueError(f"no {', '.join(TEXT_SUFFIXES)} file below {path}")
    return files


def is_local(source: str) -> bool:
    """Whether ``source`` names a file or folder here (existing or not) rather than a Hugging Face dataset."""
    if source.startswith((PREFIX, "/", ".", "~")) or source.endswith((*TEXT_SUFFIXES, TOKEN_SUFFIX)):
        return True
    return resolve(source).exists() or source.count("/") > 1


def read_files(files: list[Path], *, text_column: str) -> Iterator[Document]:
    """Documents of the files in the given order: a .txt file is one document, a .jsonl line or .parquet row one each.

    Empty documents are passed over.

    Raises:
        ValueError: one line naming file and line for malformed JSON, a missing column or text that is not UTF-8.
    """
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for file in files:
        try:
            for document in readers[file.suffix](file, text_column):
                if document.text.strip():
                    yield document
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text (byte {error.start})") from error


def read_hub(
    source: str, *, subset: str | None, split: str | None, text_column: str, streaming: bool
) -> Iterator[Document]:
    """Documents of a Hugging Face dataset, by name or from a folder written by ``save_to_disk``.

    Raises:
        ValueError: if it cannot be loaded, or has no such split or text column.
    """
    import datasets

    try:
        if resolve(source).is_dir():
            data = datasets.load_from_disk(str(resolve(source)))
            if isinstance(data, datasets.DatasetDict):
                data = data[split or "train"]
        else:
            data = datasets.load_dataset(source, subset, split=split or "train", streaming=streaming)
    except Exception as error:  # datasets raises many kinds: no such name, no network, no such split, no such subset
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"source {source!r} is no file or folder here, and loading it as a Hugging Face dataset "
            f"(subset {subset}, split {split or 'train'}) failed: {reason}"
        ) from error
    columns = getattr(data, "column_names", None)
    if columns:
        _require_column(text_column, list(columns), source)
        data = data.select_columns([text_column])
    for row, item in enumerate(data):
        text = _text_of(item, text_column, f"{source} row {row}")
        if text.strip():
            yield Document(f"{source} row {row}", text)


def is_saved_dataset(path: Path) -> bool:
    """Whether the folder was written by ``datasets.Dataset.save_to_disk``."""
    return (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()


def shuffled(documents: Iterator[Document], *, seed: int, buffer_size: int = 10_000) -> Iterator[Document]:
    """Documents in a random order that depends on ``seed`` only, through a buffer of ``buffer_size`` documents."""
    generator = np.random.default_rng(seed)
    buffer: list[Document] = []
    for document in documents:
        if len(buffer) < buffer_size:
            buffer.append(document)
            continue
        slot = int(generator.integers(buffer_size))
        yield buffer[slot]
        buffer[slot] = document
    for slot in generator.permutation(len(buffer)):
        yield buffer[int(slot)]


def read_token_array(path: Path, *, vocab_size: int) -> np.ndarray:
    """Token ids saved as a ``.npy`` file, documents separated by the end-of-sequence id.

    Args:
        path (Path): the file; it is memory-mapped.
        vocab_size (int): ids must lie below it.

    Returns:
        np.ndarray: shape [N], an unsigned integer type.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is no 1-D integer array, is empty, or holds ids of another tokenizer.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such file or folder: {path}")
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is not a plain .npy array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or tokens.dtype.itemsize > 8:
        raise ValueError(
            f"{path} must be a 1-D array of token ids (uint16 or uint32), got {tokens.dtype}{list(tokens.shape)}"
        )
    if tokens.size == 0:
        raise ValueError(f"no text in {path}: the token array is empty")
    if int(tokens.max()) >= vocab_size or int(tokens.min()) < 0:
        raise ValueError(
            f"{path} holds token ids {int(tokens.min())} to {int(tokens.max())}, the tokenizer has 0 to {vocab_size - 1}: "
            "it was written with another tokenizer"
        )
    return tokens


def _read_txt(file: Path, text_column: str) -> Iterator[Document]:
    yield Document(str(file), file.read_text(encoding="utf-8"))


def _read_jsonl(file: Path, text_column: str) -> Iterator[Document]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                item = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where} is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
                ) from error
            if not isinstance(item, dict):
                raise ValueError(
                    f"{where} must be a JSON object with the column {text_column!r}, got {type(item).__name__}"
                )
            yield Document(where, _text_of(item, text_column, where))


def _read_parquet(file: Path, text_column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{file} is not a parquet file: {str(error).splitlines()[0]}") from error
    _require_column(text_column, list(table.schema_arrow.names), str(file))
    row = 0
    for batch in table.iter_batches(batch_size=1024, columns=[text_column]):
        for value in batch.column(0).to_pylist():
            where = f"{file} row {row}"
            yield Document(where, _text_of({text_column: value}, text_column, where))
            row += 1


def _text_of(item: dict[str, Any], text_column: str, where: str) -> str:
    _require_column(text_column, list(item), where)
    value = item[text_column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {text_column!r} must hold text, got {type(value).__name__}")
    return value


def _require_column(text_column: str, columns: list[str], where: str) -> None:
    if text_column not in columns:
        raise ValueError(f"no text column {text_column!r} in {where}; its columns are: {', '.join(map(str, columns))}")
