"""What the config of ``ablate_initialization`` says, what is wrong with it, and what its cells depend on."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any

from omegaconf import DictConfig

from tcal_components.ablation.comparison import summarise, targets
from tcal_components.align.config import AlignConfig
from tcal_components.config import (
    ConfigError,
    Count,
    Positive,
    Range,
    Rate,
    Seed,
    Settings,
    Steps,
    Tokens,
    WarmUp,
    keys_of,
    read,
    section,
)
from tcal_components.initialize.initialize import STRATEGIES, StartConfig
from tcal_components.setup import Workbench

# What tells the runs of one start's recovery apart.
GRID = ("lr", "base_lr", "tokens", "batch_size")
Rates = Annotated[list[Rate], Range(1, 100)]
TokenGrid = Tokens | Annotated[list[Tokens], Range(1, 100)]
BatchGrid = Count | Annotated[list[Count], Range(1, 100)]


@dataclasses.dataclass(frozen=True)
class NamedStart(StartConfig):
    """One entry of ``starts``: a strategy and its numbers, under a name of its own."""

    name: str | None = None


@dataclasses.dataclass(frozen=True)
class AblateConfig(Settings):
    """Section ``ablate``.

    Args:
        seeds: of the mixers' random parts and of the order of the text.
        after_steps: the table shows the alignment error after so many steps.
        target_start: the start whose errors the others are to reach.
        target_alignment: under which alignment; None leaves the columns out.
        target_steps: after how many of its steps.
        batch_size: sequences a forward pass over the calibration text.
        query_block: queries a block while the teacher is measured.
    """

    seeds: Annotated[list[Seed], Range(1, 1000)] = dataclasses.field(default_factory=lambda: [0])
    after_steps: Annotated[int, Range(0, 10**9)] = 50
    target_start: str = "naive"
    target_alignment: str | None = None
    target_steps: list[Steps] = dataclasses.field(default_factory=list)
    batch_size: Count = 8
    query_block: Count = 128


@dataclasses.dataclass(frozen=True)
class Cells(Settings):
    """The table: its starts, each a strategy or one with numbers and a name, and by name its alignments; null is none."""

    starts: Annotated[list[str | dict[str, Any]], Range(1, 1000)] = dataclasses.field(
        default_factory=lambda: list(STRATEGIES)
    )
    alignments: Annotated[dict[str, dict[str, Any] | None], Range(1, 1000)] = dataclasses.field(kw_only=True)


@dataclasses.dataclass(frozen=True)
class RecoveryConfig(Settings):
    """Section ``recovery``: distillation from some of the cells, each over a grid.

    The grid is the product of ``lr``, ``base_lr``, ``tokens`` and ``batch_size``, the same for every start unless ``grids``
    has values of its own for it.

    Args:
        starts: ``START/ALIGNMENT`` of the cells, of the first seed.
        grids: by ``START/ALIGNMENT``, other values of any of ``tokens``, ``batch_size``, ``lr`` and ``base_lr``. A start that
            needs more tokens wants a longer schedule and other learning rates to be at its best.
        tokens: of a distillation, which is the length of its schedule; one number or a grid.
        batch_size: sequences a step over all processes, one number or a grid; their length is that of ``dataset``.
        micro_batch_size: sequences a forward pass of one process; None, or more than its share, takes all.
        lr: grid of peak learning rates of the converted layers.
        base_lr: grid of peak learning rates of everything else.
        warmup_steps: linear warm-up.
        eval_every_tokens: how often the perplexity is measured; also at an eighth, a quarter and a half of it.
        save_every_tokens: how often the state is saved that an interrupted run continues from; None never.
        ratios: of the teacher's perplexity, to which the tokens are counted.
        baseline: the one of ``starts`` that the tokens of the others are compared with; None takes the first.
    """

    starts: Annotated[list[str], Range(1)]
    tokens: TokenGrid
    batch_size: BatchGrid = 8
    micro_batch_size: Count | None = None
    lr: Rates = dataclasses.field(default_factory=lambda: [1e-3])
    base_lr: Rates = dataclasses.field(default_factory=lambda: [1e-4])
    warmup_steps: WarmUp = 10
    eval_every_tokens: Tokens = 131_072
    save_every_tokens: Tokens | None = None
    ratios: list[Positive] = dataclasses.field(default_factory=lambda: [1.5, 1.2, 1.1, 1.05])
    baseline: str | None = None
    grids: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class GridConfig(Settings):
    """One of ``recovery.grids``; None takes the section's own."""

    tokens: TokenGrid | None = None
    batch_size: BatchGrid | None = None
    lr: Rates | None = None
    base_lr: Rates | None = None


# Top-level keys besides those of every recipe.
KEYS = (*keys_of(Cells), "ablate", "recovery")


