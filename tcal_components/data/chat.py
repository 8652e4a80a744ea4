"""Chat and instruction data of torchtune's datasets, packed like text, with masked prompts."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tcal_components.assets import resolve
from tcal_components.config import Length, Skipped, Steps
from tcal_components.data.disjoint import PackedDocument, document_digest
from tcal_components.data.packed import IGNORE_INDEX, Pack, PackedTextDataset
from tcal_components.data.sources import first_line, is_local, require_file

BUILDERS = ("json", "csv", "text", "parquet", "arrow")  # sources of datasets that read data_files here


def from_torchtune(
    dataset: Any,
    *,
    seq_len: int,
    pad_id: int = 0,
    max_sequences: int | None = None,
    skip_tokens: int = 0,
    tokenizer: Any = None,
) -> PackedTextDataset:
    """Packs any torchtune dataset (chat, instruct, text completion, ...) with document boundaries.

    A sample is never cut in two: it goes whole into the current row, or begins the next one and the rest of the row is
    padding. A sample longer than a row is cut to ``seq_len``. Samples without any token to be learned are left out.

    Args:
        dataset (Any): a sized dataset whose items have ``tokens`` [n] and, unshifted, either ``labels`` [n] with -100 on
            the prompt, or ``mask`` [n], True on the prompt. With neither, every token is learned.
        seq_len (int): T, tokens a sequence.
        pad_id (int): token id written on padding.
        max_sequences (int | None): stop after this many rows.
        skip_tokens (int): leave out whole samples first, until at least this many tokens have passed.
        tokenizer (Any): of the tokens, see :class:`PackedTextDataset`.

    Returns:
        PackedTextDataset: prompts and padding have label -100; ``padding_fraction`` says what padding costs. Behind
        ``skip_tokens`` = ``sources["skipped_tokens"] + num_tokens`` follow the samples that are not in it, all of them.

    Raises:
        ValueError: if an item has no tokens, labels of another length, or nothing in the dataset is to be learned.
    """
    if seq_len < 2:
        raise ValueError(f"seq_len must be at least 2, got {seq_len}")
    rows: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    used: list[int] = []
    starts: list[int] = []
    documents: list[PackedDocument] = []
    cut = left_out = passed = 0
    fill = seq_len
    for index in range(len(dataset)):
        try:
            item = dataset[index]
        except Exception as error:  # torchtune's transforms take any row for what they expect
            kind = type(error).__name__
            raise ValueError(f"sample {index} cannot be read as a dialogue: {kind}: {first_line(error)}") from error
        tokens, targets = _sample(item, index)
        length = len(tokens)
        if passed < skip_tokens:
            passed += length
            continue
        if len(tokens) > seq_len:
            tokens, targets, cut = tokens[:seq_len], targets[:seq_len], cut + 1
        if not targets[1:].any():
            left_out += 1
            passed += length
            continue
        if fill + len(tokens) > seq_len:
            if max_sequences is not None and len(rows) == max_sequences:
                break
            rows.append(np.full(seq_len, pad_id, dtype=np.uint32))
            masks.append(np.zeros(seq_len, dtype=bool))
            used.append(0)
            fill = 0
        rows[-1][fill : fill + len(tokens)] = tokens
        masks[-1][fill : fill + len(tokens)] = targets
        starts.append((len(rows) - 1) * seq_len + fill)
        documents.append(PackedDocument(f"sample {index}", document_digest([tokens]), starts[-1], len(tokens)))
        fill += len(tokens)
        used[-1] = fill
        passed += length
    if not rows:
        skipped = f", {passed} tokens of them passed for skip_tokens {skip_tokens}" if skip_tokens else ""
        raise ValueError(
            f"no sample to learn from: {len(dataset)} samples, {left_out} of them without an unmasked token{skipped}"
        )
    # Padding begins a document of its own, so that a sample's last token has no label.
    starts.extend(row * seq_len + n for row, n in enumerate(used) if n < seq_len)
    arrays = {
        "tokens": np.concatenate(rows),
        "starts": np.unique(np.asarray(starts, dtype=np.int64)),
        "targets": np.concatenate(masks),
        "used": np.asarray(used, dtype=np.int64),
    }
    pack = Pack(
        **arrays,
        documents=documents,
        sources={
            "path": type(dataset).__name__,
            "documents": len(documents),
            "tokens": int(sum(used)),
            "sha256": _sha256(*arrays.values()),
            "cut": cut,
            "left_out": left_out,
            "skipped_tokens": passed - int(sum(used)),  # with what was cut or left out
        },
    )
    return PackedTextDataset(pack=pack, seq_len=seq_len, tokenizer=tokenizer)


def packed_chat(
    tokenizer: Any,
    *,
    dataset: dict[str, Any] | list[dict[str, Any]],
    seq_len: Length,
    max_sequences: Steps | None = None,
    skip_tokens: Skipped = 0,
) -> PackedTextDataset:
    """Config component: builds a torchtune dataset from its own config node, then :func:`from_torchtune`.

    A config may name the torchtune dataset itself, with ``seq_len`` and the like beside its own arguments.

    Args:
        tokenizer (Any): handed to the torchtune dataset; :func:`~tcal_components.data.hf_tokenizer` renders the
            teacher's chat template, torchtune's model tokenizers work as well.
        dataset (dict[str, Any]): for example ``{_component_: torchtune.datasets.chat_dataset, source: ..., ...}``; of a
            list the samples follow one another.
        seq_len (int): T, tokens a sequence.
        max_sequences (int | None): stop after this many rows.
        skip_tokens (int): leave out whole samples first, until at least this many tokens have passed.

    Raises:
        ValueError: if ``dataset`` names no component, or gives nothing to learn from.
    """
    from torchtune.datasets import ConcatDataset

    parts = [dataset] if isinstance(dataset, Mapping) else list(dataset)
    built = [_built(part, tokenizer) for part in parts]
    pad_id = tokenizer.fill_id if hasattr(tokenizer, "fill_id") else tokenizer.pad_id
    return from_torchtune(
        built[0] if len(built) == 1 else ConcatDataset(built),
        seq_len=seq_len,
        pad_id=pad_id or 0,
        max_sequences=max_sequences,
        skip_tokens=skip_tokens,
        tokenizer=tokenizer,
    )


def _built(dataset: Mapping[str, Any], tokenizer: Any) -> Any:
    from omegaconf import DictConfig
    from torchtune import config

    if "_component_" not in dataset:
        raise ValueError("packed_chat needs dataset: {_component_: torchtune.datasets...., source: ...}")
    _check_files(dataset)
    try:
        return config.instantiate(DictConfig(dict(dataset)), tokenizer)
    except Exception as error:  # datasets raises many kinds, and the reason is often the cause of what it says
        reasons = dict.fromkeys(first_line(found) for found in (error, error.__cause__) if found is not None)
        given = ", ".join(f"{key} {dataset[key]}" for key in ("source", "data_files") if key in dataset)
        raise ValueError(f"{dataset['_component_']} cannot read {given}: {'; '.join(reasons)}") from error


def _check_files(dataset: Mapping[str, Any]) -> None:
    """Refuses files that are missing or cannot be read to their end, which datasets would look for on a hub or wait for."""
    names = dataset.get("data_files" if dataset.get("source") in BUILDERS else "source")
    for name in [names] if isinstance(names, str) or not isinstance(names, Sequence) else names:
        if not isinstance(name, str) or any(sign in name for sign in ("*", "?", "[", "://")):
            continue
        if is_local(name) and not resolve(name).is_dir():
            require_file(resolve(name))


def _sha256(*arrays: np.ndarray) -> str:
    """Hash of the token ids and of what else decides what is trained on: the same ids may have other prompts or ends."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(str(array.shape).encode() + array.astype("<i8").tobytes())
    return digest.hexdigest()


def _sample(item: dict[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [n] and which of them are to be learned [n]."""
    if not len(item.get("tokens", ())):
        raise ValueError(f"sample {index} has no tokens; its keys are: {', '.join(item)}")
    tokens = np.asarray(item["tokens"], dtype=np.int64)
    if "labels" in item:
        targets = np.asarray(item["labels"]) != IGNORE_INDEX
    elif "mask" in item:
        targets = ~np.asarray(item["mask"], dtype=bool)
    else:
        targets = np.ones(len(tokens), dtype=bool)
    if targets.shape != tokens.shape:
        raise ValueError(f"sample {index} has {len(tokens)} tokens but {len(targets)} labels")
    return tokens, targets
