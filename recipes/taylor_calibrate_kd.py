"""Turns a softmax Transformer into a hybrid of attention and Gated DeltaNet layers: measure, initialize, align, distill, export.

    tune run recipes/taylor_calibrate_kd --config configs/quickstart.yaml
    tune run --nproc_per_node 8 recipes/taylor_calibrate_kd --config configs/qwen3_8b.yaml

Each stage is one method below. It reads files of the stages before it and writes its own below ``output_dir``: its output,
and at its end ``result.json`` with its numbers, from which the report is put together. A stage with a result of the same
inputs is not run again; a stage that was interrupted continues with ``resume_from_checkpoint=true``.
"""

from __future__ import annotations

import sys

import torch
from omegaconf import DictConfig

from tcal_components.checkpoint.files import writing
from tcal_components.config import command_line, one_line_errors
from tcal_components.distill.profiling import profiled
from tcal_components.distributed import gather_full_state_dict
from tcal_components.distributed.preemption import Stopped, one_line_ending, stop_on_signals
from tcal_components.export.config_json import ExportInfo
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.statistics import Statistics, stored_statistics
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.pipeline import notes
from tcal_components.pipeline.config import COMPONENTS, KEYS, PipelineConfig
from tcal_components.pipeline.finish import check_folder, compare_texts, write_folder
from tcal_components.pipeline.models import Models
from tcal_components.pipeline.stages import Stages
from tcal_components.pipeline.training import align_layers, distiller
from tcal_components.reporting.metric_logger import open_metric_logger
from tcal_components.setup import Workbench


