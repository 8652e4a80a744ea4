"""What the report and the model card say of a run besides the numbers of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tcal_components.config.pipeline import PipelineConfig
from tcal_components.distill.config import DistillResult
from tcal_components.evaluation.cache_size import recurrent_state_bytes
from tcal_components.export.config_json import ExportInfo, dropped_features
from tcal_components.export.notes import serving_notes
from tcal_components.measure.held_out import diagnose
from tcal_components.models.memory import count_parameters
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.pipeline.models import Models
from tcal_components.pipeline.stages import Stages
from tcal_components.precision.float8 import without_float8
from tcal_components.reporting import teacher_license, write_model_card
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


def start_perplexity(stages: Stages) -> float | None:
    """That of the student which the distillation starts from."""
    value: float | None = stages.report["perplexity"]["aligned" if stages.mixers == "align" else "analytic"]
    return value


def recovery(
    models: Models, student: HybridDecoder, result: DistillResult, float8: Mapping[str, Any]
) -> dict[str, Any]:
    """What a distillation came to: perplexity of the student as it will be exported, and the way there.

    Args:
        models: of the run.
        student: with the weights that the distillation ends with.
        result: of the distillation, with a ``perplexity`` at its end.
        float8: what of the student computes in float8; nothing of one that does not.

    Returns:
        Sections of the report, among them ``recovery_curve`` (perplexity by tokens that all stages spent).
    """
    bench, stages, sections = models.bench, models.stages, dict[str, Any]()
    curve = [row for row in result.curve if "perplexity" in row]
    distilled = curve[-1]["perplexity"]
    if result.best_step is not None:
        sections["distill"] = {"best_step": result.best_step, "heldout_loss": result.heldout_loss}
        if result.best_step != result.steps:
            bench.log(
                f"distill: the held-out text is best predicted after step {result.best_step} of {result.steps}, "
                "so the student is that one"
            )
            distilled = bench.perplexity(student, label=f"of step {result.best_step}")
    if float8:  # the export multiplies in its own precision
        sections["float8"] = {**float8, "perplexity": distilled}
        with without_float8(student):
            distilled = bench.perplexity(student, label="without float8")
    before = ("calibration", "alignment") if stages.mixers == "align" else ("calibration",)
    spent = sum(stages.report["tokens"].get(key) or 0 for key in before)
    rows = [{"tokens": spent + int(row["tokens"]), "perplexity": row["perplexity"]} for row in curve]
    return {
        **sections,
        "recovery_curve": [{"tokens": spent, "perplexity": start_perplexity(stages)}, *rows],
        "perplexity": {"distilled": distilled},
        "tokens": {"distillation": result.tokens},
    }


def measure_again(stage: str, models: Models) -> None:
    """Measures a finished stage on another evaluation text than it was measured on, from its output.

    Of the recovery curve only the ends are left: the student in between is gone.

    Args:
        stage: its name.
        models: of the run.
    """
    bench, stages, found = models.bench, models.stages, dict[str, Any]()
    if stage == "initialize":
        naive = bench.perplexity(models.teacher, models.naive(), "naive")
        analytic = bench.perplexity(models.teacher, stages.read("initialize"), "initialized")
        found = {"perplexity": {"naive": naive, "analytic": analytic}}
    if stage == "align":
        found = {"perplexity": {"aligned": bench.perplexity(models.teacher, stages.read("align"), "aligned")}}
    if stage == "distill":
        student, float8 = models.student(models.student_weights("distill"))
        with without_float8(student):  # as after the distillation
            distilled = bench.perplexity(student, label="distilled")
        first, *_, last = stages.report["recovery_curve"]
        best, config = stages.report.data.get("distill", {}).get("best_step"), models.config.distill
        if best is not None and config is not None:
            last["tokens"] = first["tokens"] + best * config.batch_size * config.seq_len
        curve = [{**first, "perplexity": start_perplexity(stages)}, {**last, "perplexity": distilled}]
        found = {"perplexity": {"distilled": distilled}, "recovery_curve": curve}
        if float8:
            found["float8"] = {"perplexity": None}
    stages.report.amend(stage, found, text=stages.text)


def card_of_export(report: Mapping[str, Any], exported: ExportInfo, bench: Workbench, config: PipelineConfig) -> None:
    """Writes the model card of the exported folder, the last file of a run.

    Args:
        report: what ``report.json`` holds.
        exported: what was exported.
        bench: of the run.
        config: its sections.
    """
    folder = Path(bench.teacher_checkpointer.checkpoint_dir)
    write_model_card(
        report,
        bench.output_dir / "export",
        name=bench.output_dir.name,
        teacher=config.export.base_model or folder.name,
        base_model=config.export.base_model,
        license=teacher_license(folder),
        serving_notes=serving_notes(exported, report.get("serving")),
    )
