"""The table of a training benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcal_components.reporting.markdown import table


def benchmark_markdown(data: Mapping[str, Any]) -> str:
    """``benchmark.md`` of a ``benchmark.json``."""
    rows: list[list[Any]] = []
    for name, row in data["variants"].items():
        ok = row["status"] == "ok"
        share = row.get("share_of_peak") if ok else None
        what: list[Any] = [None] * 5
        if "stage" in row:
            tokens = f"{row['batch_size']} x {row['seq_len']}"
            what = [f"{row['student']} / {row['teacher']}", tokens, row["micro_batch_size"] or "all"]
            distill = row["stage"] == "distill"
            what += [f"{row['loss']}, {row['optimizer']}, {row['weights']}" if distill else "alignment, fp32 mixers"]
            what += [("yes" if row["activation_checkpointing"] else "no") if distill else "-"]
        numbers = [row.get("seconds_per_step"), row.get("tokens_per_second"), None if share is None else f"{share:.1%}"]
        rows.append([name, *what, *numbers, row.get("expected_gib"), row.get("peak_memory_gib"), row["status"]])
    header = (
        *("variant", "student / teacher", "tokens a step", "micro batch", "loss, optimizer, weights", "checkpointing"),
        *("s a step", "tokens/s", "of bf16 peak", "expected GiB", "peak GiB", "status"),
    )
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    teacher, student = data["teacher"], data["student"]
    setting = (
        f"{data['world_size']} x {data['device']}; {versions}. Teacher {teacher['family']}, {teacher['num_layers']} layers, "
        f"{teacher['parameters'] / 1e9:.2f} B parameters; student {student['parameters'] / 1e9:.2f} B, "
        f"{len(student['retained_layers'])} layers keep attention. Random weights, synthetic packed text."
    )
    legend = (
        "Expected GiB: weights, gradients and optimizer state of one process; activations come on top. Peak: the fullest "
        f"process. Peak rate: {data['flops']['peak_tflops_per_device']:g} TFLOP/s a device. {data['flops']['formula']}"
    )
    parts = ["# Training benchmark", setting, f"`{data['command']}`", table(header, rows), legend]
    if data["loss_head"]:
        heads = [
            (kind, f"{row['tokens']} x {row['vocab_size']}, E {row['embed_dim']}")
            + (row.get("above_weights_gib"), row.get("seconds"), row["status"])
            for kind, row in data["loss_head"].items()
        ]
        head_table = table(("loss head", "tokens x vocabulary", "GiB above weights", "seconds", "status"), heads)
        goal = data["loss_head"].get("linear", {}).get("goal_gib")
        parts += ["## Loss head, forward and backward", head_table]
        parts += [f"Goal for linear: at most {goal:g} GiB above weights and hidden states."] if goal else []
    return "\n\n".join(parts) + "\n"
