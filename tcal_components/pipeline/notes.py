"""What the report and the model card say of a run besides the numbers of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcal_components.align.training import AlignResult
from tcal_components.distill.config import DistillResult
from tcal_components.evaluation.cache_size import recurrent_state_bytes
from tcal_components.export.config_json import ExportInfo, dropped_features
from tcal_components.export.notes import serving_notes
from tcal_components.initialize.held_out import diagnose
from tcal_components.models.memory import count_parameters
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.pipeline.config import PipelineConfig
from tcal_components.pipeline.models import Models
from tcal_components.pipeline.stages import Stages
from tcal_components.precision.float8 import without_float8
from tcal_components.reporting import Report, teacher_license, write_model_card
from tcal_components.reporting.console import closing_lines
from tcal_components.setup import Workbench


def describe_models(bench: Workbench, dtype: torch.dtype) -> dict[str, Any]:
    """Sections of the report that are known before anything is computed.

    Args:
        bench: of the run.
        dtype: of the exported weights.

    Returns:
        ``teacher``, ``student``, ``data`` and ``dropped`` (what of the teacher the student does not have).
    """
    total, mixers = count_parameters(bench.spec, retained_layers=bench.retained, gdn=bench.gdn)
    state_bytes = recurrent_state_bytes(bench.spec.num_heads, bench.gdn, layers=len(bench.converted), dtype=dtype)
    return {
        "teacher": {"family": bench.spec.family, "parameters": count_parameters(bench.spec)[0]},
        "student": {
            "retained_layers": list(bench.retained),
            "converted_layers": list(bench.converted),
            "parameters": total,
            "mixer_parameters": mixers,
            "state_bytes": state_bytes,
        },
        "data": bench.provenance(),
        "dropped": dropped_features(bench.spec),
    }


def describe_mixers(models: Models, weights: Mapping[str, Tensor], when: str) -> dict[str, Any]:
    """Half-lives and gates of mixers on held-out text.

    Args:
        models: of the run.
        weights: ``layers.{i}.attn.{name}``.
        when: ``before`` or ``after`` the alignment.

    Returns:
        Sections ``half_life`` (tokens) and ``gates`` of the report, by layer.
    """
    bench = models.bench
    batches = bench.calibration_batches(models.config.measure.batch_size, "heldout")
    found = diagnose(models.teacher, bench.mixers(weights), batches, autocast_dtype=bench.ctx.autocast_dtype)
    return {
        "half_life": {layer: {when: notes["half_life"]} for layer, notes in found.items()},
        "gates": {
            layer: {f"write_{when}": notes["beta"], f"output_{when}": notes["gate"]} for layer, notes in found.items()
        },
    }


def describe_distillation(models: Models, result: DistillResult, float8: Mapping[str, Any]) -> dict[str, Any]:
    """What a distillation came to on the text that it reads.

    Args:
        models: of the run.
        result: of the distillation.
        float8: what of the student computes in float8; nothing of one that does not.

    Returns:
        Sections of the report.
    """
    found: dict[str, Any] = {"tokens": {"distillation": result.tokens}}
    if float8:
        found["float8"] = dict(float8)
    if result.best_step is not None:
        found["distill"] = {"best_step": result.best_step, "heldout_loss": result.heldout_loss}
        if result.best_step != result.steps:
            models.bench.log(
                f"distill: the held-out text is best predicted after step {result.best_step} of {result.steps}, "
                "so the student is that one"
            )
    return found


def distilled_perplexities(models: Models, student: HybridDecoder, result: DistillResult) -> dict[str, Any]:
    """What the evaluation text says of a student as it will be exported, and of the way there.

    Args:
        models: of the run.
        student: with the weights that the distillation ends with.
        result: of the distillation, with a ``perplexity`` at its end.

    Returns:
        Sections of the report, among them ``recovery_curve`` (perplexity by tokens that all stages spent).
    """
    bench, sections = models.bench, dict[str, Any]()
    curve = [(int(row["tokens"]), row["perplexity"]) for row in result.curve if "perplexity" in row]
    distilled = curve[-1][1]
    if result.best_step not in (None, result.steps):
        distilled = bench.perplexity(student, label=f"of step {result.best_step}")
    if models.config.precision.student == "float8":  # the export multiplies in its own precision
        sections["float8"] = {"perplexity": distilled}
        with without_float8(student):
            distilled = bench.perplexity(student, label="without float8")
    return {**sections, "perplexity": {"distilled": distilled}, "recovery_curve": _recovery_curve(models.stages, curve)}


def perplexities(models: Models, stage: str) -> dict[str, Any]:
    """What the evaluation text says of a stage's output, from its file.

    Of the recovery curve only the ends are known: the student in between is gone.

    Args:
        models: of the run.
        stage: ``initialize``, ``align`` or ``distill``.

    Returns:
        Sections of the report.
    """
    bench, stages, config = models.bench, models.stages, models.config.distill
    if stage == "initialize":
        naive = bench.perplexity(models.teacher, models.naive(), "naive")
        analytic = bench.perplexity(models.teacher, stages.read("initialize"), "initialized")
        return {"perplexity": {"naive": naive, "analytic": analytic}}
    if stage == "align":
        return {"perplexity": {"aligned": bench.perplexity(models.teacher, stages.read("align"), "aligned")}}
    student, _ = models.student(models.student_weights("distill"))
    with without_float8(student):  # as after the distillation
        distilled = bench.perplexity(student, label="distilled")
    tokens, best = stages.report["tokens"]["distillation"], stages.report.data.get("distill", {}).get("best_step")
    if best is not None and config is not None:
        tokens = best * config.batch_size * config.seq_len
    return {"perplexity": {"distilled": distilled}, "recovery_curve": _recovery_curve(stages, [(tokens, distilled)])}


def _recovery_curve(stages: Stages, distilled: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
    """Perplexity by tokens of all stages: at the start of the distillation, and after so many of its tokens."""
    aligned = stages.mixers == "align"
    start = stages.report["perplexity"]["aligned" if aligned else "analytic"]
    spent = sum(stages.report["tokens"].get(key) or 0 for key in ("calibration", *(["alignment"] * aligned)))
    rows = [(0, start), *distilled]
    return [{"tokens": spent + tokens, "perplexity": perplexity} for tokens, perplexity in rows]


def describe_alignment(result: AlignResult) -> dict[str, Any]:
    """Sections of the report: errors by layer, their curve, the curve of the joint part if there was one, tokens."""
    joint = {"joint_curve": result.joint_curve} if result.joint_curve else {}
    errors = {"alignment_error": result.error, "alignment_curve": result.curve}
    return {**errors, **joint, "tokens": {"alignment": result.tokens}}


def end_report(report: Report, exported: ExportInfo | None, bench: Workbench, config: PipelineConfig) -> None:
    """The report of a whole run, what the console says of it, and the model card, the last file.

    Args:
        report: with the numbers of all stages.
        exported: what was exported just now.
        bench: of the run.
        config: its sections.
    """
    if report.finished("export"):
        report.update({"export": {"path": str(bench.output_dir / "export")}})
    report.finish()
    folder = Path(bench.teacher_checkpointer.checkpoint_dir)
    if exported is not None:
        write_model_card(
            report.data,
            bench.output_dir / "export",
            name=bench.output_dir.name,
            teacher=config.export.base_model or folder.name,
            base_model=config.export.base_model,
            license=teacher_license(folder),
            serving_notes=serving_notes(exported, report.data.get("serving")),
        )
    for line in closing_lines(report.data, bench.output_dir, folder):
        bench.log(line)
