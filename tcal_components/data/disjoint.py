"""Which documents a dataset is made of, and the check that two datasets share none, nor most of one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tcal_components.data.packed import PackedTextDataset

# Bytes that are compared as one, counted without white space: about 13 English words. Shorter turns of phrase are common.
_GRAM = 64
# A document of some 60 words or more of which this much stands in other text is a copy. Cutting and re-wrapping leave all
# of it, page headers nine tenths and more. In 100 MB of manuals, different pages of one template share up to 0.98 if they
# are shorter, and up to 0.92 if they are not.
_CONTAINED = 0.95
_FEWEST_GRAMS = 256
# Places kept of all datasets but the largest, which is only read through: some 150 MB. Of more, every 2nd, 4th, ...
_MOST_GRAMS = 1 << 22
_BATCH_TOKENS = 1 << 18
_FILTER_BITS = 26
_REMEDY = "use other text, or disjoint parts of one source by skip_tokens or skip_documents"


@dataclass
class PackedDocument:
    """One document of a pack.

    Attributes:
        where (str): where it came from.
        digest (bytes): hash of its token ids.
        start (int): where it begins in the tokens of the pack.
        length (int): its number of tokens, begin and end tokens included.
    """

    where: str
    digest: bytes
    start: int
    length: int


def document_digest(pieces: Iterable[np.ndarray]) -> bytes:
    """128-bit hash of a document's token ids, given in pieces."""
    digest = hashlib.blake2b(digest_size=16)
    for ids in pieces:
        digest.update(np.asarray(ids).astype("<u4").tobytes())
    return digest.digest()


def assert_disjoint(datasets: Mapping[str, PackedTextDataset], *, min_tokens: int = 32) -> dict[str, dict[str, float]]:
    """Checks that no document is in two of the datasets (calibration, training, evaluation, ...), nor most of one.

    Documents are compared by a hash of their token ids, so all datasets must have the same tokenizer. Datasets that know
    their tokenizer are compared as text too: each run of 64 bytes, in lower case and without white space, is looked up
    among those of the others, so that a cut or re-wrapped copy is found as well. 100 MB take about 12 seconds.

    Args:
        datasets (Mapping[str, PackedTextDataset]): by the name that the message is to use.
        min_tokens (int): shorter documents may be equal: one-line boilerplate repeats in any corpus.

    Returns:
        dict[str, dict[str, float]]: by dataset and other dataset, the share of the first one's text that the other has;
        of chat, of the text that is learned.

    Raises:
        ValueError: naming the two datasets and where the common document stands in each.
    """
    owner: dict[bytes, tuple[str, str]] = {}
    for name, dataset in datasets.items():
        for document in dataset.documents:
            if document.length < min_tokens:
                continue
            other, where = owner.setdefault(document.digest, (name, document.where))
            if other != name:
                raise ValueError(
                    f"the same document is in {other} ({where}) and in {name} ({document.where}); {_REMEDY}"
                )
    readable = {name: dataset for name, dataset in datasets.items() if hasattr(dataset.tokenizer, "decode")}
    return _compare(readable) if len(readable) > 1 else {}


