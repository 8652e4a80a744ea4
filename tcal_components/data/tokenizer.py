"""A torchtune tokenizer read from the ``tokenizer.json`` of a Hugging Face folder."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from torchtune.data import Message

from tcal_components.assets import resolve
from tcal_components.config import read_json_object
from tcal_components.config.schema import shown
from tcal_components.data.chat_template import ChatTemplate
from tcal_components.data.sources import first_line

# Where a folder names its special tokens, in the order in which they are asked.
_CONFIG_FILES = ("tokenizer_config.json", "generation_config.json", "config.json")
# Characters before a cut in a long text whose tokens may depend on what follows, and behind it on what went before; far
# more than any token has. And the tokens that two readings of the same place must share to be taken for the same.
_CONTEXT = 4096
_AGREEING = 16


class HFTokenizer:
    """The tokenizer of any teacher folder, with the interface of torchtune's model tokenizers and with batches.

    Special tokens are added only on request, never by the tokenizer's own post-processor. Whether that post-processor (or
    ``add_bos_token`` of tokenizer_config.json) opens a text with a begin token is known as :attr:`adds_bos`.

    Args:
        folder (Path): folder with ``tokenizer.json`` and at least one of ``tokenizer_config.json``,
            ``generation_config.json``, ``config.json`` that names the end-of-sequence token.
        max_seq_len (int | None): chat samples are cut to this many tokens. None keeps them whole.

    Attributes:
        bos_id (int | None), eos_id (int): begin and end of a text.
        fill_id (int): written where a packed row is padded: the declared padding token, else ``eos_id``.
        stop_tokens (list[int]): ends of an answer, all that generation_config.json names and ``eos_id``.
        begin_ids (list[int]): what opens every text; empty where the tokenizer adds nothing.

    Raises:
        ValueError: if a file is not JSON, names a token by something else than text or an id, or no file names an
            end-of-sequence token.
    """

    def __init__(self, folder: Path, *, max_seq_len: int | None = None) -> None:
        self.folder = folder
        self.max_seq_len = max_seq_len
        self.template = ChatTemplate(folder)
        self._configs = {name: read_json_object(folder / name) for name in _CONFIG_FILES if (folder / name).is_file()}
        if not self._configs:
            raise ValueError(f"{folder} has tokenizer.json but none of {', '.join(_CONFIG_FILES)} beside it")
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        # Settings of whoever saved the file last; a document would be cut or padded by them without a word.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        eos_ids = self._named_ids("eos")
        if not eos_ids:
            raise ValueError(
                f"no end-of-sequence token for {folder}/tokenizer.json: expected eos_token in tokenizer_config.json "
                "or eos_token_id in generation_config.json or config.json"
            )
        self.eos_id: int = eos_ids[0]
        self.bos_id: int | None = next(iter(self._named_ids("bos")), None)
        self.fill_id: int = next(iter(self._named_ids("pad")), self.eos_id)
        self.stop_tokens = list(dict.fromkeys([self.eos_id, *self._named_ids("eos", _CONFIG_FILES[1:])]))
        self.begin_ids = self._added_before_text()
        # All that is left of it is trimming spaces off the places of tokens, by which masks are made.
        self.tokenizer.post_processor = None

    def _named_ids(self, kind: str, files: Sequence[str] = _CONFIG_FILES) -> list[int]:
        """The ids that the first file which names a ``kind`` token gives; none where there is no such token."""
        for name in files:
            key = f"{kind}_token" if name == "tokenizer_config.json" else f"{kind}_token_id"
            value = given = self._configs.get(name, {}).get(key)
            if key.endswith("_token"):
                value = value.get("content") if isinstance(value, dict) else value
                if isinstance(value, str):
                    token_id = self.tokenizer.token_to_id(value)
                    return [] if token_id is None else [token_id]
                expected, right = "text", value is None
            else:
                ids = value if isinstance(value, list) else [] if value is None else [value]
                expected, right = "an id", all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
                if right and any(i >= 0 for i in ids):  # -1 stands for none in older files
                    return [i for i in ids if i >= 0]
            if not right:
                raise ValueError(f"{self.folder / name}: {key} is {shown(given)}, expected {expected}")
        return []

    def _added_before_text(self) -> list[int]:
        whole = self.tokenizer.encode("a")
        content = next((i for i, sequence in enumerate(whole.sequence_ids) if sequence is not None), 0)
        adds = self._configs.get("tokenizer_config.json", {}).get("add_bos_token")
        return whole.ids[:content] or ([self.bos_id] if adds is True and self.bos_id is not None else [])

    @property
    def adds_bos(self) -> bool:
        """Whether the tokenizer opens a text with a begin token when it is used by transformers."""
        return bool(self.begin_ids)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id the tokenizer can emit (a model's embedding may be larger, padded).

        Not the number of its tokens: a vocabulary may have gaps, and a config may name a special token beyond it.
        """
        special = (-1 if index is None else index for index in (self.bos_id, self.eos_id, self.fill_id))
        return max(*self.tokenizer.get_vocab(with_added_tokens=True).values(), *special) + 1

    @cached_property
    def pad_id(self) -> int:
        """Id by which torchtune's ``generate`` tells padding from a prompt: one that stands in no prompt.

        That is ``fill_id`` if possible. Where the end of a turn is the padding token too, every finished turn of a prompt
        would be taken for padding; then it is a special token that is used for nothing else, or the last of all tokens.
        """
        turns = [Message(role=role, content="a") for role in ("user", "assistant", "user")]
        try:
            prompt = self.tokenize_messages(turns, add_end_tokens=False)[0]
        except ValueError:  # a template that allows no such dialogue
            prompt = self.begin_ids
        if self.fill_id not in prompt:
            return self.fill_id
        used = {*prompt, *self.stop_tokens, self.bos_id}
        unused = {
            index: token.content.lower()
            for index, token in self.tokenizer.get_added_tokens_decoder().items()
            if token.special and index not in used
        }
        known = sorted(self.tokenizer.get_vocab(with_added_tokens=True).values(), reverse=True)
        rarest = next((index for index in known if index not in used), self.fill_id)
        return max(unused, key=lambda index: ("pad" in unused[index], index), default=rarest)

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of ``text``; begin and end tokens only where asked for (and where the tokenizer has them)."""
        return self.encode_batch([text], add_bos, add_eos)[0]

    def encode_batch(self, texts: Sequence[str], add_bos: bool = False, add_eos: bool = False) -> list[list[int]]:
        """Token ids of each text, tokenised in parallel."""
        encoded = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._with_ends(item.ids, add_bos, add_eos) for item in encoded]

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """Token ids of one long document, a piece at a time, with the begin token that the tokenizer adds and EOS.

        The same ids as those of the whole text: each piece is tokenised behind the end of the one before, and the two
        are joined at a place in that end where they agree. Memory: a few pieces.

        Args:
            pieces (Iterable[str]): the text.

        Yields:
            np.ndarray: ids [n], uint32.
        """
        head = True
        for ids in self._joined(pieces):
            yield np.asarray(self.opened(ids) if head else ids, dtype=np.uint32)
            head = False
        yield np.asarray([self.eos_id], dtype=np.uint32)

    def _joined(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        window, sent = "", 0  # text whose tokens are known, and how many of them have been given away
        ids: list[int] = []
        for piece in pieces:
            if len(window) > 4 * _CONTEXT:
                # Places are asked for at the end and the beginning alone: they take longer than the tokens.
                end = self.tokenizer.encode(window[-4 * _CONTEXT :], add_special_tokens=False)
                begin, first = next(((at, i) for at, i in _beginnings(end).items() if at >= 2 * _CONTEXT), (0, 0))
                before = len(ids) - len(end.ids)
                if begin and ids[before + first :] == end.ids[first:]:
                    yield ids[sent : before + first]
                    sent, overlap = before + first, window[begin - 4 * _CONTEXT :]
                    start = self.tokenizer.encode((overlap + piece)[: 4 * _CONTEXT], add_special_tokens=False)
                    following = self.encode(overlap + piece)
                    joint = _joint(end, start, begin)
                    if joint is not None and following[: joint[1]] == start.ids[: joint[1]]:
                        yield ids[sent : before + joint[0]]
                        window, sent, ids = overlap + piece, joint[1], following
                        continue
            window += piece
            ids = self.encode(window)
        yield ids[sent:]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def opened(self, ids: list[int], begin: Sequence[int] | None = None) -> list[int]:
        """Token ids of a text with its begin token, once: a text or a template may have written it already."""
        head = list(self.begin_ids if begin is None else begin)
        return ids if ids[: len(head)] == head else [*head, *ids]

    def _with_ends(self, ids: list[int], add_bos: bool, add_eos: bool) -> list[int]:
        if add_bos:
            ids = self.opened(ids, self.begin_ids or ([] if self.bos_id is None else [self.bos_id]))
        return [*ids, self.eos_id] if add_eos else ids

    # ------------------------------------------------------------------------------------------------------- chat
    def tokenize_messages(
        self, messages: list[Message], *, add_end_tokens: bool = True
    ) -> tuple[list[int], list[bool]]:
        """Renders a dialogue with the folder's chat template, as transformers does, and opens it with the begin token.

        What is learned is what the template marks as the assistant's (``{% generation %}``). A template without such
        marks is rendered turn by turn, and what an unmasked message adds behind its role header is learned.

        Args:
            messages (list[Message]): the dialogue; ``message.masked`` messages are prompts.
            add_end_tokens (bool): False makes a prompt: it ends where the assistant's answer begins, or in the middle of
                it if the last message is an answer that is not empty. A folder without a chat template then gives the
                messages as plain lines.

        Returns:
            tuple[list[int], list[bool]]: token ids, and for each whether it is masked (a prompt or a role header).

        Raises:
            ValueError: if the folder has no chat template, the template refuses the dialogue, or it has no marks and
                rewrites earlier turns.
        """
        if not add_end_tokens:
            ids = self.opened(self.tokenizer.encode(self.template.prompt(messages), add_special_tokens=False).ids)
            return ids, [True] * len(ids)
        rendered, spans = self.template.dialogue(messages)
        encoded = self.tokenizer.encode(rendered, add_special_tokens=False)
        ids = self.opened(encoded.ids)
        mask = [True] * (len(ids) - len(encoded.ids))
        for begin, end in encoded.offsets:
            while spans and spans[0][1] <= begin:
                spans = spans[1:]
            mask.append(not spans or end <= spans[0][0])
        return ids[: self.max_seq_len], mask[: self.max_seq_len]

    def __call__(self, sample: dict[str, Any], inference: bool = False) -> dict[str, Any]:
        """torchtune's model transform: pops ``messages``, adds ``tokens`` and ``mask``; a prompt for ``inference``."""
        tokens, mask = self.tokenize_messages(sample.pop("messages"), add_end_tokens=not inference)
        return {**sample, "tokens": tokens, "mask": mask}


