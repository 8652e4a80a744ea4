"""``README.md`` of an exported folder: what the model is, how it was made, what it scores, how to load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tcal_components.checkpoint.files import replacing
from tcal_components.reporting._format import table
from tcal_components.reporting.markdown import perplexity_table

_LOAD = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{folder}"  # this folder, or the model's name once it is on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto"{trust})
inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0], skip_special_tokens=True))
```"""


def _yaml(value: Any) -> str:
    """A scalar as YAML: JSON strings are valid YAML and need no guessing about quotes."""
    return json.dumps(value, ensure_ascii=False)


def _metadata(
    report: Mapping[str, Any], *, name: str, base_model: str | None, license: str | None, language: str
) -> str:
    lines = ["---", f"license: {_yaml((license or 'other').lower())}"]
    if not license:
        lines.append('license_name: "as the teacher"')
    if base_model:  # the hub refuses a card whose base model is a folder
        lines.append(f"base_model: {_yaml(base_model)}")
    lines += [
        f"language: {_yaml(language)}",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [gated-deltanet, hybrid, linear-attention, distillation, taylor-calibrate]",
    ]
    stages = ("distilled", "aligned", "analytic", "naive")
    value = next((report["perplexity"][stage] for stage in stages if report["perplexity"].get(stage)), None)
    if value:
        lines += [
            "model-index:",
            f"- name: {_yaml(name)}",
            "  results:",
            "  - task: {type: text-generation}",
            '    dataset: {name: "held-out text of the run", type: text}',
            "    metrics:",
            f"    - {{type: perplexity, value: {value:.6g}}}",
        ]
    return "\n".join([*lines, "---"])


def _without_folders(source: str) -> str:
    """The last part of a path on this machine; names of assets and of data sets stay whole."""
    path = Path(source).expanduser()
    here = source[:1] in "~./\\" or path.is_absolute() or path.exists()
    return path.resolve().name if here else source


def _data(report: Mapping[str, Any]) -> str:
    data = report.get("data") or {}
    rows = [(key, f"{count:,}") for key, count in report["tokens"].items() if count]
    text = table(("tokens spent", "count"), rows) if rows else ""
    sources = [
        f"- {part}: {_without_folders(row['source'])}"
        + (f" ({row['documents']:,} documents)" if row.get("documents") else "")
        for part, row in data.items()
        if isinstance(row, Mapping) and row.get("source")
    ]
    return "\n\n".join(part for part in (text, "\n".join(sources)) if part)


def render_model_card(
    report: Mapping[str, Any],
    *,
    name: str,
    teacher: str,
    folder: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    language: str = "en",
    serving_notes: Sequence[str] = (),
    limits: Sequence[str] = (),
) -> str:
    """Text of the model card.

    Args:
        report: The content of ``report.json``.
        name: Name of the exported model.
        teacher: Name of the teacher, for people.
        folder: Name of the folder that the card lies in, by which it is loaded; ``None``: ``name``.
        base_model: Its name on the Hugging Face hub, for the metadata; ``None`` leaves it out.
        license: Licence of the teacher, which the student inherits; ``None`` when the folder does not say.
        language: Language of the text it was trained on.
        serving_notes: Where the folder runs, one line each.
        limits: Known limits, one line each.
    """
    student, export = report["student"], report["export"]
    retained, converted = student.get("retained_layers") or [], student.get("converted_layers") or []
    facts = [
        ("teacher", f"`{teacher}`"),
        ("licence", (license or "not stated in the teacher's folder") + " (the teacher's)"),
        ("layers that keep attention", ", ".join(map(str, retained)) or "none"),
        ("Gated DeltaNet layers", len(converted)),
        ("parameters", f"{student['parameters']:,}" if student.get("parameters") else None),
        ("format", export.get("format")),
    ]
    if export.get("max_abs_logit_diff") is not None:
        check = f"{export['max_abs_logit_diff']:.2e}"
        if export.get("reference_logit_max") is not None:
            check += f" at logits up to {export['reference_logit_max']:.3g}"
        facts.append(("largest logit difference to the trained student", check))
    dropped = report.get("dropped") or []
    dropped = [f"{k}: {v}" for k, v in dropped.items()] if isinstance(dropped, Mapping) else dropped
    steps = (("alignment", "aligned layer by layer"), ("distillation", "distilled end to end"))
    trained = [phrase for key, phrase in steps if report["tokens"].get(key)]
    made = " and ".join(trained) or "set from what was measured of the teacher, without training"
    sections = [
        ("Results", perplexity_table(report)),
        (
            "How to load it",
            _LOAD.format(folder=folder or name, trust=", trust_remote_code=True" if _is_custom(export) else ""),
        ),
        ("Where it runs", "\n".join(f"- {note}" for note in serving_notes)),
        ("Training text", _data(report)),
        ("What it drops of the teacher's attention", "\n".join(f"- {item}" for item in dropped)),
        ("Limits", "\n".join(f"- {item}" for item in limits)),
    ]
    intro = (
        f"A hybrid of softmax attention and Gated DeltaNet layers, made from `{teacher}`: "
        f"{len(converted)} of {len(converted) + len(retained)} attention layers were replaced and then {made}."
    )
    parts = [
        _metadata(report, name=name, base_model=base_model, license=license, language=language),
        f"# {name}",
        intro,
        table(("fact", "value"), facts),
        *(f"## {title}\n\n{body}" for title, body in sections if body),
    ]
    return "\n\n".join(parts) + "\n"


def teacher_license(folder: str | Path) -> str | None:
    """The licence in the metadata of a checkpoint's model card, as downloads from the hub have it.

    Args:
        folder: The teacher's checkpoint.

    Returns:
        str | None: Such as ``apache-2.0``; ``None`` without a card or without the entry.
    """
    card = Path(folder) / "README.md"
    if not card.is_file():
        return None
    _, *parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    found = re.search(r"^license:\s*[\"']?([\w.+-]+)", parts[0], re.MULTILINE) if len(parts) == 2 else None
    return found.group(1) if found else None


def _is_custom(export: Mapping[str, Any]) -> bool:
    return export.get("format") == "hf_custom"


def write_model_card(report: Mapping[str, Any], folder: str | Path, **options: Any) -> Path:
    """Writes :func:`render_model_card` as ``README.md`` into ``folder``, replacing a copy of the teacher's card."""
    folder = Path(folder)
    options = {"name": folder.resolve().name, "folder": folder.resolve().name, **options}
    path = folder / "README.md"
    with replacing(path) as temporary:
        temporary.write_text(render_model_card(report, **options), encoding="utf-8")
    return path
