"""One document after the other from one file of text, JSON lines or Parquet."""

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

from tcal_components.config.files import json_kind
from tcal_components.data.long_rows import read_string, text_begins

T = TypeVar("T")


# Characters read and tokenised at once; a longer document is never in memory as a whole.
PIECE = 1 << 20


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


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    if isinstance(error, UnicodeError):  # which speaks of Python's codecs
        return "its text is not UTF-8"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_txt(file: Path, text_column: str) -> Iterator[Document]:
    yield _long(str(file), partial(_decoded, partial(file.open, "rb"), str(file), newlines=True))


def read_jsonl(file: Path, text_column: str) -> Iterator[Document]:
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
                yield new_document(where, text_of(_json_object(line, text_column, where), text_column, where))


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
        raise ValueError(f"{where} must be a JSON object with the column {text_column!r}, got {json_kind(item)}")
    return item


def read_parquet(file: Path, text_column: str) -> Iterator[Document]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = list(table.schema_arrow.names)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise ValueError(f"{file} is not a parquet file: {first_line(error)}") from error
    require_column(text_column, columns, str(file))

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

    for where, value in each_row(values(), str(file)):
        if isinstance(value, pyarrow.Buffer):  # UTF-8; as Python text it would take up to four times as much
            yield _long(where, partial(_decoded, partial(pyarrow.BufferReader, value), where))
        else:
            yield new_document(where, text_of({text_column: value}, text_column, where))


def each_row(rows: Iterable[T], source: str) -> Iterator[tuple[str, T]]:
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


def new_document(where: str, text: str) -> Document:
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


def text_of(item: dict[str, Any], text_column: str, where: str) -> str:
    require_column(text_column, list(item), where)
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


def require_column(text_column: str, columns: list[str], where: str) -> None:
    if text_column not in columns:
        named = ", ".join(" ".join(str(column).split())[:60] for column in columns[:20])
        raise ValueError(f"no text column {text_column!r} in {where}; its columns are: {named}")
