"""Turns a softmax Transformer into a hybrid of attention and Gated DeltaNet layers: measure, initialize, align, distill, export.

    tune run recipes/taylor_calibrate_kd --config configs/quickstart.yaml
    tune run --nproc_per_node 8 recipes/taylor_calibrate_kd --config configs/qwen3_8b.yaml

Each stage reads files of the stages before it and writes its own below ``output_dir``: its output, and at its end
``result.json`` with its numbers, from which the report is put together. A stage with a result of the same inputs is not run
again; a stage that was interrupted continues with ``resume_from_checkpoint=true``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torchtune import config as torchtune_config
from torchtune import training

from tcal_components.align.resumable import resumable_alignment
from tcal_components.checkpoint.artifacts import writing
from tcal_components.checkpoint.fingerprint import fingerprint
from tcal_components.checkpoint.run_state import RunState
from tcal_components.checkpoint.stage_files import StageFiles
from tcal_components.config import command_line, one_line_errors
from tcal_components.config.pipeline import COMPONENTS, KEYS, PipelineConfig
from tcal_components.distill import distill
from tcal_components.distributed import gather_full_state_dict
from tcal_components.distributed.preemption import Stopped, one_line_ending, stop_on_signals
from tcal_components.evaluation.cache_size import recurrent_state_bytes
from tcal_components.evaluation.generation import continuation_report, continuations, score_continuations
from tcal_components.evaluation.load import free
from tcal_components.export.config_json import ExportInfo, dropped_features
from tcal_components.export.folder import export_hybrid
from tcal_components.export.notes import serving_notes
from tcal_components.export.verify import verify_export
from tcal_components.initialize.initialize import initialize_mixers
from tcal_components.measure.held_out import diagnose
from tcal_components.measure.statistics import Statistics, measure
from tcal_components.models.memory import count_parameters
from tcal_components.modules.conversion import converted, student_state_dict
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.precision.float8 import apply_float8, without_float8
from tcal_components.reporting import Report, StageClock, teacher_license, write_model_card
from tcal_components.reporting.console import closing_lines, stage_line
from tcal_components.serving.llama_cpp_check import check_llama_cpp
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
        self.config = PipelineConfig(cfg)
        self.bench = bench = Workbench(
            cfg, extra_keys=KEYS, extra_components=COMPONENTS, resumes="resume_from_checkpoint=true"
        )
        self.config.complete(bench)
        self.cfg, self.ctx, self.out = bench.cfg, bench.ctx, bench.output_dir
        self.files = StageFiles(self.out, self.config.stages)
        self.files.prints = prints = self.config.fingerprints(bench, uses_alignment=self.files.uses_alignment)
        # The curve in the distillation's state has perplexities, so it is of this evaluation text.
        distilling = fingerprint(prints["distill"], bench.data_fingerprint("evaluation"))
        self.files.states = {"align": prints["align"], "distill": distilling}
        self.text = fingerprint(bench.data_fingerprint("evaluation"))
        distills = "distill" in self.config.stages or self.files.current("distill")
        self.exports = "distill" if distills else self.files.mixers  # the stage whose student is exported
        settings = self.config.export.settings()
        # With the evaluation text, because the model card has the perplexities.
        prints["export"] = fingerprint(prints[self.exports], settings, self.text)
        if self.config.generation is not None:
            numbers = dataclasses.asdict(self.config.generation)
            prints["generate"] = fingerprint(prints[self.exports], numbers, self.text, bench.seed)
        self.files.check()
        if self.config.run.resume_from_checkpoint:
            self.files.check_states()
        self.config.check_machine(bench)
        if self.ctx.is_first:
            self.files.sweep()

        self.report = Report(
            self.out,
            "taylor_calibrate_kd",
            bench.container(),
            device=self.ctx.device,
            world_size=self.ctx.world_size,
            rank=self.ctx.rank,
            results=self.files.results(),
            resume=True,
        )
        self.logger = (
            torchtune_config.instantiate(cfg.metric_logger) if cfg.get("metric_logger") and self.ctx.is_first else None
        )
        self._teacher: HybridDecoder | None = None
        self._student: HybridDecoder | None = None  # the distilled one, until it has been generated with
        self.exported: ExportInfo | None = None

    # ------------------------------------------------------------------------------------------------ stage plumbing

    def _begin(self, stage: str) -> tuple[RunState, bool]:
        """The state of a stage, and whether there is something to continue from; says what becomes of it."""
        state = self.files.state(stage, keep_last=self.config.run.keep_last_checkpoints)
        step = state.latest()
        resumed = (
            state.begin(self.files.states[stage], resume=self.config.run.resume_from_checkpoint) and step is not None
        )
        if resumed:
            self.bench.log(f"{stage}: continues after step {step}")
        elif step is not None:
            self.bench.log(f"{stage}: starts anew; the state after step {step} of an interrupted run is dropped")
        return state, resumed

    def _skip(self, stage: str) -> bool:
        """Whether the stage can be left out, because its output and its result are there."""
        done = self.report.finished(stage)
        if done:
            self.bench.log(f"{stage}: {self.files.path(stage)} is up to date, not run again")
            if stage in self.files.states:  # a kill may have come between the result and this
                self.files.state(stage).remove()
        return done

    @contextmanager
    def _stage(self, stage: str, *, resumed: bool = False) -> Iterator[StageClock]:
        """The stage's entry in the report; its result is written when the block ends, so its output comes before."""
        made_of = self.files.prints[stage]
        with self.report.stage(stage, made_of=made_of, text=self.text, resumed=resumed) as clock:
            yield clock
        self.bench.log(stage_line(self.report.data, stage))

    def _log_metrics(self, values: dict[str, float], step: int) -> None:
        if self.logger is not None:
            with writing(self.cfg.metric_logger.get("log_dir") or "the metrics"):
                self.logger.log_dict(values, step)

    def _write(self, stage: str, tensors: dict[str, Tensor]) -> None:
        if self.ctx.is_first:
            self.files.write(stage, tensors)
        self.ctx.barrier()

    @property
    def teacher(self) -> HybridDecoder:
        """The teacher, read when it is first needed."""
        if self._teacher is None:
            self._teacher = self.bench.load_teacher(float8=self.config.precision.teacher == "float8")
        return self._teacher

    # ------------------------------------------------------------------------------------------------------- stages

    def run(self) -> None:
        """All stages of the config, and the report."""
        bench = self.bench
        with one_line_errors():  # a damaged checkpoint is the user's matter too
            _ = self.teacher
        total, mixers = count_parameters(bench.spec, retained_layers=bench.retained, gdn=bench.gdn)
        self.report.update(
            {
                "teacher": {"family": bench.spec.family, "parameters": count_parameters(bench.spec)[0]},
                "student": {
                    "retained_layers": list(bench.retained),
                    "converted_layers": list(bench.converted),
                    "parameters": total,
                    "mixer_parameters": mixers,
                    "state_bytes": recurrent_state_bytes(
                        bench.spec.num_heads, bench.gdn, layers=len(bench.converted), dtype=self.config.export_dtype
                    ),
                },
                "data": bench.provenance(),
                "dropped": dropped_features(bench.spec),
            }
        )
        self.report.update({"teacher": {"perplexity": bench.perplexity(self.teacher, label="teacher")}})
        for stage, result in list(self.report.results.items()):
            if result["text"] != self.text:
                self._measure_again(stage)
        for stage in self.config.stages:
            if stage == "export":  # which needs the memory that the models take
                self.generate()
            getattr(self, stage)()
        if "export" not in self.config.stages:
            self.generate()
        if self.report.finished("export"):
            self.report.update({"export": {"path": str(self.out / "export")}})
        self.report.finish()
        if self.exported is not None:
            self._model_card(self.exported)
        for line in closing_lines(self.report.data, self.out):
            bench.log(line)
        if self.logger is not None:
            self.logger.close()
        bench.close()

    def _measure_again(self, stage: str) -> None:
        """Perplexities of a finished stage on another evaluation text than it was measured on, from its output.

        Of the recovery curve only the ends are left: the student in between is gone.
        """
        bench, found = self.bench, {}
        if stage == "initialize":
            naive = bench.perplexity(self.teacher, self._naive(), "naive")
            analytic = bench.perplexity(self.teacher, self.files.read("initialize"), "initialized")
            found = {"perplexity": {"naive": naive, "analytic": analytic}}
        if stage == "align":
            found = {"perplexity": {"aligned": bench.perplexity(self.teacher, self.files.read("align"), "aligned")}}
        if stage == "distill":
            student, float8 = self._build_student(self.files.read("distill") if self.ctx.is_first else {})
            with without_float8(student):  # as after the distillation
                distilled = bench.perplexity(student, label="distilled")
            first, *_, last = self.report["recovery_curve"]
            best = self.report.data.get("distill", {}).get("best_step")
            if best is not None and self.config.distill is not None:
                last["tokens"] = first["tokens"] + best * self.config.distill.batch_size * self.config.distill.seq_len
            curve = [{**first, "perplexity": self._ready_perplexity()}, {**last, "perplexity": distilled}]
            found = {"perplexity": {"distilled": distilled}, "recovery_curve": curve}
            if float8:
                found["float8"] = {"perplexity": None}
        self.report.amend(stage, found, text=self.text)

    def _ready_perplexity(self) -> float | None:
        """That of the student which the distillation starts from."""
        value: float | None = self.report["perplexity"]["aligned" if self.files.mixers == "align" else "analytic"]
        return value

    def measure(self) -> None:
        """Statistics of the teacher's attention on the calibration text, all layers."""
        if self._skip("measure"):
            return
        tokens = self.bench.data["calibration"].num_tokens
        with self._stage("measure") as clock:
            sums = measure(
                self.teacher,
                range(self.bench.spec.num_layers),
                list(self.bench.calibration_batches(self.config.measure.batch_size)),
                block_size=self.config.measure.query_block,
                autocast_dtype=self.ctx.autocast_dtype,
            )
            if self.ctx.world_size > 1:
                sums.all_reduce_()
            if self.ctx.is_first:
                self.files.path("measure").parent.mkdir(parents=True, exist_ok=True)
                sums.finalise({"fingerprint": self.files.prints["measure"]}).save(self.files.path("measure"))
            self.ctx.barrier()
            clock.add_tokens(tokens)
            clock.record({"tokens": {"calibration": tokens}})

    def initialize(self) -> None:
        """Weights of the mixers in closed form, beside the plain copy that they are compared with."""
        if self._skip("initialize"):
            return
        bench = self.bench
        statistics = Statistics.load(self.files.path("measure"))
        perplexity = {"naive": bench.perplexity(self.teacher, self._naive(), "naive")}
        with self._stage("initialize") as clock:
            start = initialize_mixers(
                self.config.start.strategy,
                statistics=statistics,
                batches=bench.calibration_batches(self.config.measure.batch_size),
                heldout_batches=list(bench.calibration_batches(self.config.measure.batch_size, "heldout")),
                options=self.config.start.options,
                **self._start_arguments(),
            )
            self._write("initialize", start.weights)
            clock.add_tokens(bench.data["calibration"].num_tokens)
            clock.stop()
            perplexity["analytic"] = bench.perplexity(self.teacher, start.weights, self.config.start.strategy)
            clock.record({"perplexity": perplexity, "initialization": start.diagnostics})
            clock.record(self._describe(start.weights, "before"))

    def _start_arguments(self) -> dict[str, Any]:
        """What every start is made from."""
        return {
            "teacher": self.teacher,
            "layers": self.bench.converted,
            "gdn_spec": self.bench.gdn,
            "seed": self.bench.seed,
            "autocast_dtype": self.ctx.autocast_dtype,
        }

    def _naive(self) -> dict[str, Tensor]:
        """Mixers of the plain copy, which the report compares with."""
        return initialize_mixers("naive", statistics=None, batches=[], **self._start_arguments()).weights

    def align(self) -> None:
        """All converted layers at once, each towards the attention that it replaces."""
        if self._skip("align"):
            return
        bench, config = self.bench, self.config.align
        stream = bench.stream(
            bench.training_data(config.seq_len, config.text_tokens), config.batch_size, seed=bench.seed
        )
        state, resumed = self._begin("align")

        def log(values: dict[str, float], step: int) -> None:
            self._log_metrics(values, step)
            if "align/heldout_error_mean" in values:
                self.report.save()  # the seconds so far, in case this is the last that is heard of the run

        with stop_on_signals() as stop, self._stage("align", resumed=resumed) as clock:
            try:
                result = resumable_alignment(
                    state,
                    resume=resumed,
                    teacher=self.teacher,
                    mixers=bench.mixers(self.files.read("initialize")),
                    stream=stream,
                    prepare=bench.prepare,
                    heldout_batches=list(bench.calibration_batches(config.batch_size, "heldout")),
                    config=config,
                    joint_stream=bench.joint_stream(config, seed=bench.seed + 2),
                    save_every=self.bench.run.save_every,
                    autocast_dtype=self.ctx.autocast_dtype,
                    log=log,
                    should_stop=stop,
                )
            except Stopped as stopped:
                bench.end_early("align", stopped.step, stop)
            self._write("align", result.weights)
            clock.add_tokens(result.tokens)
            clock.stop()
            perplexity = bench.perplexity(self.teacher, result.weights, "aligned")
            clock.record({"alignment_error": result.error, "alignment_curve": result.curve})
            if result.joint_curve:
                clock.record({"joint_curve": result.joint_curve})
            clock.record({"perplexity": {"aligned": perplexity}, "tokens": {"alignment": result.tokens}})
            clock.record(self._describe(result.weights, "after"))
        state.remove()
        if bench.any_process(stop):
            bench.end_early("align", result.steps, stop)

    def distill(self) -> None:
        """End to end: forward KL from the teacher's logits, all parameters."""
        if self._skip("distill"):
            return
        bench, config = self.bench, self.config.distill
        assert config is not None
        state, resume = self._begin("distill")
        weights: dict[str, Tensor] = {}
        if self.ctx.is_first:
            mixers = self.files.read(self.files.mixers)
            weights = student_state_dict(bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY], mixers)
        student, float8 = self._build_student(weights)
        del weights
        aligned = self.files.mixers == "align"
        before = ("calibration", "alignment") if aligned else ("calibration",)
        spent = sum(self.report["tokens"].get(key) or 0 for key in before)

        def evaluate(step: int) -> dict[str, float]:
            self.report.save()
            return {"perplexity": bench.perplexity(student, label=f"step {step}")}

        def heldout() -> Iterator[dict[str, Any]]:
            share = config.micro_batch_size or config.batch_size // self.ctx.world_size
            return bench.calibration_batches(share * self.ctx.world_size, "heldout")

        stream = bench.stream(bench.data["training"], config.batch_size, seed=bench.seed + 1)
        with stop_on_signals() as stop, self._stage("distill", resumed=resume) as clock:
            result = distill(
                student,
                self.teacher,
                stream,
                config=config,
                ctx=self.ctx,
                loss=self.config.loss,
                on_eval=evaluate,
                on_log=lambda values, step: self._log_metrics({f"distill/{k}": v for k, v in values.items()}, step),
                run_state=state,
                resume=resume,
                heldout=heldout,
                should_stop=stop,
                progress=self.ctx.is_first,
            )
            if not result.finished:
                bench.end_early("distill", result.steps, stop)
            self._write("distill", gather_full_state_dict(student, ctx=self.ctx))
            clock.add_tokens(result.tokens)
            clock.stop()
            curve = [row for row in result.curve if "perplexity" in row]
            distilled = curve[-1]["perplexity"]
            if result.best_step is not None:
                clock.record({"distill": {"best_step": result.best_step, "heldout_loss": result.heldout_loss}})
                if result.best_step != result.steps:
                    bench.log(
                        f"distill: the held-out text is best predicted after step {result.best_step} of {result.steps}, "
                        "so the student is that one"
                    )
                    distilled = bench.perplexity(student, label=f"of step {result.best_step}")
            if float8:  # the export multiplies in its own precision
                clock.record({"float8": {**float8, "perplexity": distilled}})
                with without_float8(student):
                    distilled = bench.perplexity(student, label="without float8")
            rows = [{"tokens": spent + int(row["tokens"]), "perplexity": row["perplexity"]} for row in curve]
            clock.record({"recovery_curve": [{"tokens": spent, "perplexity": self._ready_perplexity()}, *rows]})
            clock.record({"perplexity": {"distilled": distilled}, "tokens": {"distillation": result.tokens}})
            self._student = student
        state.remove()  # weights and optimizer again, and the stage is not run a second time
        if bench.any_process(stop):
            bench.end_early("distill", result.steps, stop)

    def _build_student(self, weights: dict[str, Tensor]) -> tuple[HybridDecoder, dict[str, Any]]:
        """The hybrid with these weights (read by the first process), ready to train; and what of it is in float8."""
        bench, float8 = self.bench, {}
        student = bench.student_on_meta(self.config.master_dtype)
        if self.config.precision.student == "float8":
            layers = apply_float8(student, device=self.ctx.device, sharded=self.ctx.world_size > 1)
            bench.log(layers.summary())
            float8 = {"student": len(layers.converted), "student_left_out": layers.kept}
        run = self.config.run
        options = {"activation_checkpointing": run.enable_activation_checkpointing, "compile": run.compile}
        return bench.spread(student, weights, **options), float8

    def generate(self) -> None:
        """What the student writes after held-out prompts, beside what the teacher writes and in the teacher's eyes."""
        settings, prompts, bench = self.config.generation, self.config.prompts, self.bench
        if settings is not None and self.report.finished(self.exports) and not self._skip("generate"):
            autocast: dict[str, Any] = {"autocast_dtype": self.ctx.autocast_dtype}
            shown = self.ctx.is_first
            with self._stage("generate") as clock:
                label = "generate: teacher" if shown else None
                theirs = continuations(self.teacher, prompts, settings, seed=bench.seed, progress=label, **autocast)
                with self._finished_student() as student:
                    label = "generate: student" if shown else None
                    own = continuations(student, prompts, settings, seed=bench.seed, progress=label, **autocast)
                scores = {
                    name: score_continuations(self.teacher, prompts, theirs, texts, **autocast)
                    for name, texts in (("teacher", theirs), ("student", own))
                }
                clock.add_tokens(theirs.tokens + own.tokens)
                clock.record(continuation_report(settings, prompts, scores))
                clock.record({"tokens": {"generated": theirs.tokens + own.tokens}})
        self._student = None

    @contextmanager
    def _finished_student(self) -> Iterator[nn.Module]:
        """The student that is exported; while it is there, the teacher may not be."""
        if self.exports == "distill":
            weights = self.files.read("distill") if self.ctx.is_first and self._student is None else {}
            student = self._student or self._build_student(weights)[0]
            with without_float8(student):
                yield student
        else:
            mixers = self.bench.mixers(self.files.read(self.exports)).requires_grad_(False)
            with converted(self.teacher, mixers) as student:
                yield student

    def export(self) -> None:
        """A Hugging Face folder, reloaded by transformers and compared with the student."""
        done = self._skip("export")
        if done or not self.ctx.is_first:
            self.ctx.barrier()
            return
        bench, folder, source = self.bench, self.out / "export", self.exports
        if source == "distill":
            weights = self.files.read("distill")
        else:
            mixers = self.files.read(source)
            weights = student_state_dict(bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY], mixers)
            del mixers
        # The check holds the student and transformers' model in float32.
        self._teacher = None
        free(self.ctx.device)
        with self._stage("export") as clock:
            with writing(folder):
                self.exported = export_hybrid(
                    weights,
                    spec=bench.spec,
                    gdn=bench.gdn,
                    retained_layers=bench.retained,
                    teacher_dir=bench.teacher_checkpointer.checkpoint_dir,
                    output_dir=folder,
                    dtype=self.config.export_dtype,
                    format=self.config.export.format,
                    max_shard_size=self.config.export.max_shard_size,
                )
            student = bench.student_on_meta(torch.float32).to_empty(device=self.ctx.device)  # where the check computes
            student.load_state_dict(weights)
            del weights
            tokens = bench.data["evaluation"][0]["tokens"][None, : self.config.export.verify_tokens]
            checked = verify_export(folder, student, tokens.to(self.ctx.device), keep_student=False)
            clock.record({"export": {"format": self.config.export.format, **checked}})
            del student
            free(self.ctx.device)
            if "llama_cpp" in self.config.export.check:
                clock.record({"serving": {"llama_cpp": self._check_llama_cpp(folder)}})
        self.ctx.barrier()

    def _check_llama_cpp(self, folder: Path) -> dict[str, Any]:
        """Logits and perplexity of the export in llama.cpp, beside those in transformers."""
        settings, rows = self.config.export, self.bench.data["evaluation"]
        windows = [rows[i]["tokens"][:512] for i in range(min(8, len(rows)))]
        return check_llama_cpp(
            folder,
            rows[0]["tokens"][: settings.verify_tokens].tolist(),
            torch.stack(windows),
            source=settings.llama_cpp_source,
            python=settings.llama_cpp_python or sys.executable,
        )

    def _model_card(self, exported: ExportInfo) -> None:
        folder = Path(self.bench.teacher_checkpointer.checkpoint_dir)
        write_model_card(
            self.report.data,
            self.out / "export",
            name=self.out.name,
            teacher=self.config.export.base_model or folder.name,
            base_model=self.config.export.base_model,
            license=teacher_license(folder),
            serving_notes=serving_notes(exported, self.report.data.get("serving")),
        )

    def _describe(self, weights: dict[str, Tensor], when: str) -> dict[str, Any]:
        """Half-lives and gates on held-out text, for the report."""
        found = diagnose(
            self.teacher,
            self.bench.mixers(weights),
            self.bench.calibration_batches(self.config.measure.batch_size, "heldout"),
            autocast_dtype=self.ctx.autocast_dtype,
        )
        return {
            "half_life": {layer: {when: notes["half_life"]} for layer, notes in found.items()},
            "gates": {
                layer: {f"write_{when}": notes["beta"], f"output_{when}": notes["gate"]}
                for layer, notes in found.items()
            },
        }


@command_line
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = TaylorCalibrateKD(cfg)
    with one_line_ending():
        recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
