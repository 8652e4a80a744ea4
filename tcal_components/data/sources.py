"""Documents of a text source, one at a time and in a fixed order: files, folders, Hugging Face datasets."""

import codecs
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tcal_components.assets import PREFIX, resolve
from tcal_components.data.long_rows import read_string, text_begins

TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIX = ".npy"
# Endings of files, of which a name that is not here says that it is missing: no dataset of a hub is called so.
_FILE_SUFFIXES = (
    *(*TEXT_SUFFIXES, TOKEN_SUFFIX, ".json", ".csv", ".tsv", ".md", ".html", ".xml", ".arrow", ".npz", ".bin", ".pt"),
    *(".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z"),
)
# Characters read and tokenised at once; a longer document is never in memory as a whole.
PIECE = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Document:
    """One document of a source.

    Attributes:
        where (str): where it stands, for messages: file and line, or dataset row.
        text (str): its text, of a long one the first piece.
        more (Callable | None): of a long one, reads the pieces behind the first.
    """

    where: str
    text: str
    more: Callable[[], Iterator[str]] | None = None

    def pieces(self) -> Iterator[str]:
        """Its text, of :data:`PIECE` characters or bytes at a time."""
        return itertools.chain([self.text], self.more() if self.more else ())

    def is_blank(self) -> bool:
        """Whether there is nothing but white space."""
        return all(not piece.strip() for piece in self.pieces())


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
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    for file in files:
        for document in readers[file.suffix](file, text_column):
            if not document.is_blank():
                yield document


def read_hub(
    source: str, *, subset: str | None, split: str | None, text_column: str, streaming: bool
) -> Iterator[Document]:
    """Documents of a Hugging Face dataset, by name or from a folder written by ``save_to_disk``.

    Raises:
        ValueError: if it cannot be loaded, or has no such split or text column.
    """
    import datasets

    saved = resolve(source).is_dir()
    try:
        if saved:
            data = datasets.load_from_disk(str(resolve(source)))
            if isinstance(data, datasets.DatasetDict):
                data = data[split or "train"]
        else:
            data = datasets.load_dataset(source, subset, split=split or "train", streaming=streaming)
    except Exception as error:  # datasets raises many kinds: no such name, no network, no such split, no such subset
        reason = first_line(error)
        if saved:
            raise ValueError(
                f"{source} cannot be read as a saved dataset (split {split or 'train'}): {reason}"
            ) from error
        raise ValueError(
            f"source {source!r} is no file or folder here, and loading it as a Hugging Face dataset "
            f"(subset {subset}, split {split or 'train'}) failed: {reason}"
        ) from error
    columns = getattr(data, "column_names", None)
    if columns:
        _require_column(text_column, list(columns), source)
        data = data.select_columns([text_column])
    for where, item in _rows(data, source):
        document = _document(where, _text_of(item, text_column, where))
        if not document.is_blank():
            yield document


