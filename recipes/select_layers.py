"""Ranks a teacher's layers by how much they need their attention, and writes the set that a config includes.

    tune run recipes/select_layers --config configs/select_layers.yaml
    tune run recipes/select_layers --config configs/select_layers.yaml "select.policy=[ablation,single_keep]"

Each policy writes ``output_dir/POLICY.json``, which ``retain: {policy: file, path: ..., num_layers: N}`` of the other
recipes reads. Only the text of ``calibration_dataset`` is used. An interrupted run continues where it stopped when it is
started again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from omegaconf import DictConfig
from torch import nn

from tcal_components.align.config import AlignConfig
from tcal_components.align.resumable import resumable_alignment, stored_statistics
from tcal_components.checkpoint.artifacts import replacing
from tcal_components.checkpoint.fingerprint import fingerprint
from tcal_components.checkpoint.stage_files import StageFiles
from tcal_components.config import ConfigError, Count, OneOf, Range, Settings, command_line, one_line_errors, section
from tcal_components.distributed.preemption import Stopped, one_line_ending, stop_on_signals
from tcal_components.evaluation.perplexity import evaluation_batches
from tcal_components.initialize.initialize import StartConfig, initialize_mixers
from tcal_components.models.memory import count_parameters
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.reporting import Report, render_markdown, write_json, write_plots
from tcal_components.select.gates import GateConfig, train_gates
from tcal_components.select.policies import (
    POLICIES,
    Ranking,
    rank_by_ablation,
    rank_by_alignment_error,
    rank_by_gates,
    rank_by_kl,
    rank_by_single_keep,
    rank_uniform,
)
from tcal_components.select.scores import ScoreFile, Scorer
from tcal_components.select.tables import selection_markdown
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


@dataclasses.dataclass(frozen=True)
class MeasuredStart(StartConfig):
    """Section ``initialize``: a strategy of the table, its numbers, and queries a block while the teacher is measured."""

    query_block: Count = 128


class SelectLayers:
    """The recipe.

    Args:
        cfg: see ``configs/select_layers.yaml``; a section ``retain`` is not read, because every layer is looked at.

    Raises:
        ValueError: a mistake in the config, before any weight is read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(self, cfg: DictConfig) -> None:
        cfg.retain = {"layers": []}  # every layer gets a mixer
        self.bench = bench = Workbench(cfg, extra_keys=("select", "initialize"))
        self.ctx, self.out = bench.ctx, bench.output_dir
        self.select = section(SelectConfig, cfg.get("select"), "select")
        self.start = section(MeasuredStart, cfg.get("initialize"), "initialize")
        self.align_config = section(AlignConfig, cfg.get("align"), "align")
        self._check()
        self.files = StageFiles(self.out, ())
        self.files.prints = self._prints()
        self.report = Report(
            self.out,
            "select_layers",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            results={stage: result for stage in self.files.prints if (result := self.files.result(stage)) is not None},
            resume=True,
        )
        self._teacher: HybridDecoder | None = None

    def _check(self) -> None:
        total, select = self.bench.spec.num_layers, self.select
        if select.num_layers > total:
            raise ConfigError(f"select.num_layers is {select.num_layers}, but the teacher has {total} layers")
        if self.align_config.joint.steps:
            raise ConfigError(
                "align.joint trains a student's layers together; there is no student before layers are chosen"
            )
        if "gates" in select.policies:
            if not select.num_layers:
                raise ConfigError("select.policy gates needs select.num_layers of at least 1")
            self.bench.check_batch_size(select.gates.batch_size, "select.gates.batch_size")
        if "alignment_error" in select.policies and self.align_config.steps < 1:
            raise ConfigError("select.policy alignment_error needs an alignment, but align.steps is 0")
        if self._aligns:
            self.bench.check_batch_size(self.align_config.batch_size, "align.batch_size")
            seq_len, tokens = self.align_config.seq_len, self.bench.data["calibration"].num_tokens
            if seq_len > tokens:
                raise ConfigError(
                    f"align.seq_len is {seq_len}, expected at most the {tokens} tokens of calibration_dataset"
                )

    @property
    def _aligns(self) -> bool:
        """Whether a policy needs aligned mixers."""
        policies = [POLICIES[name] for name in self.select.policies]
        return any(policy.alignment or (policy.mixers and self.select.mixers == "align") for policy in policies)

    @property
    def teacher(self) -> HybridDecoder:
        """The teacher, read when it is first needed."""
        if self._teacher is None:
            with one_line_errors():  # a damaged checkpoint is the user's matter
                self._teacher = self.bench.load_teacher()
        return self._teacher

    def run(self) -> None:
        """All policies, their files and the report."""
        bench, select = self.bench, self.select
        self.report.update(
            {
                "teacher": {"family": bench.spec.family, "parameters": count_parameters(bench.spec)[0]},
                "data": bench.provenance(),
            }
        )
        self.report.replace("selection", {})  # of an earlier run, perhaps with other settings
        mixers = None
        if any(POLICIES[name].mixers for name in select.policies):
            mixers = self.initialize()
            if self._aligns:
                mixers = self.align(mixers)
        for name in select.policies:
            self.write(name, *self.rank(name, mixers))
        if self.ctx.is_first:
            self._write_report()
        bench.close()

    # ------------------------------------------------------------------------------------- mixers in place of attention

    def _prints(self) -> dict[str, str]:
        """What the statistics and the mixers are made from."""
        bench = self.bench
        measured = [bench.teacher_fingerprint, bench.data_fingerprint("calibration"), str(self.ctx.dtype)]
        initialized = fingerprint(
            measured,
            dataclasses.asdict(bench.gdn),
            dataclasses.asdict(self.start),
            bench.data_fingerprint("heldout"),
            bench.seed,
        )
        aligned = fingerprint(initialized, dataclasses.asdict(self.align_config))
        return {"measure": fingerprint(measured), "initialize": initialized, "align": aligned}

    def initialize(self) -> nn.ModuleDict:
        """A mixer for every layer, in closed form; returns them with these weights."""
        bench, files = self.bench, self.files
        if not self.report.finished("initialize"):
            with self.report.stage("initialize", made_of=files.prints["initialize"]) as clock:
                statistics = stored_statistics(
                    files.path("measure"),
                    fingerprint=files.prints["measure"],
                    teacher=self.teacher,
                    layers=bench.converted,
                    batches=lambda: bench.calibration_batches(self.select.batch_size),
                    query_block=self.start.query_block,
                    ctx=self.ctx,
                    autocast_dtype=self.ctx.autocast_dtype,
                )
                found = initialize_mixers(
                    self.start.strategy,
                    teacher=self.teacher,
                    layers=bench.converted,
                    gdn_spec=bench.gdn,
                    statistics=statistics,
                    batches=bench.calibration_batches(self.select.batch_size),
                    heldout_batches=list(bench.calibration_batches(self.select.batch_size, "heldout")),
                    seed=bench.seed,
                    options=self.start.options,
                    autocast_dtype=self.ctx.autocast_dtype,
                )
                if self.ctx.is_first:
                    files.write("initialize", found.weights)
                self.ctx.barrier()
                clock.add_tokens(bench.data["calibration"].num_tokens)
                clock.record({"tokens": {"calibration": bench.data["calibration"].num_tokens}})
        self.mixers_from = files.prints["initialize"]
        return bench.mixers(files.read("initialize"))

    def align(self, mixers: nn.ModuleDict) -> nn.ModuleDict:
        """Each mixer towards the attention of its layer; returns them with the aligned weights."""
        bench, config, files = self.bench, self.align_config, self.files
        state = files.state("align")
        if not self.report.finished("align"):
            # Cut to another length it must not run into the text that layers are scored on.
            tokens = min(config.text_tokens, bench.data["calibration"].num_tokens)
            text = bench.training_data(config.seq_len, tokens, role="calibration")
            resume = state.begin(files.prints["align"]) and state.latest() is not None
            with (
                stop_on_signals() as stop,
                self.report.stage("align", made_of=files.prints["align"], resumed=resume) as clock,
            ):
                try:
                    result = resumable_alignment(
                        state,
                        resume=resume,
                        teacher=self.teacher,
                        mixers=mixers,
                        stream=bench.stream(text, config.batch_size, seed=bench.seed),
                        prepare=bench.prepare,
                        heldout_batches=list(bench.calibration_batches(config.batch_size, "heldout")),
                        config=config,
                        save_every=bench.run.save_every,
                        autocast_dtype=self.ctx.autocast_dtype,
                        should_stop=stop,
                    )
                except Stopped as stopped:
                    bench.end_early("align", stopped.step, stop)
                if self.ctx.is_first:
                    files.write("align", result.weights)
                self.ctx.barrier()
                clock.add_tokens(result.tokens)
                clock.record({"alignment_error": result.error, "alignment_curve": result.curve})
                clock.record({"tokens": {"alignment": result.tokens}})
            if bench.any_process(stop):
                bench.end_early("align", result.steps, stop)
        state.remove()
        if self.select.mixers == "align":
            self.mixers_from = files.prints["align"]
            return bench.mixers(files.read("align"))
        return bench.mixers(files.read("initialize"))

    # ---------------------------------------------------------------------------------------------------------- ranking

    def rank(self, policy: str, mixers: nn.ModuleDict | None) -> tuple[Ranking, float, dict[str, int]]:
        """A policy's ranking with the seconds and the tokens, by their use, that it cost."""
        bench, select = self.bench, self.select
        if policy == "uniform":
            return rank_uniform(bench.spec.num_layers, select.num_layers), 0.0, {}
        seconds, tokens = 0.0, {}
        if POLICIES[policy].mixers:
            used = ["initialize", "align"] if POLICIES[policy].alignment or select.mixers == "align" else ["initialize"]
            seconds = sum(self.report["seconds"][stage] or 0.0 for stage in used)
            tokens = {"calibration": self.report["tokens"]["calibration"]}
            tokens |= {"alignment": self.report["tokens"]["alignment"]} if "align" in used else {}
        if policy == "alignment_error":
            errors = {int(layer): error["last"] for layer, error in self.report["alignment_error"].items()}
            return rank_by_alignment_error(errors), seconds, tokens

        made_of = self.mixers_from if POLICIES[policy].mixers else bench.teacher_fingerprint
        made_of = fingerprint(made_of, bench.data_fingerprint("heldout"), str(self.ctx.dtype), policy)
        if policy == "gates":
            made_of = fingerprint(made_of, dataclasses.asdict(select.gates), select.num_layers, bench.seed)
        scores = ScoreFile(self.out / "scores" / f"{policy}.json", fingerprint=made_of)
        self.ctx.barrier()  # all processes have read the file before the first one writes to it
        if mixers is not None:
            mixers.requires_grad_(False)
        if policy == "gates":
            assert mixers is not None
            gates, read = self._gates(mixers, scores)
            return rank_by_gates(gates), seconds + scores.seconds, {**tokens, "gates": read}
        batches = evaluation_batches(
            bench.data["heldout"], batch_size=select.batch_size, rank=self.ctx.rank, world_size=self.ctx.world_size
        )
        scorer = Scorer(self.teacher, batches, autocast_dtype=self.ctx.autocast_dtype)
        if policy == "ablation":
            ranking = rank_by_ablation(scorer, bench.spec.num_layers, scores)
        else:
            assert mixers is not None
            if policy == "single_keep":
                ranking = rank_by_single_keep(scorer, mixers, scores)
            else:
                ranking = rank_by_kl(scorer, mixers, select.num_layers, scores)
        return ranking, seconds + scores.seconds, {**tokens, "scored": scorer.tokens * len(scores.values)}

    def _gates(self, mixers: nn.ModuleDict, scores: ScoreFile) -> tuple[dict[int, float], int]:
        """The gate of each layer, and the tokens that training them took."""
        bench, config = self.bench, self.select.gates
        stream = bench.stream(bench.data["heldout"], config.batch_size, seed=bench.seed)
        layers = range(bench.spec.num_layers)
        values = scores.get_all(
            [f"gate {layer}" for layer in layers],
            lambda: train_gates(
                self.teacher,
                mixers,
                (bench.prepare(batch) for batch in stream),
                self.select.num_layers,
                config=config,
                autocast_dtype=self.ctx.autocast_dtype,
            ).tolist(),
        )
        return dict(zip(layers, values)), config.steps * config.batch_size * bench.data["heldout"].seq_len

    def path(self, policy: str) -> Path:
        """The file of a policy."""
        return self.out / f"{policy}.json"

    def write(self, policy: str, ranking: Ranking, seconds: float, tokens: Mapping[str, int]) -> None:
        """The file that ``retain: {policy: file}`` reads."""
        retained = sorted(ranking.layers[: self.select.num_layers])
        content: dict[str, Any] = {
            "policy": policy,
            "ranking": list(ranking.layers),
            "retained_layers": retained,
            "num_layers": self.select.num_layers,
            "total_layers": self.bench.spec.num_layers,
            "scores": {str(layer): score for layer, score in sorted(ranking.scores.items())},
            "score": POLICIES[policy].summary,
            "seconds": round(seconds, 3),
            "tokens": sum(tokens.values()),
            "tokens_by_use": dict(tokens),
            "details": ranking.details,
            "teacher": str(self.bench.teacher_checkpointer.checkpoint_dir),
            "config": self.bench.container(),
        }
        if self.ctx.is_first:
            write_json(self.path(policy), content)
        summary = {key: content[key] for key in ("ranking", "retained_layers", "scores", "seconds", "tokens")}
        self.report.update({"selection": {policy: summary}})
        self.bench.log(f"{policy}: layers {retained} keep attention; {self.path(policy)}")

    def _write_report(self) -> None:
        selections = {name: self.report["selection"][name] for name in self.select.policies}
        text = render_markdown(self.report.data, plots=write_plots(self.report.data, self.out))
        title, rest = text.split("\n", 1)
        with replacing(self.out / "report.md") as temporary:
            temporary.write_text(f"{title}\n\n{selection_markdown(selections)}{rest}", encoding="utf-8")
        self.bench.log(f"report: {self.out / 'report.md'}")


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = SelectLayers(cfg)
    with one_line_ending():
        recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
