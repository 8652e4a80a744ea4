"""What a run says on the console: one line a stage, and at the end what came out and what to do with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcal_components.assets import asset_path
from tcal_components.reporting._format import short_tokens

# By stage, the perplexity that it ends with and the tokens that it read.
_PERPLEXITY = {"initialize": "analytic", "align": "aligned", "distill": "distilled"}
_TOKENS = {"measure": "calibration", "align": "alignment", "distill": "distillation"}


def perplexity_words(report: Mapping[str, Any], key: str) -> str:
    """A perplexity beside the teacher's, such as ``perplexity 36.62, 1.03 x the teacher's``; empty where there is none."""
    value, teacher = report["perplexity"].get(key), report["teacher"].get("perplexity")
    if value is None:
        return ""
    return f"perplexity {value:.2f}" + (f", {value / teacher:.3g} x the teacher's" if teacher else "")


def stage_line(report: Mapping[str, Any], stage: str) -> str:
    """One line about a stage that has ended: seconds, tokens, perplexity.

    Args:
        report: what ``report.json`` holds.
        stage: its name.

    Returns:
        str: the line.
    """
    parts = [f"{report['seconds'].get(stage) or 0:.1f} s"]
    tokens = report["tokens"].get(_TOKENS.get(stage, ""))
    if tokens:
        parts.append(f"{short_tokens(tokens)} tokens")
    if words := perplexity_words(report, _PERPLEXITY.get(stage, "")):
        parts.append(words)
    if stage == "export" and report["export"].get("max_abs_logit_diff") is not None:
        export = report["export"]
        parts.append(
            f"logits differ from the student's by {export['max_abs_logit_diff']:.2g} of {export['reference_logit_max']:.3g}"
        )
    return f"{stage + ':':<12}" + "   ".join(parts)


def _evaluation(report: Mapping[str, Any], folder: Path, teacher: Path | None) -> str:
    """The command that measures recall, speed and text of this run's student."""
    words = [f"tune run recipes/evaluate_hybrid --config configs/evaluate.yaml run_dir={folder}"]
    if teacher is not None and asset_path("") not in teacher.resolve().parents:
        words.append(f"teacher_dir={teacher}")
        if source := (report.get("data") or {}).get("evaluation", {}).get("source"):
            words.append(f"validation_dataset.source={source}")
    if report["perplexity"].get("aligned") is None:
        words.append("students.aligned=null")
    if not str(report["device"] or "cpu").startswith("cpu"):
        words.append("device=cuda dtype=bf16")
    return " ".join(words)


def closing_lines(report: Mapping[str, Any], folder: Path, teacher: Path | None = None) -> list[str]:
    """What came out of a run, and what to do with it.

    Args:
        report: what ``report.json`` holds.
        folder: the run's ``output_dir``.
        teacher: the teacher's folder; None: the embedded one.

    Returns:
        list: lines.
    """
    lines = []
    if value := report["teacher"].get("perplexity"):
        lines.append(f"{'teacher:':<13}perplexity {value:.2f}")
    for key, name in (
        ("naive", "plain copy"),
        ("analytic", "started"),
        ("aligned", "aligned"),
        ("distilled", "distilled"),
    ):
        if words := perplexity_words(report, key):
            lines.append(f"{name + ':':<13}{words}")
    lines.append(f"{'report:':<13}{folder / 'report.md'}")
    if (folder / "export" / "config.json").is_file():
        lines.append(f'{"load it:":<13}AutoModelForCausalLM.from_pretrained("{folder / "export"}")')
        lines.append(f"{'evaluate it:':<13}{_evaluation(report, folder, teacher)}")
    return lines