def hub_commit(source: str, subset: str | None, revision: str | None) -> str:
    """Which state of a Hugging Face dataset would be read: the hub's newest, or without a network the one that is here.

    Raises:
        ValueError: neither can be told.
    """
    import datasets

    try:
        return str(datasets.load_dataset_builder(source, subset, revision=revision).hash)
    except Exception as error:  # as in :func:`read_hub`
        raise ValueError(f"{source}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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


def _read_txt(file: Path, text_column: str) -> Iterator[Document]:
    yield _long(str(file), partial(_decoded, partial(file.open, "rb"), str(file), newlines=True))


def _read_jsonl(file: Path, text_column: str) -> Iterator[Document]:
    with file.open("rb") as stream:
        for number in itertools.count(1):
            where, begin = f"{file} line {number}", stream.tell()
            line = stream.readline(4 * PIECE)
            if not line:
                return
            if len(line) == 4 * PIECE and not line.endswith(b"\n"):
                text = text_begins(line, text_column)
                if text is None:  # another column is the long one: the whole line has to be read
                    line += stream.readline()
                else:
                    yield _long(where, partial(read_string, file, begin + text, where, piece=PIECE))
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(PIECE)
                    continue
            if not line.isspace():
                yield _document(where, _text_of(_json_object(line, text_column, where), text_column, where))


def _json_object(line: bytes, text_column: str, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line.decode("utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 text (byte {error.start} of the line)") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not valid JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:  # an endless number; too deep
        raise ValueError(f"{where} is not valid JSON: {first_line(error)}") from error
    if not isinstance(item, dict):
        raise ValueError(f"{where} must be a JSON object with the column {text_column!r}, got {type(item).__name__}")
    return item


def _read_parquet(file: Path, text_column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = list(table.schema_arrow.names)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file} is not a parquet file: {first_line(error)}") from error
    _require_column(text_column, columns, str(file))

    def values() -> Iterator[Any]:
        for batch in table.iter_batches(batch_size=64, columns=[text_column], use_threads=False):
            column = batch.column(0)
            if pyarrow.types.is_string(column.type):
                column = column.cast(pyarrow.large_string())
            if not pyarrow.types.is_large_string(column.type):
                yield from column.to_pylist()
                continue
            _, offsets, data = column.buffers()
            ends = np.frombuffer(offsets, dtype=np.int64)[column.offset :][: len(column) + 1].tolist()
            for row, (begin, end) in enumerate(itertools.pairwise(ends)):
                yield data[begin:end] if end - begin > 4 * PIECE else column[row].as_py()

    for where, value in _rows(values(), str(file)):
        if isinstance(value, pyarrow.Buffer):  # UTF-8; as Python text it would take up to four times as much
            yield _long(where, partial(_decoded, partial(pyarrow.BufferReader, value), where))
        else:
            yield _document(where, _text_of({text_column: value}, text_column, where))


def _rows(rows: Iterable[T], source: str) -> Iterator[tuple[str, T]]:
    """Rows that a library reads, each with its place; broken data is one line, whatever the library raises."""
    iterator = iter(rows)
    for number in itertools.count():
        where = f"{source} row {number}"
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            raise ValueError(f"{where} cannot be read: {first_line(error)}") from error
        yield where, row


def _document(where: str, text: str) -> Document:
    if len(text) <= PIECE:
        return Document(where, text)
    return Document(where, text[:PIECE], lambda: (text[i : i + PIECE] for i in range(PIECE, len(text), PIECE)))


def _long(where: str, pieces: Callable[[], Iterator[str]]) -> Document:
    """A document that can be read again and again; only its first piece is kept."""
    beginning = list(itertools.islice(pieces(), 2))
    if len(beginning) < 2:
        return Document(where, "".join(beginning))
    return Document(where, beginning[0], lambda: itertools.islice(pieces(), 1, None))


def _decoded(open_bytes: Callable[[], Any], where: str, *, newlines: bool = False) -> Iterator[str]:
    """Text of a stream of UTF-8; ``newlines`` turns the line ends of all systems into one."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")(), translate=newlines)
    place, chunk = 0, b"-"
    with open_bytes() as stream:
        while chunk:
            chunk = stream.read(PIECE)
            try:
                piece = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:  # its place counts from what an earlier chunk left undecoded
                at = place + len(chunk) - len(error.object) + error.start
                raise ValueError(f"{where} is not UTF-8 text (byte {at})") from error
            place += len(chunk)
            if piece:
                yield piece


def _text_of(item: dict[str, Any], text_column: str, where: str) -> str:
    _require_column(text_column, list(item), where)
    value = item[text_column]
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{where}: column {text_column!r} must hold text, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: column {text_column!r} holds half a surrogate pair at character {error.start}, which is no text"
        ) from error
    return value


def _require_column(text_column: str, columns: list[str], where: str) -> None:
    if text_column not in columns:
        named = ", ".join(" ".join(str(column).split())[:60] for column in columns[:20])
        raise ValueError(f"no text column {text_column!r} in {where}; its columns are: {named}")
