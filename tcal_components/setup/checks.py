"""Mistakes in a config that show before a weight is read; each is one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from tcal_components.align.config import AlignConfig
from tcal_components.checkpoint.teacher import HFTeacherCheckpointer
from tcal_components.config import ConfigError, build, section
from tcal_components.models.retained import RetainConfig, resolve_retained
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec


def retained_layers(cfg: DictConfig, num_layers: int) -> tuple[int, ...]:
    """Which layers keep attention, by section ``retain``.

    Raises:
        ConfigError: layers that the teacher has not, or all that it has.
    """
    config = section(RetainConfig, cfg.get("retain"), "retain")
    try:
        retained = resolve_retained(config, num_layers)
    except ValueError as error:
        raise ConfigError(f"retain: {error}") from error
    if len(retained) == num_layers:
        raise ConfigError(
            f"retain keeps attention in all {len(retained)} layers of the teacher, expected at most "
            f"{len(retained) - 1}: there is nothing to convert"
        )
    return retained


def check_family(cfg: DictConfig, where: str, checkpointer: HFTeacherCheckpointer, **arguments: Any) -> DecoderSpec:
    """A builder of another model than the checkpoint's is a mistake that shows only as garbage.

    Args:
        cfg: of the recipe.
        where: key of the builder.
        checkpointer: of the teacher.
        **arguments: more of the builder's.

    Returns:
        DecoderSpec: what the builder builds.

    Raises:
        ConfigError: which number differs, or what the builder refuses.
    """
    name = cfg[where]["_component_"]
    with torch.device("meta"):
        model = build(cfg[where], where, makes=HybridDecoder, **arguments)
    ours, theirs = dataclasses.asdict(model.spec), dataclasses.asdict(checkpointer.spec)
    for key in ours:
        if key != "max_seq_len" and ours[key] != theirs[key]:
            raise ConfigError(
                f"{where} {name} has {key} {ours[key]}, but the checkpoint "
                f"{checkpointer.checkpoint_dir} has {theirs[key]}"
            )
    return model.spec


def check_vocabulary(tokenizer: Any, name: str, spec: DecoderSpec) -> None:
    """Refuses what is no tokenizer, and one of another model.

    Raises:
        ConfigError: it has no vocabulary, or token ids beyond the teacher's embedding.
    """
    if not isinstance(getattr(tokenizer, "vocab_size", None), int):
        raise ConfigError(f"tokenizer._component_ {name} makes no tokenizer")
    if tokenizer.vocab_size > spec.vocab_size:
        raise ConfigError(
            f"the tokenizer uses token ids up to {tokenizer.vocab_size - 1}, the teacher's embedding has rows "
            f"for the ids 0 to {spec.vocab_size - 1}"
        )


def alignments(cfg: DictConfig, align: AlignConfig) -> dict[str, AlignConfig]:
    """By key, how a config aligns on ``dataset``: the stage of the pipeline, and the entries of an ablation."""
    aligns = "align" in (cfg.get("stages") or ["align"]) and cfg.get("align") is not None
    found = {"align": align} if aligns else {}
    given = cfg.get("alignments")
    for name in given if isinstance(given, DictConfig) else ():
        if given[name] is not None:
            where = f"alignments.{name!s}"
            found[where] = section(AlignConfig, given[name], where)
    return found


def check_lengths(longest: Mapping[str, int], lengths: Mapping[str, int]) -> None:
    """Text has to fit teacher and student as they are built, which may be for less than the checkpoint can place.

    Args:
        longest: tokens by key of a builder.
        lengths: tokens of a sequence by key of a text.

    Raises:
        ConfigError: a text that is longer.
    """
    where = min(longest, key=lambda name: longest[name])
    for key, seq_len in lengths.items():
        if seq_len > longest[where]:
            raise ConfigError(f"{key}.seq_len is {seq_len}, but {where}.max_seq_len is {longest[where]}")
