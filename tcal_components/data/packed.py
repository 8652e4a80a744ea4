"""Fixed-length training sequences packed from documents, with their boundaries."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tcal_components.config import Length, Seed, Skipped, Tokens
from tcal_components.data import sources as reading
from tcal_components.data.disjoint import PackedDocument, document_digest
from tcal_components.data.encoding import Encoded, documents_of_array, encode_documents, open_documents
from tcal_components.data.tokenizer import HFTokenizer

IGNORE_INDEX = -100


@dataclass
class Pack:
    """Storage of a :class:`PackedTextDataset`: rows of ``seq_len`` tokens one after the other.

    Attributes:
        tokens (np.ndarray): [N], N >= rows * seq_len; one token more than the rows need gives the last label.
        starts (np.ndarray): sorted offsets in ``tokens`` at which a document (or padding) begins.
        documents (list[PackedDocument]): the documents, in order.
        targets (np.ndarray | None): [N] bool, which tokens may be predicted. None: all.
        used (np.ndarray | None): [rows], tokens of each row before its padding. None: all of them.
        sources (dict): provenance.
    """

    tokens: np.ndarray
    starts: np.ndarray
    documents: list[PackedDocument]
    targets: np.ndarray | None = None
    used: np.ndarray | None = None
    sources: dict[str, Any] = field(default_factory=dict)


class PackedTextDataset(Dataset):
    """Map-style dataset of packed sequences.

    An item is a dict of ``torch.long`` tensors of shape [T]:

    - ``tokens``: token ids;
    - ``labels``: the next token of the same document, -100 at a document's last token, on padding and where the next
      token is part of a prompt. They are already shifted: ``labels[t]`` belongs to ``logits[t]``;
    - ``input_pos``: position, 0 at the start of the row and of each document in it;
    - ``document``: number of the document in the row (0, 1, ...), -1 on padding.

    Args:
        pack (Pack): tokens and boundaries.
        seq_len (int): T.
        tokenizer (Any): that wrote the tokens; with it documents can be compared as text.

    Attributes:
        pack (Pack): the same.
        sources (dict): provenance: path, documents, tokens, sha256 of the token ids used (of chat also of what is learned
            of them and of the boundaries); of text also ``skipped_tokens``, which lie before its first document.
        num_tokens (int): tokens in all rows, without padding.
        padding_fraction (float): share of padding in all rows.
    """

    def __init__(self, *, pack: Pack, seq_len: int, tokenizer: Any = None) -> None:
        self.seq_len = seq_len
        self.tokenizer = tokenizer
        self.sources = pack.sources
        self.documents = pack.documents
        self.pack = pack
        self._rows = len(pack.used) if pack.used is not None else len(pack.tokens) // seq_len
        self.num_tokens = int(pack.used.sum()) if pack.used is not None else self._rows * seq_len
        self.padding_fraction = 1.0 - self.num_tokens / (self._rows * seq_len)

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -self._rows <= index < self._rows:
            raise IndexError(f"sequence {index} of {self._rows}")
        index %= self._rows
        pack, length = self.pack, self.seq_len
        begin, end = index * length, (index + 1) * length
        tokens = np.full(length + 1, -1, dtype=np.int64)
        window = pack.tokens[begin : end + 1]
        tokens[: len(window)] = window
        # is_start[t]: a document begins at token t of the row; the entry at T says whether the next row begins one.
        is_start = np.zeros(length + 1, dtype=bool)
        low, high = np.searchsorted(pack.starts, (begin, end + 1))
        is_start[pack.starts[low:high] - begin] = True
        allowed = ~is_start[1:] & (tokens[1:] >= 0)
        if pack.targets is not None:
            targets = np.zeros(length + 1, dtype=bool)
            targets[: len(window)] = pack.targets[begin : end + 1]
            allowed &= targets[1:]
        is_start[0] = True
        arange = np.arange(length)
        segment = np.maximum.accumulate(np.where(is_start[:-1], arange, 0))
        document = np.cumsum(is_start[:-1]) - 1
        input_pos = arange - segment
        if pack.used is not None:
            padding = arange >= pack.used[index]
            document[padding] = -1
            input_pos[padding] = 0
            allowed &= ~padding
        labels = np.where(allowed, tokens[1:], IGNORE_INDEX)
        item = {"tokens": tokens[:-1], "labels": labels, "input_pos": input_pos, "document": document}
        return {name: torch.from_numpy(np.ascontiguousarray(value, dtype=np.int64)) for name, value in item.items()}

    def learned_ids(self, number: int) -> np.ndarray:
        """Token ids of document ``number`` as far as they are in the rows and may be predicted, shape [n]."""
        document, pack = self.documents[number], self.pack
        inside = slice(document.start, min(document.start + document.length, self._rows * self.seq_len))
        return pack.tokens[inside] if pack.targets is None else pack.tokens[inside][pack.targets[inside]]

    @property
    def tokens(self) -> np.ndarray:
        """All rows one after the other, and for text the token after the last: shape [N], read-only by agreement."""
        return self.pack.tokens


def packed_text(
    tokenizer: HFTokenizer,
    *,
    source: str,
    seq_len: Length,
    subset: str | None = None,
    split: str | None = None,
    text_column: str = "text",
    skip_documents: Skipped = 0,
    skip_tokens: Skipped = 0,
    max_tokens: Tokens | None = None,
    shuffle_documents: bool = False,
    seed: Seed = 0,
    streaming: bool = False,
) -> PackedTextDataset:
    """Packs text into sequences of ``seq_len`` tokens, an end-of-sequence token after each document.

    Where the tokenizer opens a text with a begin token, each document opens with it, once. Documents follow one another
    and are cut where a row ends; a rest shorter than one row is dropped. Text is read and tokenised only as far as
    ``max_tokens`` needs it, a long document piece by piece.

    To take disjoint parts of one source, give each part ``skip_tokens`` = ``sources["skipped_tokens"] + num_tokens`` of
    the part before: whole documents are skipped, so none is in two parts and none is lost. For a second part that is at
    most the first part's ``max_tokens``. Any later part follows one that begins (up to a document) behind its own
    ``skip_tokens``, so in a config give it at least ``skip_tokens`` + ``max_tokens`` of the part before and the length of
    the longest document; :func:`~tcal_components.data.assert_disjoint` tells whether that was enough.

    Args:
        tokenizer (HFTokenizer): see :func:`tcal_components.data.hf_tokenizer`.
        source (str): one of: a folder of .txt / .jsonl / .parquet (all files below it, sorted); one such file; a .npy
            array of token ids with documents separated by EOS; a folder of ``Dataset.save_to_disk``; the name of a
            Hugging Face dataset. ``asset:...`` is a path in this package's assets.
        seq_len (int): T, tokens a sequence.
        subset (str | None): configuration name of a Hugging Face dataset.
        split (str | None): split of a Hugging Face dataset, default "train".
        text_column (str): column of .jsonl, .parquet and Hugging Face data that holds the text.
        skip_documents (int): leave out this many documents first.
        skip_tokens (int): then leave out whole documents until at least this many tokens have passed.
        max_tokens (int | None): then take at most this many tokens. None takes everything.
        shuffle_documents (bool): random order of documents (files in random order, and a buffer of 10 000 documents),
            the same for the same ``seed``. Not for .npy arrays.
        seed (int): of that order.
        streaming (bool): read a Hugging Face dataset from the hub while it is used, without a local copy.

    Returns:
        PackedTextDataset

    Raises:
        FileNotFoundError: if a local source does not exist.
        ValueError: if it has no text, no such column, a malformed line, or less text than one sequence.
    """
    _check_numbers(seq_len=seq_len, max_tokens=max_tokens, skip_documents=skip_documents, skip_tokens=skip_tokens)
    local = reading.is_local(source)
    if local and source.endswith(reading.TOKEN_SUFFIX):
        if shuffle_documents:
            raise ValueError(f"shuffle_documents is not available for a token array, got source {source}")
        encoded = documents_of_array(source, tokenizer)
    else:
        encoded = encode_documents(
            open_documents(source, local, subset, split, text_column, shuffle_documents, seed, streaming), tokenizer
        )
    return _pack_stream(
        encoded,
        tokenizer=tokenizer,
        source=source,
        seq_len=seq_len,
        skip_documents=skip_documents,
        skip_tokens=skip_tokens,
        limit=max_tokens,
    )


def _pack_stream(
    encoded: Iterable[Encoded],
    *,
    tokenizer: HFTokenizer,
    source: str,
    seq_len: int,
    skip_documents: int,
    skip_tokens: int,
    limit: int | None,
) -> PackedTextDataset:
    """Concatenates documents, each with its end token, and cuts them into rows."""
    pieces: list[np.ndarray] = []
    documents: list[PackedDocument] = []
    total = skipped = seen = 0
    # One token more than the rows hold: it is the label of the last position.
    wanted = None if limit is None else limit // seq_len * seq_len + 1
    for where, parts in encoded:
        seen += 1
        if seen <= skip_documents:
            continue
        if skipped < skip_tokens:
            skipped += sum(len(ids) for ids in parts)
            continue
        begin = len(pieces)
        for ids in parts:
            pieces.append(ids)
            total += len(ids)
            if wanted is not None and total >= wanted:
                break
        read = pieces[begin:]
        documents.append(PackedDocument(where, document_digest(read), total - sum(map(len, read)), sum(map(len, read))))
        if wanted is not None and total >= wanted:
            break
    rows = (total if limit is None else min(total, limit)) // seq_len
    if rows == 0:
        if seen == 0:
            raise ValueError(f"no text in {source}: every document is empty")
        asked = [f"skip_documents {skip_documents}"] * bool(skip_documents) + [f"skip_tokens {skip_tokens}"] * bool(
            skip_tokens
        )
        after = f" after {' and '.join(asked)} ({seen} documents in all)" if asked else ""
        raise ValueError(f"text shorter than one sequence: {source} gives {total} tokens{after}, seq_len is {seq_len}")
    tokens = np.concatenate(pieces)[: rows * seq_len + 1]
    starts = np.asarray([document.start for document in documents])
    documents = [document for document in documents if document.start < rows * seq_len]
    starts = starts[starts < len(tokens)]
    provenance = {
        "path": source,
        "documents": len(documents),
        "tokens": rows * seq_len,
        "skipped_tokens": skipped,
        "sha256": hashlib.sha256(tokens[: rows * seq_len].astype("<u4").tobytes()).hexdigest(),
    }
    pack = Pack(tokens, starts, documents, sources=provenance)
    return PackedTextDataset(pack=pack, seq_len=seq_len, tokenizer=tokenizer)


def _check_numbers(*, seq_len: int, max_tokens: int | None, skip_documents: int, skip_tokens: int) -> None:
    if seq_len < 2:
        raise ValueError(f"seq_len must be at least 2, got {seq_len}")
    if max_tokens is not None and max_tokens < seq_len:
        raise ValueError(f"max_tokens {max_tokens} is less than one sequence of seq_len {seq_len}")
    if skip_documents < 0 or skip_tokens < 0:
        raise ValueError(f"skip_documents and skip_tokens must be >= 0, got {skip_documents} and {skip_tokens}")
