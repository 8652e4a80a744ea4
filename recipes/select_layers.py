"""Ranks a teacher's layers by how much they need their attention, and writes the set that a config includes.

    tune run recipes/select_layers --config configs/select_layers.yaml
    tune run recipes/select_layers --config configs/select_layers.yaml "select.policy=[ablation,single_keep]"

Each policy writes ``output_dir/POLICY.json``, which ``retain: {policy: file, path: ..., num_layers: N}`` of the other
recipes reads. Only the text of ``calibration_dataset`` is used. An interrupted run continues where it stopped when it is
started again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from omegaconf import DictConfig
from torch import Tensor, nn

from tcal_components.align.resumable import resumable_alignment
from tcal_components.checkpoint.artifact import Artifact
from tcal_components.checkpoint.run_state import RunState
from tcal_components.config import command_line, one_line_errors
from tcal_components.distributed.preemption import Stopped, one_line_ending, stop_on_signals
from tcal_components.evaluation.perplexity import evaluation_batches
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.statistics import stored_statistics
from tcal_components.models.memory import count_parameters
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.reporting import Report, stage_result, write_json
from tcal_components.select.config import Selection
from tcal_components.select.gates import train_gates
from tcal_components.select.policies import (
    POLICIES,
    Ranking,
    rank_by,
    rank_by_ablation,
    rank_by_kl,
    rank_by_single_keep,
    rank_uniform,
)
from tcal_components.select.scores import ScoreFile, Scorer
from tcal_components.select.tables import selected_set, selection_markdown
from tcal_components.setup import Workbench


class SelectLayers:
    """The recipe.

    Args:
        cfg: see ``configs/select_layers.yaml``; a section ``retain`` is not read, because every layer is looked at.

    Raises:
        ValueError: a mistake in the config, before any weight is read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(self, cfg: DictConfig) -> None:
        # Processes, texts and shapes, then this recipe's own sections.
        cfg.retain = {"layers": []}  # every layer gets a mixer
        self.bench = bench = Workbench(cfg, extra_keys=("select", "initialize"))
        self.ctx, self.out = bench.ctx, bench.output_dir
        self.config = Selection(cfg, bench)
        self.select = self.config.select

        # Statistics, and the mixers of both stages, each made from the one before.
        inputs = self.config.inputs(bench)
        self.statistics = Artifact(self.out / "measure" / "statistics.safetensors", inputs["measure"])
        self.mixers, made = dict[str, Artifact](), self.statistics
        for before, stage in (("measure", "initialize"), ("initialize", "align")):
            made_from = {before: made.fingerprint, **inputs[stage]}
            made = self.mixers[stage] = Artifact(self.out / stage / "mixers.safetensors", made_from)

        # The report begins with what is there of the same inputs.
        self.results = {name: stage_result(self.out, name, made.inputs) for name, made in self.mixers.items()}
        for stage, result in self.results.items():
            if why := result.why():
                bench.log(f"{stage}: outdated, because of {why}")
        self.report = Report(
            self.out,
            "select_layers",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            results=[self.results[name] for name, made in self.mixers.items() if made.current()],
            resume=True,
        )
        self._teacher: HybridDecoder | None = None

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

        # What stands in for attention, where a policy looks at that.
        mixers = None
        if any(POLICIES[name].mixers for name in select.policies):
            mixers = self.initialize()
            if select.aligns:
                mixers = self.align(mixers)
            mixers.requires_grad_(False)

        # Each policy ranks all layers, and writes its set.
        for name in select.policies:
            self.write(name, *self.rank(name, mixers))
        selections = {name: self.report["selection"][name] for name in select.policies}
        path = self.report.finish(selection_markdown(selections))
        bench.log(f"report: {path}")
        bench.close()

    # ------------------------------------------------------------------------------------- mixers in place of attention

    def initialize(self) -> nn.ModuleDict:
        """A mixer for every layer, in closed form; returns them with these weights."""
        bench, start, size = self.bench, self.config.start, self.select.batch_size
        if not self.report.finished("initialize"):
            with self.report.stage("initialize", result=self.results["initialize"]) as clock:
                # The teacher's attention on the calibration text, of which the weights are a function.
                statistics = stored_statistics(
                    self.statistics,
                    teacher=self.teacher,
                    layers=bench.converted,
                    batches=lambda: bench.calibration_batches(size),
                    query_block=start.query_block,
                    ctx=self.ctx,
                )
                found = initialize_mixers(
                    start.strategy,
                    teacher=self.teacher,
                    layers=bench.converted,
                    gdn_spec=bench.gdn,
                    statistics=statistics,
                    batches=bench.calibration_batches(size),
                    heldout_batches=list(bench.calibration_batches(size, "heldout")),
                    seed=bench.seed,
                    options=start.options,
                    autocast_dtype=self.ctx.autocast_dtype,
                )
                self._save("initialize", found.weights)
                clock.add_tokens(bench.data["calibration"].num_tokens)
                clock.record({"tokens": {"calibration": bench.data["calibration"].num_tokens}})
        return bench.mixers(self.mixers["initialize"].load())

    def align(self, mixers: nn.ModuleDict) -> nn.ModuleDict:
        """Each mixer towards the attention of its layer; returns those that ``select.mixers`` names."""
        bench, config, made = self.bench, self.config.align, self.mixers["align"]
        state = RunState(self.out / "align" / "state")
        if not self.report.finished("align"):
            # Cut to another length it must not run into the text that layers are scored on.
            tokens = min(config.text_tokens, bench.data["calibration"].num_tokens)
            text = bench.training_data(config.seq_len, tokens, role="calibration")
            resume = state.begin(made.inputs) and state.latest() is not None
            with (
                stop_on_signals() as stop,
                self.report.stage("align", result=self.results["align"], resumed=resume) as clock,
            ):
                # What an interrupted run left continues with the batch that comes next; a signal saves and ends it.
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
                self._save("align", result.weights)
                clock.add_tokens(result.tokens)
                clock.record({"alignment_error": result.error, "alignment_curve": result.curve})
                clock.record({"tokens": {"alignment": result.tokens}})
            if bench.any_process(stop):
                bench.end_early("align", result.steps, stop)
        state.remove()
        return bench.mixers(self.mixers[self.select.mixers].load())

    def _save(self, stage: str, weights: Mapping[str, Tensor]) -> None:
        """Writes a stage's mixers by the first process; the others wait."""
        if self.ctx.is_first:
            self.mixers[stage].save(weights)
        self.ctx.barrier()

    # ---------------------------------------------------------------------------------------------------------- ranking

    def rank(self, policy: str, mixers: nn.ModuleDict | None) -> tuple[Ranking, float, dict[str, int]]:
        """A policy's ranking with the seconds and the tokens, by their use, that it cost."""
        bench, select = self.bench, self.select
        if policy == "uniform":
            return rank_uniform(bench.spec.num_layers, select.num_layers), 0.0, {}

        # What its mixers cost; their errors are a ranking already.
        stages = select.stages(policy)
        seconds = sum(self.report["seconds"][stage] or 0.0 for stage in stages)
        uses = {"initialize": "calibration", "align": "alignment"}
        tokens = {uses[stage]: self.report["tokens"][uses[stage]] for stage in stages}
        if policy == "alignment_error":
            errors = {int(layer): error["last"] for layer, error in self.report["alignment_error"].items()}
            return rank_by(errors), seconds, tokens

        # The others measure models with exchanged layers; every number is kept, so that an interrupted ranking continues.
        made_from = self.mixers[select.mixers].fingerprint if stages else None
        inputs = self.config.score_inputs(policy, bench, made_from)
        scores = ScoreFile(Artifact(self.out / "scores" / f"{policy}.json", inputs))
        self.ctx.barrier()  # all processes have read the file before the first one writes to it
        if policy == "gates":
            assert mixers is not None
            gates, read = self._gates(mixers, scores)
            return rank_by(gates), seconds + scores.seconds, {**tokens, "gates": read}
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

    def write(self, policy: str, ranking: Ranking, seconds: float, tokens: Mapping[str, int]) -> None:
        """The file that ``retain: {policy: file}`` reads, and its part of the report."""
        bench, path = self.bench, self.out / f"{policy}.json"
        found = selected_set(policy, ranking, self.select.num_layers, seconds=seconds, tokens=tokens)
        if self.ctx.is_first:
            teacher = str(bench.teacher_checkpointer.checkpoint_dir)
            write_json(path, {**found, "teacher": teacher, "config": bench.container()})
        summary = {key: found[key] for key in ("ranking", "retained_layers", "scores", "seconds", "tokens")}
        self.report.update({"selection": {policy: summary}})
        bench.log(f"{policy}: layers {found['retained_layers']} keep attention; {path}")


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = SelectLayers(cfg)
    with one_line_ending():
        recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
