"""What engines can hold of an export; docs/serving.md says how each fact was found."""

from __future__ import annotations

from tcal_components.export.config_json import STOCK_FORMAT, attention_interval
from tcal_components.export.layout import HybridLayout

LLAMA_CPP = "0.11739"  # of llama-cpp-py-sync, llama.cpp b11739
SGLANG = "0.5.23"
VLLM = "0.27.1"  # the first that registers the class


def llama_cpp_refusal(layout: HybridLayout, format: str) -> str | None:
    """Says why llama.cpp cannot hold an export of this layout and format, or None."""
    if format != STOCK_FORMAT:
        return f"llama.cpp does not know exports of format {format}; export {STOCK_FORMAT}"
    if not (layout.retained_layers and layout.converted_layers):
        return f"llama.cpp {LLAMA_CPP} ends the process where all or no layers keep attention; keep and convert some"
    keys, values = layout.gdn.key_head_dim, layout.exported_value_dim
    if keys != values:
        return (
            f"key heads of {keys} and value heads of {layout.gdn.value_head_dim} have no equal size in llama.cpp, which "
            "asks for one: train with a value_head_dim that divides key_head_dim (an export is padded then)"
        )
    return None


def sglang_refusal(layout: HybridLayout) -> str | None:
    """Says why SGLang would compute something else than the export, or None."""
    if layout.exported_bias and layout.retained_layers:
        return "it drops the q/k/v biases of the retained attention without a word"
    if not layout.retained_layers:
        return "no layer keeps attention, which was not tried"
    if attention_interval(layout) is None:
        return "it knows attention in exactly every n-th layer alone"
    return None


def tensor_parallel_sizes(layout: HybridLayout, most: int = 16) -> list[int]:
    """Numbers of GPUs that vLLM can divide an export by: heads and the width of the feed-forward network come out even."""
    spec = layout.spec
    return [
        size
        for size in range(1, most + 1)
        if spec.num_heads % size == 0
        and spec.intermediate_dim % size == 0
        and (spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0)
    ]
