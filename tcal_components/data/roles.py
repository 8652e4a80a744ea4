"""The parts of the text that a run works with: what it calibrates, judges layers, trains and evaluates on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config as torchtune_config

from tcal_components.config import ConfigError, build, takes
from tcal_components.data.disjoint import assert_disjoint
from tcal_components.data.packed import PackedTextDataset
from tcal_components.data.token_files import TokenFiles


def build_roles(
    cfg: DictConfig, files: TokenFiles, *, heldout_seq_len: int, heldout_tokens: int, max_seq_len: int
) -> dict[str, PackedTextDataset]:
    """All parts, of documents of their own.

    Args:
        cfg: config with ``calibration_dataset``, ``dataset`` and ``validation_dataset``.
        files: where the texts are kept, and their tokenizer.
        heldout_seq_len: tokens a sequence of the text that layers are judged by.
        heldout_tokens: its size; it follows the calibration text in the same source.
        max_seq_len: the teacher's longest position.

    Returns:
        dict: ``calibration``, ``heldout``, ``training``, ``evaluation``.

    Raises:
        ConfigError: too little text, or sequences that are too long.
        ValueError: a document is in two parts.
    """
    if not takes(cfg.calibration_dataset, "skip_tokens"):
        raise ConfigError(
            f"calibration_dataset._component_ {cfg.calibration_dataset['_component_']!r} does not fit: it takes no "
            "skip_tokens, which the text that layers are judged by needs"
        )
    data = {"calibration": _text(files, "calibration", cfg.calibration_dataset, {}, "calibration_dataset")}
    # Whole documents are skipped: the calibration text may begin behind its own skip_tokens.
    skipped = data["calibration"].sources.get("skipped_tokens", cfg.calibration_dataset.get("skip_tokens")) or 0
    skip = int(skipped) + data["calibration"].num_tokens
    # The text on which layers are judged: neither fitted nor the final evaluation's, cut as alignment cuts its own.
    try:
        limit = {"max_tokens": heldout_tokens}
        if not takes(cfg.calibration_dataset, "max_tokens"):
            limit = {"max_sequences": heldout_tokens // heldout_seq_len}
        changes = {"seq_len": heldout_seq_len, "skip_tokens": skip, **limit}
        data["heldout"] = _text(files, "heldout", cfg.calibration_dataset, changes)
    except ValueError as error:
        raise ConfigError(
            f"calibration_dataset leaves no text to judge layers by: {heldout_tokens} tokens (align.heldout_batches x "
            f"batch_size x seq_len) of other documents are wanted after the first {skip}; lower its "
            f"{next(iter(limit))} or give more text ({error})"
        ) from error
    data["training"] = _text(files, "training", cfg.dataset, {}, "dataset")
    data["evaluation"] = _text(files, "evaluation", cfg.validation_dataset, {}, "validation_dataset")
    longest = max(dataset.seq_len for dataset in data.values())
    if longest > max_seq_len:
        raise ConfigError(f"seq_len {longest} is longer than the teacher's longest position, {max_seq_len}")
    for role, shares in files.once("copies", list(data), lambda: assert_disjoint(data)).items():
        data[role].sources["found_in"] = shares
    return data


def _text(
    files: TokenFiles, name: str, section: DictConfig, changes: dict[str, Any], where: str | None = None
) -> PackedTextDataset:
    """The text of a section, with ``changes`` in place of its own arguments; ``where``: say the section in errors."""

    def make() -> PackedTextDataset:
        if where is None:
            return torchtune_config.instantiate(section, files.tokenizer, **changes)
        return build(section, where, files.tokenizer, makes=PackedTextDataset, **changes)

    resolved: dict[str, Any] = OmegaConf.to_container(section, resolve=True)  # type: ignore[assignment]
    return files.get(name, resolved | changes, make)


def recut(
    files: TokenFiles, role: str, dataset: DictConfig, *, seq_len: int, max_tokens: int | None
) -> PackedTextDataset:
    """The beginning of a dataset's text, cut to another sequence length.

    Args:
        files: where the text is kept, and its tokenizer.
        role: of the dataset.
        dataset: its config section.
        seq_len: tokens a sequence.
        max_tokens: read no more than this (one sequence at least), and never more than the section's own
            ``max_tokens`` (or ``max_sequences``, padding included), behind which other parts of the same source may lie.

    Returns:
        PackedTextDataset: the text; all of it where the component takes neither ``max_tokens`` nor ``max_sequences``.

    Raises:
        ConfigError: the section's own limit is less than one sequence.
    """
    changes = {"seq_len": seq_len, **_limit(dataset, seq_len=seq_len, max_tokens=max_tokens)}
    return _text(files, "-".join([role, *map(str, changes.values())]), dataset, changes)


def _limit(dataset: DictConfig, *, seq_len: int, max_tokens: int | None, where: str = "align") -> dict[str, int]:
    """The argument by which a dataset of another sequence length ends where :func:`recut` says; empty: it takes none."""
    name = next((name for name in ("max_tokens", "max_sequences") if takes(dataset, name)), None)
    if name is None:
        return {}
    by_rows = name == "max_sequences"
    limits = [] if max_tokens is None else [max(max_tokens, seq_len)]
    if dataset.get(name) is not None:
        own = int(dataset[name]) * (int(dataset.get("seq_len") or seq_len) if by_rows else 1)
        if own < seq_len:
            rows = f" x seq_len {dataset.get('seq_len')}" if by_rows else ""
            raise ConfigError(
                f"dataset.{name} {dataset[name]}{rows} is less than one sequence of {where}.seq_len {seq_len}"
            )
        limits.append(own)
    return {name: min(limits) // (seq_len if by_rows else 1)} if limits else {}


def check_cut(
    dataset: DictConfig, where: str, *, seq_len: int, max_tokens: int | None, fixed_sequences: int | None
) -> None:
    """Refuses training text that :func:`recut` could not cut, long before it tries.

    Args:
        dataset: its config section.
        where: key of the alignment that asks for the text, for messages.
        seq_len: as in :func:`recut`.
        max_tokens: likewise.
        fixed_sequences: of the alignment; where it is given, text without an end would be another alignment.

    Raises:
        ConfigError: the dataset's own limit is less than one sequence, or it takes no limit where it must end.
    """
    limit = _limit(dataset, seq_len=seq_len, max_tokens=max_tokens, where=where)
    if fixed_sequences is not None and not limit:
        raise ConfigError(
            f"{where}.fixed_sequences is {fixed_sequences}, but dataset._component_ {dataset['_component_']!r} takes "
            "neither max_tokens nor max_sequences by which it could end there"
        )


def provenance(data: Mapping[str, PackedTextDataset]) -> dict[str, dict[str, Any]]:
    """Where each part of the text came from, for the report."""
    return {
        role: {"source": d.sources.get("path"), "seq_len": d.seq_len, "padding_fraction": d.padding_fraction}
        | {key: d.sources.get(key) for key in ("documents", "tokens", "sha256", "found_in")}
        | {key: d.sources[key] for key in ("parts",) if key in d.sources}
        for role, d in data.items()
    }
