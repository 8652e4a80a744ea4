"""Documents of a source as token ids."""

from collections.abc import Iterable, Iterator

import numpy as np

from tcal_components.assets import resolve
from tcal_components.data import sources as reading
from tcal_components.data.sources import readers
from tcal_components.data.tokenizer import HFTokenizer

# Characters tokenised together: enough to use every core, little enough to stop early at max_tokens.
_BATCH_CHARACTERS = 1_000_000
# A document while it is read: where it stands, and its token ids in pieces.
Encoded = tuple[str, Iterable[np.ndarray]]


def open_documents(
    source: str,
    local: bool,
    subset: str | None,
    split: str | None,
    text_column: str,
    shuffle: bool,
    seed: int,
    streaming: bool,
) -> Iterator[reading.Document]:
    path = resolve(source)
    if local and not reading.is_saved_dataset(path):
        if split is not None or subset is not None:
            raise ValueError(
                f"split and subset are for Hugging Face datasets; source {source} is a local file or folder"
            )
        files = reading.find_files(path)
        if shuffle:
            files = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
        documents = reading.read_files(files, text_column=text_column)
    else:
        documents = reading.read_hub(source, subset=subset, split=split, text_column=text_column, streaming=streaming)
    return reading.shuffled(documents, seed=seed) if shuffle else documents


def encode_documents(documents: Iterable[reading.Document], tokenizer: HFTokenizer) -> Iterator[Encoded]:
    batch: list[reading.Document] = []
    characters = 0
    for document in documents:
        if document.more is None:
            batch.append(document)
            characters += len(document.text)
        if document.more is not None or characters >= _BATCH_CHARACTERS:
            yield from _encode_batch(batch, tokenizer)
            batch, characters = [], 0
        if document.more is not None:
            yield document.where, tokenizer.encode_pieces(document.pieces())
    yield from _encode_batch(batch, tokenizer)


def _encode_batch(batch: list[reading.Document], tokenizer: HFTokenizer) -> Iterator[Encoded]:
    texts = [document.text for document in batch]
    for document, ids in zip(batch, tokenizer.encode_batch(texts, add_bos=tokenizer.adds_bos, add_eos=True)):
        yield document.where, [np.asarray(ids, dtype=np.uint32)]


def documents_of_array(source: str, tokenizer: HFTokenizer) -> Iterator[Encoded]:
    path = resolve(source)
    tokens = reading.read_token_array(path, vocab_size=tokenizer.vocab_size)
    begin, size = 0, len(tokens)
    for low in range(0, size, readers.PIECE):
        ends = np.flatnonzero(tokens[low : low + readers.PIECE] == tokenizer.eos_id) + low + 1
        for end in ends.tolist():
            yield f"{path} tokens {begin} to {end}", _array_pieces(tokens, begin, end, tokenizer)
            begin = end
    if begin < size:
        yield f"{path} tokens {begin} to {size}", _array_pieces(tokens, begin, size, tokenizer)


def _array_pieces(tokens: np.ndarray, begin: int, end: int, tokenizer: HFTokenizer) -> Iterator[np.ndarray]:
    head = tokens[begin : min(end, begin + len(tokenizer.begin_ids))].tolist()
    yield np.asarray(tokenizer.opened(head)[: -len(head) or None], dtype=np.uint32)
    for low in range(begin, end, readers.PIECE):
        yield np.asarray(tokens[low : min(low + readers.PIECE, end)], dtype=np.uint32)
