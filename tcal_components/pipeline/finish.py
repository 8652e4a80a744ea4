"""What follows the training: text by teacher and student, the exported folder, and what engines compute from it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tcal_components.checkpoint.files import writing
from tcal_components.evaluation.generation import (
    continuation_report,
    continuations,
    score_continuations,
    text_samples,
)
from tcal_components.evaluation.load import free
from tcal_components.export.config_json import ExportInfo
from tcal_components.export.folder import export_hybrid
from tcal_components.export.verify import verify_export
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.pipeline.config import PipelineConfig
from tcal_components.pipeline.models import Models
from tcal_components.serving.llama_cpp_check import check_llama_cpp
from tcal_components.setup import Workbench


def compare_texts(models: Models, student: HybridDecoder | None, config: PipelineConfig) -> tuple[dict[str, Any], int]:
    """Lets teacher and student continue the same prompts, greedily and with the same draws; the teacher judges both.

    Args:
        models: of the run.
        student: distilled in this process; None takes what the last stage left.
        config: its sections; ``generation`` is one of them.

    Returns:
        The sections ``continuations``, ``generation`` and ``samples`` of the report, and the number of tokens written.
    """
    settings, prompts, bench = config.generation, config.prompts, models.bench
    assert settings is not None
    autocast = bench.ctx.autocast_dtype
    options: dict[str, Any] = {"seed": bench.seed, "autocast_dtype": autocast}
    labels = ["generate: teacher", "generate: student"] if bench.ctx.is_first else [None, None]
    theirs = continuations(models.teacher, prompts, settings, progress=labels[0], **options)
    with models.exported(student) as written_by:
        own = continuations(written_by, prompts, settings, progress=labels[1], **options)
    texts = {"teacher": theirs, "student": own}
    scores = {
        name: score_continuations(models.teacher, prompts, theirs, text, autocast_dtype=autocast)
        for name, text in texts.items()
    }
    sections = continuation_report(settings, prompts, scores) | text_samples(bench.tokenizer, prompts, texts)
    return sections, theirs.tokens + own.tokens


def write_folder(weights: Mapping[str, Tensor], bench: Workbench, config: PipelineConfig) -> ExportInfo:
    """Writes ``export`` below the run's folder.

    Args:
        weights: of the student by torchtune name.
        bench: of the run.
        config: its sections.

    Returns:
        ExportInfo: what was written.

    Raises:
        WriteError: in one line.
    """
    folder = bench.output_dir / "export"
    with writing(folder):
        return export_hybrid(
            weights,
            spec=bench.spec,
            gdn=bench.gdn,
            retained_layers=bench.retained,
            teacher_dir=bench.teacher_checkpointer.checkpoint_dir,
            output_dir=folder,
            dtype=config.export_dtype,
            format=config.export.format,
            max_shard_size=config.export.max_shard_size,
        )


def check_folder(weights: dict[str, Tensor], bench: Workbench, config: PipelineConfig) -> dict[str, Any]:
    """Engines have to compute from the folder what the student computes: transformers, and where asked for llama.cpp.

    Args:
        weights: of the student, as they were exported; emptied, since the models need the memory.
        bench: of the run.
        config: its sections.

    Returns:
        The sections ``export`` and ``serving`` of the report.

    Raises:
        ValueError: an engine computes something else.
    """
    folder, export, rows = bench.output_dir / "export", config.export, bench.data["evaluation"]
    student = bench.student_on_meta(torch.float32).to_empty(device=bench.ctx.device)
    student.load_state_dict(weights)
    weights.clear()
    tokens = rows[0]["tokens"][: export.verify_tokens]
    checked = verify_export(folder, student, tokens[None].to(bench.ctx.device), keep_student=False)
    found: dict[str, Any] = {"export": {"format": export.format, **checked}}
    del student
    free(bench.ctx.device)
    if "llama_cpp" in export.check:
        windows = [rows[i]["tokens"][:512] for i in range(min(8, len(rows)))]
        python = export.llama_cpp_python or sys.executable
        where: dict[str, Any] = {"source": export.llama_cpp_source, "python": python}
        found["serving"] = {"llama_cpp": check_llama_cpp(folder, tokens.tolist(), torch.stack(windows), **where)}
    return found
