"""Which documents a dataset is made of, and the check that two datasets share none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tcal_components.data.packed import PackedTextDataset


@dataclass
class PackedDocument:
    """One document of a pack: where it came from, a hash of its token ids and its number of tokens (with EOS)."""

    where: str
    digest: bytes
    length: int


def document_digest(ids: np.ndarray) -> bytes:
    """128-bit hash of a document's token ids."""
    return hashlib.blake2b(np.asarray(ids).astype("<u4").tobytes(), digest_size=16).digest()


def assert_disjoint(datasets: dict[str, PackedTextDataset], *, min_tokens: int = 32) -> None:
    """Checks that no document is in two of the datasets (calibration, training, evaluation, ...).

    Documents are compared by a hash of their token ids, so all datasets must have the same tokenizer.

    Args:
        datasets (dict[str, PackedTextDataset]): by the name that the message is to use.
        min_tokens (int): shorter documents are not compared: one-line boilerplate repeats in any corpus.

    Raises:
        ValueError: naming the two datasets and where the first common document stands in each.
    """
    owner: dict[bytes, tuple[str, str]] = {}
    for name, dataset in datasets.items():
        for document in dataset.documents:
            if document.length < min_tokens:
                continue
            other, where = owner.setdefault(document.digest, (name, document.where))
            if other != name:
                raise ValueError(
                    f"the same document is in {other} ({where}) and in {name} ({document.where}); use other text, or "
                    "disjoint parts of one source by skip_tokens or skip_documents"
                )
