"""What to tell the users of an exported folder, for the model card: from what the student is and what was run on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tcal_components.export.config_json import CUSTOM_FORMAT, ExportInfo, attention_interval
from tcal_components.export.engines import (
    LLAMA_CPP,
    SGLANG,
    VLLM,
    llama_cpp_refusal,
    sglang_refusal,
    tensor_parallel_sizes,
)

_GGUF = "`python -m tcal_components.serving.gguf --export DIR --source LLAMA_CPP --output f32.gguf`"


def serving_notes(info: ExportInfo, serving: Mapping[str, Any] | None = None) -> list[str]:
    """Lists facts about serving an export, one or two short sentences each.

    "Run on this export" is said of what was measured, "read in source" of what was concluded from an engine's code.

    Args:
        info: What the export wrote.
        serving: Key ``serving`` of the report. Default: None, nothing but transformers was run.

    Returns:
        list[str]: Notes for the model card.
    """
    layout, custom = info.layout, info.format == CUSTOM_FORMAT
    notes = [
        (
            f"transformers >= 5.6.2: AutoModelForCausalLM, {'trust_remote_code=True' if custom else 'no remote code'}; run on "
            "this export by its check."
        ),
        (
            "Batches: pad on the left and pass the attention mask; right-padded prompts decode wrongly in the class itself. "
            "Rows packed with position_ids are not kept apart: convolution and state run on from one document to the next."
        ),
    ]
    if not info.retained_layers:
        notes.append(
            "No layer keeps attention: transformers has no cache for that (use_cache is false, generation is slow)."
        )
    notes.append(_llama_cpp(info, (serving or {}).get("llama_cpp")))
    if custom:
        notes.append("vLLM, SGLang: not served, they know no such class (read in source); export qwen3_5_text there.")
    else:
        notes += _vllm(info)
        refused = sglang_refusal(layout)
        usable = f"usable, every {attention_interval(layout)}-th layer keeps attention"
        notes.append(f"SGLang {SGLANG}: {f'not usable, {refused}' if refused else usable} (read in source).")
    if info.extra_biases:
        notes.append(
            f"Retained attention has head size {info.exported_head_dim} instead of {info.head_dim} and biases of 2^40: "
            "exact in bf16 and fp32, not loadable in fp16, and its key/value cache is twice the teacher's per layer "
            f"({len(info.retained_layers)} of {layout.spec.num_layers} layers have one)."
        )
    if info.dtype == "bfloat16":
        notes.append("A_log and dt_bias are stored in fp32; transformers rounds both when it loads in bf16.")
    notes.append(
        "lm-eval 0.4.13: lm_eval --model hf --model_args pretrained=DIR,dtype=bfloat16"
        + (",trust_remote_code=True." if custom else ".")
    )
    return notes


def _llama_cpp(info: ExportInfo, measured: Mapping[str, Any] | None) -> str:
    refused = llama_cpp_refusal(info.layout, info.format)
    if refused is not None:
        return f"llama.cpp: not served; {refused}."
    note = f"llama.cpp {LLAMA_CPP}: serves such exports, not run on this one (export.check)."
    if measured is not None:
        perplexity = ", ".join(
            f"{'transformers' if kind == 'student' else kind} {value:.4g}"
            for kind, value in measured["perplexity"].items()
        )
        note = (
            f"llama.cpp {measured['version']}: run on this export; logits differ by at most "
            f"{measured['max_abs_logit_diff']:.2g} at logits up to {measured['reference_logit_max']:.3g}. Perplexity: "
            f"{perplexity}."
        )
    faults = []
    if info.layout.exported_bias:
        faults.append("keeps zero biases that the engine refuses")
    if info.layout.spec.rope_scaling is not None:
        faults.append("drops the RoPE scaling without a word, which makes every answer wrong")
    if faults:
        note += f" Make its files with {_GGUF}: llama.cpp's own script {' and '.join(faults)}."
    return note


def _vllm(info: ExportInfo) -> list[str]:
    layout = info.layout
    flags = "" if not layout.converted_layers else " --gdn-prefill-backend triton"
    dtype = " --dtype bfloat16" if info.extra_biases else ""
    sizes = ", ".join(map(str, tensor_parallel_sizes(layout)))
    notes = [
        (
            f"vLLM {VLLM} or later: vllm serve DIR{dtype}{flags} --tensor-parallel-size N, N one of {sizes} "
            f"({layout.spec.num_heads} heads are divided). 0.25 and 0.26 need this project beside them: pip install --no-deps "
            "taylor-calibrate. 0.26 ran on an H200 with Qwen3's heads, as near to transformers as bfloat16 comes; of other "
            "families its weights were compared: all bit for bit but dt_bias, which vLLM rounds to bf16."
        )
    ]
    if layout.converted_layers:
        notes.append(
            "On Hopper that flag is needed: vLLM takes FlashInfer's kernel there without a look at head sizes (read in "
            f"source; here keys of {layout.gdn.key_head_dim}, values of {layout.exported_value_dim})."
        )
    return notes
