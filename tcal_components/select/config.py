"""What the config of ``select_layers`` says, what is wrong with it, and what its stages and scores depend on."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from omegaconf import DictConfig

from tcal_components.align.config import AlignConfig
from tcal_components.config import ConfigError, Count, OneOf, Range, Settings, section
from tcal_components.initialize.initialize import StartConfig
from tcal_components.select.gates import GateConfig
from tcal_components.select.policies import POLICIES
from tcal_components.setup import Workbench

PolicyName = Annotated[str, OneOf(POLICIES)]


@dataclasses.dataclass(frozen=True)
class SelectConfig(Settings):
    """Section ``select``.

    Args:
        policy: one of ``POLICIES``, or a list of them.
        num_layers: layers that keep attention.
        mixers: what stands in for attention while ``single_keep``, ``kl_guided`` and ``gates`` measure: mixers as
            ``initialize`` makes them, or ``align`` after ``align.steps`` steps.
        batch_size: sequences a forward pass over all processes.
        gates: numbers of the policy ``gates``.
    """

    num_layers: Annotated[int, Range(0, 2**16)]
    policy: PolicyName | Annotated[list[PolicyName], Range(1, 100)] = "gates"
    mixers: Annotated[str, OneOf(("initialize", "align"))] = "align"
    batch_size: Count = 8
    gates: GateConfig = dataclasses.field(default_factory=GateConfig)

    @property
    def policies(self) -> list[str]:
        """The policies as a list."""
        return [self.policy] if isinstance(self.policy, str) else list(self.policy)

    @property
    def aligns(self) -> bool:
        """Whether a policy needs aligned mixers."""
        return any("align" in self.stages(policy) for policy in self.policies)

    def stages(self, policy: str) -> list[str]:
        """The stages whose mixers or errors a policy needs."""
        needs = POLICIES[policy]
        if not needs.mixers:
            return []
        return ["initialize", "align"] if needs.alignment or self.mixers == "align" else ["initialize"]


@dataclasses.dataclass(frozen=True)
class MeasuredStart(StartConfig):
    """Section ``initialize``: a strategy of the table, its numbers, and queries a block while the teacher is measured."""

    query_block: Count = 128


class Selection:
    """Sections of the config, checked.

    Args:
        cfg: of the recipe.
        bench: of the same config.

    Attributes:
        select, start, align: the sections ``select``, ``initialize`` and ``align``.

    Raises:
        ConfigError: a value that is not allowed.
    """

    def __init__(self, cfg: DictConfig, bench: Workbench) -> None:
        self.select = section(SelectConfig, cfg.get("select"), "select")
        self.start = section(MeasuredStart, cfg.get("initialize"), "initialize")
        self.align = section(AlignConfig, cfg.get("align"), "align")
        self._check(bench)

    def _check(self, bench: Workbench) -> None:
        total, select, align = bench.spec.num_layers, self.select, self.align
        if select.num_layers > total:
            raise ConfigError(f"select.num_layers is {select.num_layers}, but the teacher has {total} layers")
        if align.joint.steps:
            raise ConfigError(
                "align.joint trains a student's layers together; there is no student before layers are chosen"
            )
        if "gates" in select.policies:
            if not select.num_layers:
                raise ConfigError("select.policy gates needs select.num_layers of at least 1")
            bench.check_batch_size(select.gates.batch_size, "select.gates.batch_size")
        if "alignment_error" in select.policies and align.steps < 1:
            raise ConfigError("select.policy alignment_error needs an alignment, but align.steps is 0")
        if select.aligns:
            bench.check_batch_size(align.batch_size, "align.batch_size")
            tokens = bench.data["calibration"].num_tokens
            if align.seq_len > tokens:
                raise ConfigError(
                    f"align.seq_len is {align.seq_len}, expected at most the {tokens} tokens of calibration_dataset"
                )

    def inputs(self, bench: Workbench) -> dict[str, dict[str, Any]]:
        """What each stage's output is made from besides what the stage before left.

        Args:
            bench: of the same config.

        Returns:
            dict: by stage, values by the config's keys; texts and the teacher by their fingerprints.
        """
        measured = {
            "teacher_checkpointer": bench.teacher_fingerprint,
            "calibration_dataset": bench.data_fingerprint("calibration"),
            "dtype": str(bench.ctx.dtype),
        }
        initialized = {
            "model.gdn": dataclasses.asdict(bench.gdn),
            "initialize": dataclasses.asdict(self.start),
            "heldout": bench.data_fingerprint("heldout"),
            "seed": bench.seed,
        }
        return {"measure": measured, "initialize": initialized, "align": {"align": dataclasses.asdict(self.align)}}

    def score_inputs(self, policy: str, bench: Workbench, mixers: str | None) -> dict[str, Any]:
        """What a policy's scores are made from.

        Args:
            policy: its name.
            bench: of the same config.
            mixers: fingerprint of those in place of attention; None where there are none.

        Returns:
            dict: values by the config's keys.
        """
        found: dict[str, Any] = {
            "mixers": mixers,
            "teacher_checkpointer": bench.teacher_fingerprint,
            "heldout": bench.data_fingerprint("heldout"),
            "dtype": str(bench.ctx.dtype),
        }
        if policy == "gates":
            numbers = {"gates": dataclasses.asdict(self.select.gates), "num_layers": self.select.num_layers}
            found |= {"select": numbers, "seed": bench.seed}
        return found
