"""config.json of an exported hybrid, what a student can be exported, and what to tell its users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tcal_components.export.layout import CONV_SIZE, HybridLayout, parameter_count
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec, check_retained_layers

STOCK_FORMAT = "qwen3_5_text"
CUSTOM_FORMAT = "hf_custom"
FORMATS = (STOCK_FORMAT, CUSTOM_FORMAT)
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
# Head size up to which flash-linear-attention has kernels.
MAX_GDN_HEAD_DIM = 256


@dataclass(frozen=True)
class ExportInfo:
    """What an export wrote.

    Args:
        path: The folder.
        format: One of ``FORMATS``.
        dtype: ``float32`` or ``bfloat16``.
        family: The teacher's family.
        parameters: Parameters of the student.
        bytes: Size of the weight files.
        shards: Number of weight files.
        head_dim: Head size D of the student's retained attention.
        exported_head_dim: Head size of the exported attention, D or 2 D.
        extra_biases: The exported attention has q/k/v biases that the teacher does not have.
        full_attention_interval: n where exactly every n-th layer keeps attention ((i + 1) % n == 0), else None.
        retained_layers: Layers that keep attention.
        converted_layers: Layers that hold a Gated DeltaNet.
        dropped: What the converted layers drop of the teacher's attention.
        layout: All numbers of the student.
    """

    path: str
    format: str
    dtype: str
    family: str
    parameters: int
    bytes: int
    shards: int
    head_dim: int
    exported_head_dim: int
    extra_biases: bool
    full_attention_interval: int | None
    retained_layers: tuple[int, ...]
    converted_layers: tuple[int, ...]
    dropped: tuple[str, ...]
    layout: HybridLayout


def export_layout(
    spec: DecoderSpec,
    *,
    gdn: GatedDeltaNetSpec,
    retained_layers: Iterable[int],
    format: str,
    dtype: torch.dtype,
    pad_values: bool = False,
) -> HybridLayout:
    """Checks that a student can be exported and says how.

    Args:
        spec: Numbers of the teacher.
        gdn: Shape of the Gated DeltaNet layers.
        retained_layers: Layers that keep attention.
        format: One of ``FORMATS``.
        dtype: Type of the weights.
        pad_values: See ``HybridLayout``.

    Returns:
        HybridLayout: Input of the weight export.

    Raises:
        ValueError: For an unknown format or type, or a student outside what the exported class computes.
    """
    if format not in FORMATS:
        raise ValueError(f"export.format is {format!r}; allowed: {', '.join(FORMATS)}")
    if dtype not in DTYPES:
        raise ValueError(
            f"export.dtype is {dtype}; allowed: bf16 and fp32 (fp16 cannot hold the attention's constants)"
        )
    gdn = GatedDeltaNetSpec.from_config(gdn).resolve(spec)
    kept = check_retained_layers(retained_layers, spec.num_layers)
    if gdn.conv_size > CONV_SIZE:
        raise ValueError(
            f"gdn.conv_size is {gdn.conv_size}; an export holds convolutions of width 0 to {CONV_SIZE} (kernels and "
            "servers know no other): train with conv_size 4"
        )
    for name in ("key_head_dim", "value_head_dim"):
        if getattr(gdn, name) > MAX_GDN_HEAD_DIM:
            raise ValueError(
                f"gdn.{name} is {getattr(gdn, name)}; the kernels behind an export allow at most {MAX_GDN_HEAD_DIM}"
            )
    return HybridLayout(
        spec=spec,
        gdn=gdn,
        retained_layers=kept,
        scale_by_norm=format == STOCK_FORMAT and not spec.qk_norm,
        pad_values=pad_values and format == STOCK_FORMAT,  # no other engine reads the custom class
    )


def attention_interval(layout: HybridLayout) -> int | None:
    """Returns n where exactly every n-th layer keeps attention, (i + 1) % n == 0, else None."""
    layers, kept = layout.spec.num_layers, layout.retained_layers
    interval = kept[0] + 1 if kept else layers + 1
    return interval if kept == tuple(range(interval - 1, layers, interval)) else None


def export_config(
    layout: HybridLayout, *, format: str, dtype: torch.dtype, teacher_config: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes config.json with the keys of transformers 5 and those that older readers and servers look for.

    Args:
        layout: What the student is.
        format: One of ``FORMATS``.
        dtype: Type of the weights.
        teacher_config: The teacher's config.json, for its special token ids.

    Returns:
        dict[str, Any]: The content of config.json. The key ``tcal`` holds what an import needs.
    """
    spec, gdn = layout.spec, layout.gdn
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_base}
    if spec.rope_scaling is not None:
        rope |= {"rope_type": "llama3"} | dict(spec.rope_scaling)
    # The enlarged half of a head is not rotated. (The class's default is 0.25, so the key is never left out.)
    rope["partial_rotary_factor"] = spec.head_dim / layout.exported_head_dim
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": STOCK_FORMAT,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.embed_dim,
        "intermediate_size": spec.intermediate_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": layout.exported_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_seq_len,
        "initializer_range": teacher_config.get("initializer_range", 0.02),
        "rms_norm_eps": spec.norm_eps,
        # The cache of transformers needs both kinds of layers: of attention up to 5.24, of the other in 5.6.
        "use_cache": bool(layout.retained_layers and layout.converted_layers),
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": layout.exported_bias,
        "qkv_bias": layout.exported_bias,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "layer_types": [
            "full_attention" if index in layout.retained_layers else "linear_attention"
            for index in range(spec.num_layers)
        ],
        "linear_conv_kernel_dim": CONV_SIZE,
        "linear_key_head_dim": gdn.key_head_dim,
        "linear_value_head_dim": layout.exported_value_dim,
        "linear_num_key_heads": spec.num_heads,
        "linear_num_value_heads": spec.num_heads,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": rope,
        "rope_theta": spec.rope_base,
        "rope_scaling": rope if spec.rope_scaling is not None else None,
        "partial_rotary_factor": rope["partial_rotary_factor"],
        "dtype": DTYPES[dtype],
        "torch_dtype": DTYPES[dtype],
    }
    interval = attention_interval(layout)
    if interval is not None:
        config["full_attention_interval"] = interval
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = teacher_config.get(name)
    config["tcal"] = {
        "version": 1,
        "format": format,
        "family": spec.family,
        "head_dim": spec.head_dim,
        "qkv_bias": spec.qkv_bias,
        "qk_norm": spec.qk_norm,
        "conv_size": gdn.conv_size,
        "value_head_dim": gdn.value_head_dim,
    }
    return config


def export_info(
    layout: HybridLayout, *, path: Path, format: str, dtype: torch.dtype, num_bytes: int, shards: int
) -> ExportInfo:
    """Collects what an export wrote."""
    return ExportInfo(
        path=str(path),
        format=format,
        dtype=DTYPES[dtype],
        family=layout.spec.family,
        parameters=parameter_count(layout),
        bytes=num_bytes,
        shards=shards,
        head_dim=layout.spec.head_dim,
        exported_head_dim=layout.exported_head_dim,
        extra_biases=layout.scale_by_norm and bool(layout.retained_layers),
        full_attention_interval=attention_interval(layout),
        retained_layers=layout.retained_layers,
        converted_layers=layout.converted_layers,
        dropped=tuple(dropped_features(layout.spec)),
        layout=layout,
    )


def dropped_features(spec: DecoderSpec) -> list[str]:
    """Lists what converted layers drop of the teacher's attention, for the report."""
    dropped = ["RoPE on q and k"]
    if spec.rope_scaling is not None:
        dropped[0] += " (with its llama3 scaling)"
    if spec.qkv_bias:
        dropped.append("q, k and v biases")
    if spec.qk_norm:
        dropped.append("q and k norm weights (the layer normalises q and k without weights)")
    return dropped
