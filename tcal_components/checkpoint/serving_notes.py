"""What to tell the users of an exported folder, for the model card."""

from __future__ import annotations

from tcal_components.checkpoint.export_config import CUSTOM_FORMAT, ExportInfo


def serving_notes(info: ExportInfo) -> list[str]:
    """Lists facts about serving an export, one short sentence each.

    "Read in source" marks what was concluded from a project's code and not run.

    Args:
        info: What the export wrote.

    Returns:
        list[str]: Notes for the model card.
    """
    notes = []
    if info.format == CUSTOM_FORMAT:
        notes += [
            "transformers >= 5.6.2: loads with trust_remote_code=True (modeling file in the folder); checked by the export.",
            "vLLM, SGLang and llama.cpp: not served, they know no such class (read in source); export qwen3_5_text there.",
        ]
    else:
        notes += [
            "transformers >= 5.6.2: loads with AutoModelForCausalLM, no remote code; checked by the export.",
            "vLLM 0.33: serves Qwen3_5ForCausalLM (read in source).",
            f"SGLang 0.5.23 and llama.cpp: {_interval_servers(info)} (read in source).",
        ]
        if info.extra_biases:
            notes.append(
                f"Retained attention has head size {info.exported_head_dim} instead of {info.head_dim} and biases of "
                "2^40: exact in bf16 and fp32, not loadable in fp16, and its key/value cache is twice the teacher's "
                f"per layer ({len(info.retained_layers)} of "
                f"{len(info.retained_layers) + len(info.converted_layers)} layers have one)."
            )
    if not info.retained_layers:
        notes.append(
            "No layer keeps attention: transformers has no cache for that (use_cache is false, generation is slow)."
        )
    notes += [
        "Batches: pad on the left and pass the attention mask; right-padded prompts decode wrongly in the class itself.",
        "lm-eval 0.4.13: lm_eval --model hf --model_args pretrained=DIR,dtype=bfloat16"
        + (",trust_remote_code=True." if info.format == CUSTOM_FORMAT else "."),
    ]
    if info.dtype == "bfloat16":
        notes.append(
            "A_log and dt_bias are stored in fp32; transformers rounds them when it loads in bf16, vLLM does not."
        )
    return notes


def _interval_servers(info: ExportInfo) -> str:
    if info.family != "qwen3":
        return "not usable, they drop the q/k/v biases of the retained attention without a word"
    if not info.retained_layers:
        return "untried, no layer keeps attention"
    if info.full_attention_interval is None:
        return "not usable, they need attention in exactly every n-th layer"
    return f"usable, every {info.full_attention_interval}-th layer keeps attention"
