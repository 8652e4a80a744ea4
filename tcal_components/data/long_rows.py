"""The text of a line of .jsonl that is too long to be read as a whole, piece by piece."""

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path

# Characters and whole escapes up to the end of the string. Half a surrogate pair is left over for as long as the other half
# may follow.
_UNITS = re.compile(
    rb'(?:[^"\\]+|\\[^u]|\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u[dD][89abAB]..(?=[^\\]|\\[^u])|\\u(?![dD][89abAB])....)*',
    re.DOTALL,
)


def text_begins(line: bytes, text_column: str) -> int | None:
    """Where in the beginning of a line the string of its text column begins, behind the quotation mark.

    Args:
        line (bytes): a JSON object, cut somewhere.
        text_column (str): the key.

    Returns:
        int | None: offset in bytes. None: there is no such string, or it begins behind the cut.
    """
    text = line.decode("utf-8", "surrogateescape")
    blanks, value = re.compile(r"[ \t\r]*"), json.JSONDecoder().raw_decode

    def expect(sign: str, at: int) -> int:
        at = blanks.match(text, at).end()  # type: ignore[union-attr]
        if text[at] != sign:
            raise ValueError
        return blanks.match(text, at + 1).end()  # type: ignore[union-attr]

    try:
        at = expect("{", 0)
        while True:
            key, at = value(text, at)
            at = expect(":", at)
            if key == text_column:
                return len(text[: at + 1].encode("utf-8", "surrogateescape")) if text[at] == '"' else None
            at = expect(",", value(text, at)[1])
    except (ValueError, IndexError, RecursionError):
        return None


def read_string(path: Path, offset: int, where: str, *, piece: int) -> Iterator[str]:
    """A JSON string of a file.

    Args:
        path (Path): the file.
        offset (int): where the string begins, behind its quotation mark.
        where (str): file and line, for messages.
        piece (int): bytes read at once.

    Yields:
        str: its text.

    Raises:
        ValueError: it is no JSON or no UTF-8, in one line.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as stream:
        stream.seek(offset)
        left, closed = b"", False
        while not closed:
            chunk = stream.read(piece)
            buffer = left + chunk
            end = _UNITS.match(buffer).end()  # type: ignore[union-attr]
            closed = buffer[end : end + 1] == b'"'
            left = buffer[end:]
            if not closed and (not chunk or len(left) > 12):  # no escape is longer
                raise ValueError(f"{where} is not valid JSON: its text has no end, or an escape is broken")
            try:
                text = json.loads(f'"{decoder.decode(buffer[:end], final=closed)}"')
                text.encode()
            except UnicodeDecodeError as error:
                raise ValueError(f"{where} is not UTF-8 text") from error
            except UnicodeEncodeError as error:
                raise ValueError(f"{where} holds half a surrogate pair, which is no text") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not valid JSON: {error.msg.removesuffix(' at')}") from error
            yield text
        rest = left[1:] + stream.readline()
        if b"\n" in left[1:]:
            rest = left[1 : left.index(b"\n") + 1]
        try:
            json.loads(b'{"":0' + rest)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{where} is not valid JSON behind its text") from error
