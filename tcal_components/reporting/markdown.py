"""``report.md``: the report for people. Short tables, ratios to the teacher, plots by relative path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcal_components.checkpoint.files import replacing
from tcal_components.reporting._format import short_number, short_tokens, table
from tcal_components.reporting.evaluation_markdown import evaluation_sections, generation_sections

_STAGE_ROWS = (
    ("naive", "plain copy (library defaults for the rest)"),
    ("analytic", "after the start (set from measurements, no training)"),
    ("aligned", "after alignment"),
    ("distilled", "after distillation"),
)
# Tokens spent up to the point where a perplexity of the table was measured.
_TOKENS_UP_TO = {
    "naive": (),
    "analytic": ("calibration",),
    "aligned": ("calibration", "alignment"),
    "distilled": ("calibration", "alignment", "distillation"),
}


_RECALL = (
    "Not measured by this recipe, and perplexity says little about it: `tune run recipes/evaluate_hybrid --config "
    "configs/evaluate.yaml` asks for what stands far back in the text."
)


def _ratio(value: float | None, base: float | None) -> str | None:
    return f"{short_number(value / base, 4)}x" if value and base else None


def _summary(report: Mapping[str, Any]) -> str:
    """One sentence with the numbers a reader came for."""
    perplexity, teacher = report["perplexity"], report["teacher"].get("perplexity")
    best = next((name for name in ("distilled", "aligned", "analytic") if perplexity.get(name)), None)
    if best is None:
        return ""
    value = perplexity[best]
    where = dict(_STAGE_ROWS)[best]
    text = f"The student has perplexity **{short_number(value, 4)}** {where}"
    if teacher:
        text += f", **{_ratio(value, teacher)}** the teacher's {short_number(teacher, 4)}"
    if perplexity.get("naive"):
        text += f", **{_ratio(perplexity['naive'], value)}** better than the plain copy"
    return text + "."


def perplexity_table(report: Mapping[str, Any]) -> str:
    """Perplexity of the teacher and of each stage that ran, with the tokens spent until then."""
    teacher, values = report["teacher"].get("perplexity"), report["perplexity"]
    rows: list[Sequence[Any]] = []
    if teacher:
        rows.append(("teacher", teacher, "1x", None, None))
    for name, label in _STAGE_ROWS:
        if values.get(name):
            better = None if name == "naive" else _ratio(values.get("naive"), values[name])
            spent = sum(report["tokens"].get(key) or 0 for key in _TOKENS_UP_TO[name])
            rows.append((label, values[name], _ratio(values[name], teacher), better, short_tokens(spent)))
    header = ("model", "perplexity", "ratio to teacher", "better than the plain copy", "tokens spent")
    return table(header, rows) if rows else ""


def _models(report: Mapping[str, Any]) -> str:
    teacher, student = report["teacher"], report["student"]
    rows: list[Sequence[Any]] = []
    if teacher.get("parameters"):
        rows.append(("teacher", teacher.get("family"), f"{teacher['parameters']:,}", None, None))
    if student.get("parameters"):
        retained, converted = student.get("retained_layers") or [], student.get("converted_layers") or []
        kept = ", ".join(map(str, retained)) or "none"
        rows.append(("student", teacher.get("family"), f"{student['parameters']:,}", kept, len(converted)))
    header = ("model", "family", "parameters", "layers that keep attention", "converted layers")
    return table(header, rows) if rows else ""


def _stages(report: Mapping[str, Any]) -> str:
    tokens_of = {"measure": "calibration", "align": "alignment", "distill": "distillation"}
    rows = []
    for stage, seconds in report["seconds"].items():
        if seconds is None:
            continue
        tokens = report["tokens"].get(tokens_of.get(stage, ""))
        rate = report["tokens_per_second"].get(stage)
        memory = report["peak_memory_gib"].get(stage)
        rows.append((stage, float(seconds), memory, short_tokens(tokens) if tokens else None, rate))
    header = ("stage", "seconds", "peak memory (GiB)", "tokens", "tokens per second")
    return table(header, rows) if rows else ""


def _alignment(report: Mapping[str, Any]) -> str:
    rows = sorted(report["alignment_error"].items(), key=lambda item: int(item[0]))
    if not rows:
        return ""
    text = table(("layer", "first", "last"), [(layer, row.get("first"), row.get("last")) for layer, row in rows])
    last = [(row["last"], layer) for layer, row in rows if row.get("last") is not None]
    if last:
        worst = max(last)
        mean = sum(value for value, _ in last) / len(last)
        text = f"Mean {short_number(mean)}, worst {short_number(worst[0])} (layer {worst[1]}).\n\n{text}"
    return text


def _export(report: Mapping[str, Any]) -> str:
    export = report["export"]
    if not export.get("path"):
        return ""
    difference, reference = export.get("max_abs_logit_diff"), export.get("reference_logit_max")
    check = f"{difference:.2e}" if difference is not None else None
    largest = short_number(reference) if reference is not None else None
    return table(
        ("folder", "format", "largest logit difference", "largest logit"),
        [(f"`{export['path']}`", export.get("format"), check, largest)],
    )


def _data(report: Mapping[str, Any]) -> str:
    rows = []
    for name, row in (report.get("data") or {}).items():
        if isinstance(row, Mapping):
            tokens = row.get("tokens")
            digest = row.get("sha256")
            digest = f"`{digest[:12]}`" if isinstance(digest, str) else None
            count = f"{tokens:,}" if isinstance(tokens, int) else tokens
            rows.append((name, row.get("source"), row.get("documents"), count, digest))
    return table(("part", "source", "documents", "tokens", "sha256"), rows) if rows else ""


def _dropped(report: Mapping[str, Any]) -> str:
    dropped = report.get("dropped") or []
    items = [f"{key}: {value}" for key, value in dropped.items()] if isinstance(dropped, Mapping) else dropped
    return "\n".join(f"- {item}" for item in items)


def _environment(report: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version)
    processes = report["world_size"]
    return (
        f"{report['device']}, {processes} process{'es' if processes != 1 else ''}; {versions}; "
        f"config sha256 `{(report['config_sha256'] or '')[:12]}`."
    )


def render_markdown(report: Mapping[str, Any], *, plots: Sequence[tuple[str, str]] = ()) -> str:
    """Markdown text of a report.

    Args:
        report: The content of ``report.json``.
        plots: ``(relative path, caption)`` of each plot to show.
    """
    staged = any(report["perplexity"].values()) or not report.get("evaluation")
    sections = [
        ("Perplexity (held-out text)", perplexity_table(report) if staged else ""),
        *evaluation_sections(report.get("evaluation") or {}),
        *generation_sections(report),
        ("Recall", _RECALL if report["recipe"] == "taylor_calibrate_kd" and not report.get("evaluation") else ""),
        ("Models", _models(report)),
        ("Stages", _stages(report)),
        ("Export", _export(report)),
        ("What the student drops of the teacher's attention", _dropped(report)),
        ("Data", _data(report)),
        ("Plots", "\n\n".join(f"**{caption}**\n\n![{caption}]({path})" for path, caption in plots)),
        ("Error of every converted layer (relative, held out)", _alignment(report)),
        ("Where it ran", _environment(report)),
    ]
    parts = [f"# Report of {report['recipe']}", _summary(report)]
    parts += [f"## {title}\n\n{body}" for title, body in sections if body]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_markdown(
    report: Mapping[str, Any], path: str | Path, *, plots: Sequence[tuple[str, str]] = (), opening: str = ""
) -> Path:
    """Writes :func:`render_markdown` to ``path``, whole or not at all, with ``opening`` behind its title; returns the path."""
    title, rest = render_markdown(report, plots=plots).split("\n", 1)
    with replacing(path) as temporary:
        temporary.write_text(
            "\n".join([title, *(["", opening.rstrip("\n")] if opening else []), rest]), encoding="utf-8"
        )
    return Path(path)