def _compare(datasets: Mapping[str, PackedTextDataset]) -> dict[str, dict[str, float]]:
    *small, large = sorted(datasets, key=lambda name: datasets[name].num_tokens)
    expected = 4 * sum(datasets[name].num_tokens for name in small)
    every = 1 << max(0, (expected // _MOST_GRAMS).bit_length())
    kept = {name: _concatenated(_grams(datasets[name], every)) for name in small}
    keys = np.unique(np.concatenate([hashes for _, hashes in kept.values()]))
    # By dataset, the document (the last one) that has a key; -1: none has.
    owners = {name: np.full(len(keys), -1, dtype=np.int32) for name in datasets}
    for name, (documents, hashes) in kept.items():
        owners[name][np.searchsorted(keys, hashes)] = documents
    maybe = np.zeros(1 << _FILTER_BITS, dtype=bool)  # most text is no key, which one look here tells
    maybe[keys >> np.uint64(64 - _FILTER_BITS)] = True

    shares: dict[str, dict[str, float]] = {}
    for name in (large, *small):
        dataset, others = datasets[name], [other for other in datasets if other != name]
        count = np.zeros(len(dataset.documents), dtype=np.int64)
        found = {other: np.zeros_like(count) for other in others}
        for documents, hashes in [kept[name]] if name in kept else _grams(dataset, every):
            _add_counts(count, documents)
            likely = np.flatnonzero(maybe[hashes >> np.uint64(64 - _FILTER_BITS)])
            at = np.searchsorted(keys, hashes[likely])
            at[at == len(keys)] = 0
            is_key = keys[at] == hashes[likely] if len(keys) else np.zeros(0, dtype=bool)
            at, documents = at[is_key], documents[likely][is_key]
            if name == large:
                owners[name][at] = documents
            for other in others:
                _add_counts(found[other], documents[owners[other][at] >= 0])
        for other in others:
            copied = (found[other] >= _CONTAINED * count) & (count >= max(16, _FEWEST_GRAMS // every))
            if copied.any():
                number = int(copied.argmax())
                _, hashes = _concatenated(_grams(dataset, every, [number]))
                theirs = owners[other][np.searchsorted(keys, hashes[np.isin(hashes, keys)])]
                source = datasets[other].documents[int(np.bincount(theirs[theirs >= 0]).argmax())].where
                raise ValueError(
                    f"{found[other][number] / count[number]:.0%} of a document of {name} ({dataset.documents[number].where}) "
                    f"stands in {other} ({source}); {_REMEDY}"
                )
        total = max(1, int(count.sum()))
        shares[name] = {other: round(int(found[other].sum()) / total, 6) for other in others}
    return {name: shares[name] for name in datasets}


def _add_counts(total: np.ndarray, numbers: np.ndarray) -> None:
    """Counts ascending document numbers, which are few of all."""
    if len(numbers):
        counts = np.bincount(numbers - numbers[0])
        total[numbers[0] : numbers[0] + len(counts)] += counts


def _concatenated(batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    documents, hashes = zip(*batches, (np.zeros(0, np.int32), np.zeros(0, np.uint64)))
    return np.concatenate(documents), np.concatenate(hashes)


def _grams(
    dataset: PackedTextDataset, every: int, numbers: Iterable[int] | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Hashes of all runs of ``_GRAM`` bytes of a dataset's documents, and the number of the document of each.

    Args:
        dataset (PackedTextDataset): with a tokenizer.
        every (int): a power of two; only hashes that it divides, the same ones of any text.
        numbers (Iterable[int] | None): of the documents. None: all.

    Yields:
        tuple: numbers int32 [n] and hashes uint64 [n], of about 1 MB of text.
    """
    texts: list[bytes] = []
    owners: list[int] = []
    tokens = 0
    for number in range(len(dataset.documents)) if numbers is None else numbers:
        ids = dataset.learned_ids(number)
        for low in range(0, len(ids), _BATCH_TOKENS):
            piece = ids[low : low + _BATCH_TOKENS]
            text = "".join(dataset.tokenizer.decode(piece.tolist()).lower().split())
            texts.append(text.encode("utf-8", "replace"))
            owners.append(number)
            tokens += len(piece)
            if tokens >= _BATCH_TOKENS:
                yield _hashed(texts, owners, every)
                texts, owners, tokens = [texts[-1][1 - _GRAM :]], [number], 0
    yield _hashed(texts, owners, every)


def _hashed(texts: list[bytes], owners: list[int], every: int) -> tuple[np.ndarray, np.ndarray]:
    """Polynomial hashes, modulo 2^64, of all runs that lie in one text."""
    joined = np.frombuffer(b"".join(texts), dtype=np.uint8)
    if len(joined) < _GRAM:
        return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.uint64)
    owner = np.repeat(np.asarray(owners, dtype=np.int32), [len(text) for text in texts])
    values, powers, inverses = _tables(1 << len(joined).bit_length())
    sums = np.zeros(len(joined) + 1, dtype=np.uint64)
    np.cumsum(values[joined] * powers[: len(joined)], out=sums[1:])
    hashes = (sums[_GRAM:] - sums[:-_GRAM]) * inverses[: len(joined) - _GRAM + 1]
    hashes ^= hashes >> np.uint64(32)  # the low bits of a product know the low bits of its factors alone
    hashes *= np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(29)
    inside = owner[: len(hashes)] == owner[_GRAM - 1 :]
    if every > 1:
        inside &= hashes & np.uint64(every - 1) == 0
    return owner[: len(hashes)][inside], hashes[inside]


@cache
def _tables(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A random number for each byte, and the powers of an odd number and of its inverse modulo 2^64."""
    base = 0x5851F42D4C957F2D
    values = np.random.default_rng(0).integers(1 << 63, size=256, dtype=np.uint64)
    powers, inverses = (np.full(size, factor, dtype=np.uint64) for factor in (base, pow(base, -1, 1 << 64)))
    for power in (powers, inverses):
        power[0] = 1
        np.cumprod(power, out=power)
    return values, powers, inverses
