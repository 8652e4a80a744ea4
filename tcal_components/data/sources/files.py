"""Documents of a text source, one at a time and in a fixed order: files, folders, Hugging Face datasets."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tcal_components.assets import PREFIX, resolve
from tcal_components.data.sources.readers import Document, first_line, read_jsonl, read_parquet, read_txt

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIX = ".npy"
# Endings of files, of which a name that is not here says that it is missing: no dataset of a hub is called so.
_FILE_SUFFIXES = (
    *(*TEXT_SUFFIXES, TOKEN_SUFFIX, ".json", ".csv", ".tsv", ".md", ".html", ".xml", ".arrow", ".npz", ".bin", ".pt"),
    *(".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z"),
)


def find_files(path: Path) -> list[Path]:
    """Text files of a folder (recursively, sorted by path) or the one file that ``path`` is.

    Raises:
        FileNotFoundError: if ``path`` does not exist, or a link in the folder leads nowhere.
        ValueError: if a file has another suffix or is a pipe or device, or a folder holds no text file.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES and not file.is_dir())
        if not files:
            raise ValueError(f"no {', '.join(TEXT_SUFFIXES)} file below {path}")
    else:
        files = [path]
    for file in files:
        require_file(file)
        if file.suffix not in TEXT_SUFFIXES:
            raise ValueError(
                f"text file must be one of {', '.join(TEXT_SUFFIXES)} (or a {TOKEN_SUFFIX} array), got {file}"
            )
    return files


def require_file(path: Path) -> None:
    """Refuses what cannot be read twice, or not to its end.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: it is a pipe or device.
    """
    if not path.exists():
        raise FileNotFoundError(f"no such file or folder: {path}")
    if not path.is_file():
        raise ValueError(f"{path} is a pipe or device, expected a file or folder")


def is_local(source: str) -> bool:
    """Whether ``source`` names a file or folder here (existing or not) rather than a Hugging Face dataset."""
    if source.startswith((PREFIX, "/", ".", "~")) or source.lower().endswith(_FILE_SUFFIXES):
        return True
    path = resolve(source)
    return path.exists() or source.count("/") > 1 or ("/" in source and path.parent.is_dir())


def read_files(files: list[Path], *, text_column: str) -> Iterator[Document]:
    """Documents of the files in the given order: a .txt file is one document, a .jsonl line or .parquet row one each.

    Empty documents are passed over.

    Raises:
        ValueError: one line naming file and line for malformed JSON, a missing column or text that is not UTF-8.
    """
    readers = {".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}
    for file in files:
        for document in readers[file.suffix](file, text_column):
            if not document.is_blank():
                yield document


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
    require_file(path)
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        kind = f"{tokens.dtype}{list(tokens.shape)}"
    except Exception as error:  # numpy raises many kinds for a malformed header or an archive of arrays
        raise ValueError(f"{path} is not a plain .npy array: {first_line(error)}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or tokens.dtype.itemsize > 8:
        raise ValueError(f"{path} must be a 1-D array of token ids (uint16 or uint32), got {kind}")
    if tokens.size == 0:
        raise ValueError(f"no text in {path}: the token array is empty")
    if int(tokens.max()) >= vocab_size or int(tokens.min()) < 0:
        raise ValueError(
            f"{path} holds token ids {int(tokens.min())} to {int(tokens.max())}, the tokenizer has 0 to {vocab_size - 1}: "
            "it was written with another tokenizer"
        )
    return tokens
