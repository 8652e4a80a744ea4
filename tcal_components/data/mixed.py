"""Several texts in one dataset, each with its share of the tokens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tcal_components.config import Length, Positive, Seed, Settings, Skipped, Tokens, section
from tcal_components.data.packed import Pack, PackedTextDataset, packed_text
from tcal_components.data.tokenizer import HFTokenizer


@dataclass(frozen=True)
class MixedSource(Settings):
    """One of the texts.

    Attributes:
        source: As in :func:`~tcal_components.data.packed_text`.
        weight: Its share of the tokens is this over the sum of all weights.
        subset: Configuration name of a Hugging Face dataset.
        split: Split of a Hugging Face dataset.
        text_column: Column that holds the text.
        skip_documents: Leave out this many documents first.
    """

    source: str
    weight: Positive = 1.0
    subset: str | None = None
    split: str | None = None
    text_column: str = "text"
    skip_documents: Skipped = 0


def mixed_text(
    tokenizer: HFTokenizer,
    *,
    sources: Sequence[Mapping[str, Any]],
    seq_len: Length,
    max_tokens: Tokens | None = None,
    skip_tokens: Skipped = 0,
    shuffle_documents: bool = False,
    seed: Seed = 0,
    streaming: bool = False,
) -> PackedTextDataset:
    """Packs several texts, of each as many sequences as its weight says; no sequence is of two of them.

    The sequences stand source by source; training draws them in random order. Any beginning that is asked for by
    ``max_tokens`` has the same shares.

    Args:
        tokenizer: See :func:`~tcal_components.data.hf_tokenizer`.
        sources: Mappings with the keys of :class:`MixedSource`.
        seq_len: T, tokens a sequence.
        max_tokens: At most so many of all sources together. None takes as many as the source allows that is used up first.
        skip_tokens: Leave out whole documents of each source until its share of these tokens has passed, and a little more
            than that, so that a part which follows another one begins behind it.
        shuffle_documents: Random order of documents within each source.
        seed: Of that order.
        streaming: Read Hugging Face datasets from the hub while they are used.

    Returns:
        PackedTextDataset: Its ``sources`` name each part with its weight, documents, tokens and sha256.

    Raises:
        ValueError: No source, or one with less than a sequence for its share, or less text than its share.
        FileNotFoundError: A local source does not exist.
    """
    if not sources:
        raise ValueError("sources is empty, expected at least one text")
    entries = [section(MixedSource, entry, f"sources[{index}]") for index, entry in enumerate(sources)]
    whole = sum(entry.weight for entry in entries)
    parts, rows = [], []
    for index, entry in enumerate(entries):
        share = entry.weight / whole
        wanted = None if max_tokens is None else int(share * max_tokens) // seq_len
        if wanted == 0:
            raise ValueError(
                f"sources[{index}] {entry.source} has {share:.3g} of max_tokens {max_tokens}, which is less than one "
                f"sequence of {seq_len}"
            )
        # Shares of a part before are rounded down to sequences, and its last document may have been cut.
        skip = math.ceil(share * skip_tokens) + (len(entries) + 1) * seq_len if skip_tokens else 0
        given = {name: value for name, value in asdict(entry).items() if name != "weight"}
        part = packed_text(
            tokenizer, seq_len=seq_len, max_tokens=None if wanted is None else wanted * seq_len, skip_tokens=skip,
            shuffle_documents=shuffle_documents, seed=seed, streaming=streaming, **given,
        )  # fmt: skip
        if wanted is not None and len(part) < wanted:
            raise ValueError(
                f"sources[{index}] {entry.source} has {part.num_tokens} tokens, its share of max_tokens {max_tokens} is "
                f"{wanted * seq_len}; give it a smaller weight, or more text"
            )
        parts.append(part)
        rows.append(len(part) if wanted is None else wanted)
    if max_tokens is None:  # the shortest for its weight decides
        most = min(count / entry.weight for count, entry in zip(rows, entries))
        rows = [max(1, int(most * entry.weight)) for entry in entries]
    return _joined(parts, rows, entries, tokenizer)


def _joined(
    parts: Sequence[PackedTextDataset], rows: Sequence[int], entries: Sequence[MixedSource], tokenizer: HFTokenizer
) -> PackedTextDataset:
    """The first sequences of each part, one part after the other."""
    seq_len = parts[0].seq_len
    tokens, starts, documents, notes = [], [], [], []
    before = skipped = 0
    for part, count, entry in zip(parts, rows, entries):
        length = count * seq_len
        used = part.tokens[:length]
        found = [document for document in part.documents if document.start < length]
        tokens.append(used)
        # A part begins with a document's beginning, so that the sequence before it has no label from another text.
        starts += [before + document.start for document in found]
        documents += [
            replace(document, start=before + document.start, length=min(document.length, length - document.start))
            for document in found
        ]
        sha256 = hashlib.sha256(used.astype("<u4").tobytes()).hexdigest()
        notes.append(
            {"path": entry.source, "weight": entry.weight, "documents": len(found), "tokens": length, "sha256": sha256}
        )
        before, skipped = before + length, skipped + part.sources["skipped_tokens"]
    joined = np.concatenate(tokens)
    provenance = {
        "path": ", ".join(entry.source for entry in entries),
        "documents": len(documents),
        "tokens": len(joined),
        "skipped_tokens": skipped,
        "sha256": hashlib.sha256(joined.astype("<u4").tobytes()).hexdigest(),
        "parts": notes,
    }
    pack = Pack(joined, np.asarray(starts), documents, sources=provenance)
    return PackedTextDataset(pack=pack, seq_len=seq_len, tokenizer=tokenizer)
