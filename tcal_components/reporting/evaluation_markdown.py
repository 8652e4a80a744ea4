"""Tables of the sections ``evaluation``, ``generation`` and ``continuations`` of a report: models side by side."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tcal_components.reporting._format import milliseconds_a_step, short_number, table


def _models_of(evaluation: Mapping[str, Any], section: str) -> list[str]:
    """Names of the models in ``section``, in the order in which they were evaluated."""
    present = evaluation.get(section) or {}
    order = list(evaluation.get("models") or {})
    return [name for name in order if name in present] + [name for name in present if name not in order]


def _perplexity(evaluation: Mapping[str, Any]) -> str:
    names = _models_of(evaluation, "perplexity")
    if not names:
        return ""
    results = evaluation["perplexity"]
    base = results[names[0]]["perplexity"]
    rows = [
        (
            name,
            results[name]["perplexity"],
            f"{results[name]['perplexity'] / base:.3f}x",
            f"{results[name]['tokens']:,}",
        )
        for name in names
        if results[name]["perplexity"] is not None
    ]
    text = table(("model", "perplexity", f"ratio to {names[0]}", "tokens"), rows)
    buckets = [bucket for bucket in results[names[0]].get("by_position") or [] if bucket["tokens"]]
    if buckets:
        spans = [f"{bucket['from']}-{bucket['to'] - 1}" for bucket in buckets]
        by_position = [
            (name, *(b["perplexity"] for b in results[name].get("by_position") or [] if b["tokens"])) for name in names
        ]
        text += "\n\nBy position in the document:\n\n" + table(("model", *spans), by_position)
    return text


def _by_context(evaluation: Mapping[str, Any]) -> str:
    names = _models_of(evaluation, "perplexity_by_context")
    if not names:
        return ""
    results = evaluation["perplexity_by_context"]
    lengths = sorted({int(length) for name in names for length in results[name]})
    rows = [(name, *(results[name].get(str(length)) for length in lengths)) for name in names]
    note = "The same tokens are scored in every column; only the text before them grows.\n\n"
    return note + table(("model", *(f"{length} tokens" for length in lengths)), rows)


def _retrieval(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    distances = sorted({row["distance"] for row in rows})
    groups: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["model"]), {})[row["distance"]] = row
    body = []
    for (task, model), cells in groups.items():
        chance = next(iter(cells.values()))["chance"]
        accuracy = [f"{100 * cells[d]['accuracy']:.1f} %" if d in cells else None for d in distances]
        body.append((task, model, *accuracy, f"{100 * chance:.2g} %"))
    means: dict[str, list[float]] = {}
    for row in rows:
        means.setdefault(row["model"], []).append(row["accuracy"])
    note = (
        "Mean recall: "
        + ", ".join(f"{model} {100 * sum(values) / len(values):.1f} %" for model, values in means.items())
        + ". In the table, the share of answer tokens that the model predicts, by distance in tokens between question and "
        "answer.\n\n"
    )
    return note + table(("task", "model", *(str(distance) for distance in distances), "chance"), body)


def _agreement(evaluation: Mapping[str, Any]) -> str:
    results = evaluation.get("agreement") or {}
    if not results:
        return ""
    rows = []
    for name, row in results.items():
        worst_layer, worst = max(row["layers"].items(), key=lambda item: item[1] or 0)
        rows.append((name, f"{100 * row['top1']:.1f} %", row["kl"], f"{short_number(worst)} (layer {worst_layer})"))
    return table(("student", "same top token as teacher", "KL (nats a token)", "largest hidden-state error"), rows)


def _bytes(value: float | None) -> str | None:
    if value is None:
        return None
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= limit:
            return f"{value / limit:.4g} {unit}"
    return f"{value:.0f} B"


def _speed(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    on_gpu = any(row.get("peak_memory_gib") is not None for row in rows)
    graphs = any(row.get("graph_tokens_per_second") for row in rows)
    body = []
    for row in sorted(rows, key=lambda row: row["context"]):
        cells = [
            row["context"],
            row["model"],
            row["prefill_tokens_per_second"],
            row["decode_tokens_per_second"],
            _bytes(row["cache_bytes"]),
            _bytes(row["cache_bytes_theory"]),
            milliseconds_a_step(row, "decode_tokens_per_second"),
        ]
        if graphs:
            cells.append(milliseconds_a_step(row, "graph_tokens_per_second"))
        if on_gpu:
            cells.append(row.get("peak_memory_gib"))
        body.append(tuple(cells))
    batch = rows[0].get("batch_size", 1)
    header = (
        "context",
        "model",
        "prefill (tokens/s)",
        "decode (tokens/s)",
        "cache, measured",
        "cache, theory",
        "decode (ms a step)",
        *(("as a CUDA graph (ms a step)",) if graphs else ()),
        *(("peak memory (GiB)",) if on_gpu else ()),
    )
    return f"Batch {batch}, {rows[0].get('dtype', '')}.\n\n" + table(header, body)


def _lm_eval(evaluation: Mapping[str, Any]) -> str:
    results = evaluation.get("lm_eval") or {}
    names = _models_of(evaluation, "lm_eval")
    metrics = list(dict.fromkeys((t, m) for name in names for t, values in results[name].items() for m in values))
    rows = [(task, metric, *(results[name].get(task, {}).get(metric) for name in names)) for task, metric in metrics]
    return table(("task", "metric", *names), rows) if rows else ""


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.1f} %"


def _continuations(section: Mapping[str, Any]) -> str:
    rows = [
        (
            name,
            row["agreement_tokens"],
            _percent(row["equal_tokens"]),
            _percent(row["win_or_tie"]),
            row["teacher_nll"]["greedy"],
            row["teacher_nll"]["sampled"],
            _percent(row["repetition"]["greedy"]),
            _percent(row["repetition"]["sampled"]),
        )
        for name, row in section["models"].items()
    ]
    header = (
        "model",
        "first tokens as the teacher's",
        "equal tokens",
        "win or tie",
        "teacher's nats a token, greedy",
        "sampled",
        "repeated 4-grams, greedy",
        "sampled",
    )
    note = (
        f"{section['new_tokens']} tokens after each of {section['prompts']} held-out prompts, greedy and sampled at "
        f"temperature {section['temperature']:g}. Win or tie: prompts after which the teacher finds the greedy text at "
        "least as likely as its own.\n\n"
    )
    return note + table(header, rows)


def _answers(generation: Mapping[str, Mapping[str, float]]) -> str:
    tasks = {task: row for task, row in generation.items() if task != "continuation"}
    if not tasks:
        return ""
    models = [name for name in next(iter(tasks.values())) if name != "win_or_tie"]
    rows = [
        (task, *(_percent(row.get(name)) for name in models), _percent(row.get("win_or_tie")))
        for task, row in tasks.items()
    ]
    note = "Share of right answers, which the model writes itself; win or tie is the first student's, by example.\n\n"
    return note + table(("task", *models, "win or tie"), rows)


def evaluation_sections(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(title, body)`` of every table that ``evaluation`` has numbers for; an empty body where it has none."""
    return [
        ("Perplexity side by side", _perplexity(evaluation)),
        ("Perplexity by context length", _by_context(evaluation)),
        ("Recall: retrieval by distance", _retrieval(evaluation.get("retrieval") or [])),
        ("Agreement with the teacher", _agreement(evaluation)),
        ("Speed and cache", _speed(evaluation.get("speed") or [])),
        ("lm-eval", _lm_eval(evaluation)),
    ]


_SHOWN = 400  # characters of a prompt, from its end


def _samples(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table a prompt, the models' texts side by side."""
    parts = []
    for row in rows:
        prompt = row["prompt"] if len(row["prompt"]) <= _SHOWN else "… " + row["prompt"][-_SHOWN:]
        models = list(row["texts"])
        lines = ["| " + " | ".join(models) + " |", "|---" * len(models) + "|"]
        lines.append("| " + " | ".join(_as_it_stands(row["texts"][name]) for name in models) + " |")
        parts.append(f"After “{_as_it_stands(prompt)}”:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _as_it_stands(text: str) -> str:
    """A model's text in one line of Markdown, none of which is taken for markup; ⏎ where it breaks a line."""
    text = re.sub(r"([\\`*_\[\]<>|#~$&])", r"\\\1", text.strip())
    return re.sub(r"\s*\n\s*", " ⏎ ", text) or " "


def generation_sections(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """``(title, body)`` of texts and tables; an empty body where there is nothing."""
    section = report.get("continuations")
    return [
        ("Samples of text, each the most likely one", _samples(report.get("samples") or [])),
        ("Continuations of held-out text", _continuations(section) if section else ""),
        ("Generated answers", _answers(report.get("generation") or {})),
    ]