class TaylorCalibrateKD:
    """The pipeline.

    Args:
        cfg: see ``configs/quickstart.yaml``.

    Raises:
        ValueError: a mistake in the config, before any weight is read.
        FileNotFoundError: a file that is not there.
    """

    def __init__(self, cfg: DictConfig) -> None:
        # The config's sections, then processes, texts, and the shapes of teacher and student.
        self.config = PipelineConfig(cfg)
        self.bench = Workbench(cfg, extra_keys=KEYS, extra_components=COMPONENTS, resumes="resume_from_checkpoint=true")
        self.config.complete(self.bench)
        self.cfg, self.ctx, self.out = self.bench.cfg, self.bench.ctx, self.bench.output_dir

        # What earlier runs left in `output_dir`, and whether this machine can do the rest.
        self.stages = Stages(self.bench, self.config)
        self.config.check_machine(self.bench)
        self.report = self.stages.open_report()

        # Models are built when a stage first needs them; the distilled one is kept until it has been generated with.
        self.models = Models(self.bench, self.config, self.stages)
        self._student: HybridDecoder | None = None
        self._exported: ExportInfo | None = None

        self.logger = open_metric_logger(cfg) if self.ctx.is_first else None

    def run(self) -> None:
        """All stages of the config, and the report."""
        bench = self.bench
        # The teacher, against which everything is measured.
        with one_line_errors():  # a damaged checkpoint is the user's matter too
            teacher = self.models.teacher
        self.report.update(notes.describe_models(bench, self.config.export_dtype))
        self.report.update({"teacher": {"perplexity": bench.perplexity(teacher, label="teacher")}})
        del teacher

        # Stages that finished earlier keep their outputs; what is measured here is of another evaluation text.
        for stage in self.stages.finished():
            if stage in ("initialize", "align", "distill"):
                self.evaluate(stage)

        # The stages; the student writes text before the export, which needs the memory that the models take.
        for stage in self.config.stages:
            if stage == "export":
                self.generate()
            getattr(self, stage)()
        if "export" not in self.config.stages:
            self.generate()

        # The report, and with all its numbers the model card.
        notes.end_report(self.report, self._exported, bench, self.config)
        if self.logger is not None:
            self.logger.close()
        bench.close()

    def measure(self) -> None:
        """Statistics of the teacher's attention on the calibration text, all layers."""
        if self.stages.skip("measure"):
            return
        tokens = self.bench.data["calibration"].num_tokens
        with self.stages.running("measure") as clock:
            # Each process sums over its part of the text; the means over all of it are the stage's output.
            stored_statistics(
                self.stages.output("measure"),
                teacher=self.models.teacher,
                layers=range(self.bench.spec.num_layers),
                batches=lambda: self.bench.calibration_batches(self.config.measure.batch_size),
                query_block=self.config.measure.query_block,
                ctx=self.ctx,
            )
            clock.add_tokens(tokens)
            clock.record({"tokens": {"calibration": tokens}})

    def initialize(self) -> None:
        """Weights of the mixers in closed form, beside the plain copy that they are compared with."""
        if self.stages.skip("initialize"):
            return
        bench, config = self.bench, self.config
        statistics = Statistics.load(self.stages.path("measure"))
        with self.stages.running("initialize") as clock:
            # No gradient: projections from the teacher's, decays and gates from the statistics, the output by ridge regression.
            start = initialize_mixers(
                config.start.strategy,
                teacher=self.models.teacher,
                layers=bench.converted,
                gdn_spec=bench.gdn,
                statistics=statistics,
                batches=bench.calibration_batches(config.measure.batch_size),
                heldout_batches=list(bench.calibration_batches(config.measure.batch_size, "heldout")),
                options=config.start.options,
                seed=bench.seed,
                autocast_dtype=self.ctx.autocast_dtype,
            )
            self.stages.write("initialize", start.weights)
            clock.add_tokens(bench.data["calibration"].num_tokens)
            clock.stop()
            # How good the start is, which is none of its work.
            clock.record({"initialization": start.diagnostics})
            clock.record(notes.describe_mixers(self.models, start.weights, "before"))
            self.evaluate("initialize")

    def align(self) -> None:
        """All converted layers at once, each towards the attention that it replaces."""
        if self.stages.skip("align"):
            return
        # What an interrupted run left continues with the batch of training text that comes next.
        state, resume = self.stages.begin("align")

        def log(values: dict[str, float], step: int) -> None:
            self._log_metrics(values, step)
            if "align/heldout_error_mean" in values:
                self.report.save()  # the seconds so far, in case this is the last that is heard of the run

        with stop_on_signals() as stop, self.stages.running("align", resumed=resume) as clock:
            # Each layer on its own, the ridge regression for the outputs, and where asked for all layers jointly.
            how = {"state": state, "resume": resume, "stop": stop, "log": log}
            try:
                result = align_layers(self.models, self.stages, self.config, **how)
            except Stopped as stopped:
                self.bench.end_early("align", stopped.step, stop)
            self.stages.write("align", result.weights)
            clock.add_tokens(result.tokens)
            clock.stop()
            # The weights of the least held-out error, in the whole model.
            clock.record(notes.describe_alignment(result))
            clock.record(notes.describe_mixers(self.models, result.weights, "after"))
            self.evaluate("align")
        state.remove()  # the stage is not run a second time
        if self.bench.any_process(stop):
            self.bench.end_early("align", result.steps, stop)

    def distill(self) -> None:
        """End to end: forward KL from the teacher's logits, all parameters."""
        if self.stages.skip("distill"):
            return
        bench, ctx, cfg, config = self.bench, self.ctx, self.cfg, self.config.distill
        assert config is not None
        # The student, and all that trains it; every process has its part of each batch.
        state, resume = self.stages.begin("distill")
        trainer, float8 = distiller(self.models, self.stages, self.config, state=state, resume=resume)
        model, student, optimizer = trainer.model, trainer.student, trainer.optimizer

        with stop_on_signals() as stop, self.stages.running("distill", resumed=resume) as clock:
            # Step 0, or the one after the latest checkpoint.
            trainer.begin()
            with trainer.progress_bar() as advance, profiled(cfg.get("profiler"), ctx.device) as profiler_step:
                while trainer.step < config.steps:
                    # The batch follows from seed and step. A signal to any process ends the loop in all, with everything saved.
                    batch = trainer.stream.batch(trainer.step)
                    counted, stopping = trainer.agree(batch, stop())
                    if stopping:
                        break
                    trainer.seed()

                    # Loss and gradient: means over the tokens of the global batch, which no process has alone.
                    sums = torch.zeros(3, dtype=torch.float64, device=ctx.device)
                    for micro in trainer.micro_batches(batch):
                        with ctx.autocast():
                            loss, parts = model(**micro)
                        # A sum over tokens; FSDP2 averages gradients over the processes.
                        (loss * (ctx.world_size / counted)).backward()
                        sums += torch.stack([parts["kl_sum"], parts["ce_sum"], loss.detach()])
                    kl, ce, mean_loss = (ctx.all_sum(sums) / counted).tolist()

                    # Clip the gradient; one that is not finite ends the run before it reaches the weights.
                    norm = trainer.clip()
                    trainer.check_finite(mean_loss, norm)

                    # The optimizer's step, at the rate that the schedule has for it.
                    rate = trainer.rate
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=True)
                    trainer.schedule.step()
                    trainer.step += 1
                    advance(kl)
                    if profiler_step is not None:
                        profiler_step()

                    # Log. Each of the following is due every so many steps and after the last one.
                    row: dict[str, float] = {}
                    if trainer.due(config.log_every_steps):
                        row = {"loss": kl, "ce": ce, "lr": rate, "grad_norm": norm}
                        self._log_metrics({**row, **trainer.speed()}, trainer.step, "distill/")

                    # Evaluate. The held-out text decides which weights are kept; the evaluation text is only reported.
                    if trainer.due(config.eval_every_steps):
                        found = trainer.judge()
                        self.report.save()
                        with trainer.evaluation():
                            found["perplexity"] = bench.perplexity(student, label=f"step {trainer.step}")
                        self._log_metrics(found, trainer.step, "distill/")
                        row |= found
                    trainer.record(row)

                    # Save weights and optimizer, from which an interrupted run continues.
                    if trainer.due(config.save_every_steps):
                        trainer.save()

            # The student has its best weights now.
            result = trainer.end()
            if not result.finished:
                bench.end_early("distill", result.steps, stop)
            self.stages.write("distill", gather_full_state_dict(student, ctx=ctx))
            clock.add_tokens(result.tokens)
            clock.stop()
            # Its perplexity as it will be exported, and the recovery by tokens spent.
            clock.record(notes.describe_distillation(self.models, result, float8))
            self.stages.evaluated("distill", lambda: notes.distilled_perplexities(self.models, student, result))
            self._student = student
        state.remove()  # weights and optimizer again, and the stage is not run a second time
        if bench.any_process(stop):
            bench.end_early("distill", result.steps, stop)

    def generate(self) -> None:
        """What the student writes after held-out prompts, beside what the teacher writes and in the teacher's eyes."""
        wanted = self.config.generation is not None
        if wanted and self.report.finished(self.stages.exports) and not self.stages.skip("generate"):
            with self.stages.running("generate") as clock:
                # Both continue the same prompts; the teacher says how likely it finds either text.
                found, tokens = compare_texts(self.models, self._student, self.config)
                clock.add_tokens(tokens)
                clock.record({**found, "tokens": {"generated": tokens}})
        self._student = None

    def export(self) -> None:
        """A Hugging Face folder, reloaded by transformers and compared with the student."""
        if self.stages.skip("export") or not self.ctx.is_first:
            self.ctx.barrier()
            return
        # One process does all of it; the check holds the student and transformers' model in float32, so the teacher goes.
        weights = self.models.student_weights(self.stages.exports)
        self.models.drop_teacher()
        with self.stages.running("export") as clock:
            self._exported = write_folder(weights, self.bench, self.config)
            # transformers has to compute what the student computes, and so has llama.cpp where it is asked for.
            clock.record(check_folder(weights, self.bench, self.config))
        self.ctx.barrier()

    def evaluate(self, stage: str) -> None:
        """Perplexity of what a stage left, unless it is known of this evaluation text."""
        self.stages.evaluated(stage, lambda: notes.perplexities(self.models, stage))

    def _log_metrics(self, values: dict[str, float], step: int, prefix: str = "") -> None:
        """Numbers for the metric logger, which the first process has."""
        if self.logger is not None:
            with writing(self.cfg.metric_logger.get("log_dir") or "the metrics"):
                self.logger.log_dict({prefix + name: value for name, value in values.items()}, step)


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = TaylorCalibrateKD(cfg)
    with one_line_ending():
        recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