class Ablation:
    """Sections of the config, checked; those of the recovery are checked by what distils.

    Args:
        cfg: of the recipe.
        bench: of the same config.

    Attributes:
        ablate: section ``ablate``.
        starts, alignments: of the table, by name; an alignment of None leaves the start as it is.
        recovery: section ``recovery``; None without one.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, cfg: DictConfig, bench: Workbench) -> None:
        self.bench = bench
        self.ablate = section(AblateConfig, cfg.get("ablate"), "ablate")
        cells = read(Cells, cfg)
        self.starts = _read_starts(cells)
        self.alignments: dict[str, AlignConfig | None] = {
            _checked_name(name, "alignments"): None
            if value is None
            else section(AlignConfig, value, f"alignments.{name}")
            for name, value in cells.alignments.items()
        }
        self._check()
        self.recovery = section(RecoveryConfig, cfg.recovery, "recovery") if cfg.get("recovery") else None

    def _check(self) -> None:
        ablate = self.ablate
        for name, config in self.alignments.items():
            if config is not None:
                self.bench.check_batch_size(config.batch_size, f"alignments.{name}.batch_size")
                self.bench.check_batch_size(config.joint.batch_size, f"alignments.{name}.joint.batch_size")
        if ablate.target_alignment is not None:
            reference = self.alignments.get(ablate.target_alignment)
            if reference is None or ablate.target_start not in self.starts:
                raise ConfigError(
                    f"ablate.target_start {ablate.target_start!r} with target_alignment {ablate.target_alignment!r} is no "
                    f"cell with an alignment; starts: {', '.join(self.starts)}; alignments: {', '.join(self.alignments)}"
                )
            late = [step for step in ablate.target_steps if step > reference.steps]
            if late:
                raise ConfigError(
                    f"ablate.target_steps has {late[0]}, but alignments.{ablate.target_alignment} has {reference.steps} steps"
                )

    def measured(self) -> dict[str, Any]:
        """What the statistics are made from: values by the config's keys, texts and the teacher by their fingerprints."""
        bench = self.bench
        return {
            "teacher_checkpointer": bench.teacher_fingerprint,
            "calibration_dataset": bench.data_fingerprint("calibration"),
            "dtype": str(bench.ctx.dtype),
            "retain.converted": bench.converted,
        }

    def made_from(self, seed: int) -> dict[str, dict[str, Any]]:
        """What the cells of a seed are made from, likewise, by ``START/ALIGNMENT``; the name of a start does not count."""
        bench, found = self.bench, dict[str, dict[str, Any]]()
        common = {
            **self.measured(),
            "model.gdn": dataclasses.asdict(bench.gdn),
            "heldout": bench.data_fingerprint("heldout"),
            "validation_dataset": bench.data_fingerprint("evaluation"),
            "seed": seed,
        }
        text = bench.data_fingerprint("training")
        for name, start in self.starts.items():
            for alignment, config in self.alignments.items():
                aligned = {} if config is None else {"align": dataclasses.asdict(config), "dataset": text}
                found[f"{name}/{alignment}"] = {
                    **common,
                    "start": {**dataclasses.asdict(start), "name": None},
                    **aligned,
                }
        return found

    def section(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        """The report's section ``ablation``.

        Args:
            cells: so far.

        Returns:
            dict: the table with all that it is made of.
        """
        ablate = self.ablate
        reference = {"start": ablate.target_start, "alignment": ablate.target_alignment or ""}
        goals = targets(cells, steps=ablate.target_steps, **reference)
        return {
            "seeds": ablate.seeds,
            "after_steps": ablate.after_steps,
            "target_start": ablate.target_start,
            "target_alignment": ablate.target_alignment,
            "target_steps": ablate.target_steps if ablate.target_alignment else [],
            "targets": goals,
            "starts": {name: dataclasses.asdict(start) for name, start in self.starts.items()},
            "alignments": {name: config and dataclasses.asdict(config) for name, config in self.alignments.items()},
            "rows": summarise(cells, goals, after=ablate.after_steps),
            "cells": cells,
        }


def _read_starts(cells: Cells) -> dict[str, NamedStart]:
    found: dict[str, NamedStart] = {}
    for number, entry in enumerate(cells.starts):
        given = {"strategy": entry} if isinstance(entry, str) else entry
        start = section(NamedStart, given, f"starts[{number}]")
        name = start.name or start.strategy
        if name in found:
            raise ConfigError(f"starts has {name!r} twice; give one of them another name")
        found[_checked_name(name, "starts")] = start
    return found


def _checked_name(name: Any, where: str) -> str:
    if not re.fullmatch(r"[\w+-]+", str(name)):
        raise ConfigError(f"{where} has the name {name!r}; allowed are letters, digits, '_', '+' and '-'")
    return str(name)