def hf_tokenizer(path: str | Path, *, max_seq_len: int | None = None) -> HFTokenizer:
    """Tokenizer component of a Hugging Face folder.

    Args:
        path (str | Path): checkpoint folder with ``tokenizer.json``, or the path of that file. The prefix ``asset:``
            means a folder inside this package's assets.
        max_seq_len (int | None): cut chat samples to this many tokens. Text is never cut here.

    Returns:
        HFTokenizer: with ``encode``, ``encode_batch``, ``decode``, ``bos_id``, ``eos_id``, ``pad_id``, ``vocab_size``.

    Raises:
        FileNotFoundError: if there is no ``tokenizer.json``.
        ValueError: if it cannot be read, or names no end-of-sequence token.
    """
    given = resolve(path)
    file = given / "tokenizer.json" if given.is_dir() else given
    if not file.is_file():
        raise FileNotFoundError(
            f"no tokenizer: expected a folder with tokenizer.json or the path of that file, got {path}"
        )
    if file.name != "tokenizer.json":
        raise ValueError(f"tokenizer file must be called tokenizer.json (fast tokenizers only), got {path}")
    try:
        return HFTokenizer(file.parent, max_seq_len=max_seq_len)
    except (ValueError, OSError):
        raise
    except BaseException as error:  # the tokenizers library raises plain Exception for a malformed file, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"cannot read {file} as a tokenizer: {first_line(error)}") from error


def _beginnings(encoded: Encoding) -> dict[int, int]:
    """Characters at which a token begins and none goes on, and that token."""
    spans = encoded.offsets
    return {span[0]: i for i, span in enumerate(spans) if i == 0 or spans[i - 1][1] <= span[0]}


def _joint(left: Encoding, right: Encoding, begin: int) -> tuple[int, int] | None:
    """The token of each of two overlapping texts from which on they are the same.

    ``right`` begins at character ``begin`` of ``left``; behind it, as before the end of ``left``, lies the context.
    """
    right_tokens = _beginnings(right)
    for place, i in _beginnings(left).items():
        j = right_tokens.get(place - begin)
        if place >= 3 * _CONTEXT and j is not None and left.ids[i : i + _AGREEING] == right.ids[j : j + _AGREEING]:
            return i, j
    return None
