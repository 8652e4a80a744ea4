"""Turns a softmax Transformer into a hybrid of attention and Gated DeltaNet layers: measure, initialize, align, distill, export.

    tune run recipes/taylor_calibrate_kd --config configs/quickstart.yaml
    tune run --nproc_per_node 8 recipes/taylor_calibrate_kd --config configs/qwen3_8b.yaml

Each stage reads files of the stages before it and writes its own below ``output_dir``. A stage whose output was made from
the same inputs is not run again; a stage that was interrupted continues with ``resume_from_checkpoint=true``.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig
from torch import Tensor
from torchtune import config as torchtune_config
from torchtune import training

from tcal_components.calibration.diagnose import diagnose
from tcal_components.calibration.initialize import initialize_mixers
from tcal_components.calibration.resumable import resumable_alignment
from tcal_components.calibration.statistics import Statistics, measure
from tcal_components.checkpoint.export import export_hybrid
from tcal_components.checkpoint.export_config import ExportInfo, dropped_features
from tcal_components.checkpoint.fingerprint import fingerprint
from tcal_components.checkpoint.run_state import RunState
from tcal_components.checkpoint.serving_notes import serving_notes
from tcal_components.checkpoint.stage_files import StageFiles
from tcal_components.checkpoint.verify import verify_export
from tcal_components.config import STAGES, one_line_errors
from tcal_components.distillation import distill
from tcal_components.distributed import gather_full_state_dict
from tcal_components.distributed.preemption import Stopped, StopRequest, stop_on_signals
from tcal_components.evaluation.cache_size import recurrent_state_bytes
from tcal_components.evaluation.load import free
from tcal_components.models.memory import count_parameters
from tcal_components.modules.conversion import student_state_dict
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.pipeline_config import COMPONENTS, KEYS, PipelineConfig
from tcal_components.precision.float8 import apply_float8, without_float8
from tcal_components.reporting import Report, teacher_license, write_model_card
from tcal_components.workbench import Workbench


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
        self.bench = bench = Workbench(cfg, extra_keys=KEYS, extra_components=COMPONENTS)
        self.config.complete(bench)
        self.cfg, self.ctx, self.out = bench.cfg, bench.ctx, bench.output_dir
        self.files = StageFiles(self.out, self.config.stages)
        self.files.prints = prints = self.config.fingerprints(bench, uses_alignment=self.files.uses_alignment)
        # The curve in the distillation's state has perplexities, so it is of this evaluation text.
        distilling = fingerprint(prints["distill"], bench.data_fingerprint("evaluation"))
        self.files.states = {"align": prints["align"], "distill": distilling}
        self.files.check()
        if self.config.resume:
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
            resume=True,
        )
        self.logger = (
            torchtune_config.instantiate(cfg.metric_logger) if cfg.get("metric_logger") and self.ctx.is_first else None
        )
        self._teacher: HybridDecoder | None = None
        self.exported: ExportInfo | None = None

    # ------------------------------------------------------------------------------------------------ stage plumbing

    def _begin(self, stage: str) -> tuple[RunState, bool]:
        """The state of a stage, and whether there is something to continue from; says what becomes of it."""
        state = self.files.state(stage, keep_last=self.config.keep_last)
        step = state.latest()
        resumed = state.begin(self.files.states[stage], resume=self.config.resume) and step is not None
        if resumed:
            self.bench.log(f"{stage}: continues after step {step}")
        elif step is not None:
            self.bench.log(f"{stage}: starts anew; the state after step {step} of an interrupted run is dropped")
        return state, resumed

    def _skip(self, stage: str) -> bool:
        """Whether the stage can be left out, because its output and the report's numbers of it are there."""
        done = self.files.current(stage) and self.report.finished(stage)
        if done:
            self.bench.log(f"{stage}: {self.files.path(stage)} is up to date, not run again")
        return done

    def _log_metrics(self, values: dict[str, float], step: int) -> None:
        if self.logger is not None:
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
        validation = fingerprint(bench.data_fingerprint("evaluation"))
        if (self.report.data.get("data") or {}).get("evaluation_fingerprint") != validation:
            self._measure_again()  # numbers on other text are not comparable
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
                "data": {**bench.provenance(), "evaluation_fingerprint": validation},
                "dropped": dropped_features(bench.spec),
            }
        )
        self.report.update({"teacher": {"perplexity": bench.perplexity(self.teacher, label="teacher")}})
        for stage in self.config.stages:
            getattr(self, stage)()
        self.report.finish()
        if self.exported is not None:
            self._model_card(self.exported)
        bench.log(f"report: {self.out / 'report.md'}")
        if self.logger is not None:
            self.logger.close()

    def _measure_again(self) -> None:
        """Perplexities of finished stages on another evaluation text, from their outputs; without one they are forgotten.

        Of the recovery curve only the ends are left: the student in between is gone.
        """
        bench, found = self.bench, {}
        kept = [
            stage for stage in STAGES if stage != "export" and self.report.finished(stage) and self.files.current(stage)
        ]
        for stage in STAGES:
            if stage not in kept:
                self.report.forget(stage)
        if "initialize" in kept:
            found["naive"] = bench.perplexity(self.teacher, self._naive(), "naive")
            found["analytic"] = bench.perplexity(self.teacher, self.files.read("initialize"), "initialized")
        if "align" in kept:
            found["aligned"] = bench.perplexity(self.teacher, self.files.read("align"), "aligned")
        if "distill" in kept:
            student = self._build_student(self.files.read("distill") if self.ctx.is_first else {})
            with without_float8(student):  # as after the distillation
                found["distilled"] = bench.perplexity(student, label="distilled")
            first, *_, last = self.report["recovery_curve"]
            first["perplexity"] = found.get("aligned", found.get("analytic"))
            last["perplexity"] = found["distilled"]
            self.report.data["recovery_curve"] = [first, last]
        self.report.update({"perplexity": found}, save=False)  # saved together with the name of the text

    def measure(self) -> None:
        """Statistics of the teacher's attention on the calibration text, all layers."""
        if self._skip("measure"):
            return
        tokens = self.bench.data["calibration"].num_tokens
        with self.report.stage("measure") as clock:
            sums = measure(
                self.teacher,
                range(self.bench.spec.num_layers),
                self.bench.calibration_batches(self.config.measure.batch_size),
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
        self.report.update({"tokens": {"calibration": tokens}})

    def initialize(self) -> None:
        """Weights of the mixers in closed form, beside the plain copy that they are compared with."""
        if self._skip("initialize"):
            return
        bench = self.bench
        statistics = Statistics.load(self.files.path("measure"))
        perplexity = {"naive": bench.perplexity(self.teacher, self._naive(), "naive")}
        with self.report.stage("initialize") as clock:
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
            self.report.update({"perplexity": perplexity})
            self.report.replace("initialization", {str(k): v for k, v in start.diagnostics.items()})
            self._describe(start.weights, "before")

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

        with stop_on_signals() as stop, self.report.stage("align", resumed=resumed) as clock:
            try:
                result = resumable_alignment(
                    state.directory,
                    fingerprint=self.files.states["align"],
                    teacher=self.teacher,
                    mixers=bench.mixers(self.files.read("initialize")),
                    stream=stream,
                    prepare=bench.prepare,
                    heldout_batches=list(bench.calibration_batches(config.batch_size, "heldout")),
                    config=config,
                    save_every=self.config.save_every,
                    keep_last=self.config.keep_last,
                    autocast_dtype=self.ctx.autocast_dtype,
                    log=log,
                    should_stop=stop,
                )
            except Stopped as stopped:
                self._end_early("align", stopped.step, stop)
            self._write("align", result.weights)
            clock.add_tokens(result.tokens)
            clock.stop()
            perplexity = bench.perplexity(self.teacher, result.weights, "aligned")
            self.report.replace("alignment_error", {str(k): v for k, v in result.error.items()})
            self.report.replace("alignment_curve", result.curve)
            self.report.update({"perplexity": {"aligned": perplexity}, "tokens": {"alignment": result.tokens}})
            self._describe(result.weights, "after")
        if stop():
            self._end_early("align", result.steps, stop)

    def _end_early(self, stage: str, step: int, stop: StopRequest) -> NoReturn:
        """Leave as the signal would have, but with everything saved."""
        name = stop.signal.name if stop.signal else "a signal to another process"
        self.bench.log(f"{stage}: stopped by {name} after step {step}; resume_from_checkpoint=true goes on from there")
        raise SystemExit(128 + (stop.signal or signal.SIGTERM))

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
        student = self._build_student(weights)
        del weights
        aligned = self.files.mixers == "align"
        before = ("calibration", "alignment") if aligned else ("calibration",)
        spent = sum(self.report["tokens"].get(key) or 0 for key in before)

        def evaluate(step: int) -> dict[str, float]:
            self.report.save()
            return {"perplexity": bench.perplexity(student, label=f"step {step}")}

        stream = bench.stream(bench.data["training"], config.batch_size, seed=bench.seed + 1)
        with stop_on_signals() as stop, self.report.stage("distill", resumed=resume) as clock:
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
                should_stop=stop,
                progress=self.ctx.is_first,
            )
            if not result.finished:
                self._end_early("distill", result.steps, stop)
            self._write("distill", gather_full_state_dict(student, ctx=self.ctx))
            clock.add_tokens(result.tokens)
            clock.stop()
            curve = [row for row in result.curve if "perplexity" in row]
            distilled = curve[-1]["perplexity"]
            if self.config.precision.student == "float8":  # the export multiplies in its own precision
                self.report.update({"float8": {"perplexity": distilled}})
                with without_float8(student):
                    distilled = bench.perplexity(student, label="without float8")
            start = self.report["perplexity"].get("aligned" if aligned else "analytic")
            rows = [{"tokens": spent + int(row["tokens"]), "perplexity": row["perplexity"]} for row in curve]
            self.report.replace("recovery_curve", [{"tokens": spent, "perplexity": start}, *rows])
            self.report.update({"perplexity": {"distilled": distilled}, "tokens": {"distillation": result.tokens}})
        if stop():
            self._end_early("distill", result.steps, stop)
        state.remove()  # weights and optimizer again, and the stage is not run a second time

    def _build_student(self, weights: dict[str, Tensor]) -> HybridDecoder:
        """The hybrid with these weights (read by the first process), ready to train."""
        bench = self.bench
        student = bench.student_on_meta(self.config.master_dtype)
        if self.config.precision.student == "float8":
            layers = apply_float8(student, device=self.ctx.device, sharded=self.ctx.world_size > 1)
            bench.log(layers.summary())
            self.report.replace("float8", {"student": len(layers.converted), "student_left_out": layers.kept})
        else:
            self.report.data.pop("float8", None)
        return bench.spread(
            student, weights, activation_checkpointing=self.config.checkpointing, compile=self.config.compile
        )

    def export(self) -> None:
        """A Hugging Face folder, reloaded by transformers and compared with the student."""
        if not self.ctx.is_first:
            self.ctx.barrier()
            return
        bench = self.bench
        folder = self.out / "export"
        source = "distill" if self.files.current("distill") else self.files.mixers
        made_of = fingerprint(self.files.prints[source], dataclasses.asdict(self.config.export))
        earlier = self.report["export"].get("fingerprint")
        if earlier == made_of and self.report.finished("export") and (folder / "README.md").is_file():
            bench.log(f"export: {folder} is up to date, not run again")
            self.ctx.barrier()
            return
        if source == "distill":
            weights = self.files.read("distill")
        else:
            mixers = self.files.read(source)
            weights = student_state_dict(bench.teacher_checkpointer.load_checkpoint()[training.MODEL_KEY], mixers)
            del mixers
        # The check holds the student and transformers' model in float32.
        self._teacher = None
        free(self.ctx.device)
        with self.report.stage("export"):
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
            notes = {"path": str(folder), "format": self.config.export.format, "fingerprint": made_of, **checked}
            self.report.update({"export": notes})
        self.ctx.barrier()

    def _model_card(self, exported: ExportInfo) -> None:
        folder = Path(self.bench.teacher_checkpointer.checkpoint_dir)
        write_model_card(
            self.report.data,
            self.out / "export",
            name=self.out.name,
            teacher=self.config.export.base_model or folder.name,
            base_model=self.config.export.base_model,
            license=teacher_license(folder),
            serving_notes=serving_notes(exported),
        )

    def _describe(self, weights: dict[str, Tensor], when: str) -> None:
        """Half-lives and gates on held-out text, for the report."""
        found = diagnose(
            self.teacher,
            self.bench.mixers(weights),
            self.bench.calibration_batches(self.config.measure.batch_size, "heldout"),
            autocast_dtype=self.ctx.autocast_dtype,
        )
        for layer, notes in found.items():
            self.report.update(
                {
                    "half_life": {str(layer): {when: notes["half_life"]}},
                    "gates": {str(layer): {f"write_{when}": notes["beta"], f"output_{when}": notes["gate"]}},
                },
                save=False,
            )
        self.report.save()


@torchtune_config.parse
def recipe_main(cfg: DictConfig) -> None:
    """Entry point of ``tune run``."""
    with one_line_errors():
        recipe = TaylorCalibrateKD(cfg)
    recipe.run()


if __name__ == "__main__":
    sys.exit(recipe_main())
