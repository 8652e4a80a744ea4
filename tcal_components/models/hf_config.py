"""Reads the architecture out of a Hugging Face ``config.json`` and refuses what these models do not compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tcal_components.config import Settings, keys_of, read_json_object, section
from tcal_components.config.schema import fit, shown
from tcal_components.modules.spec import (
    ROPE_SCALING_KEYS,
    DecoderSpec,
    Epsilon,
    HeadDim,
    Heads,
    Layers,
    Positions,
    RopeBase,
    RopeNumber,
    Vocabulary,
    Width,
)

FAMILY_OF_MODEL_TYPE = {"llama": "llama3_2", "qwen2": "qwen2_5", "qwen3": "qwen3"}
_DEFAULT_QWEN3_HEAD_DIM = 128


@dataclass(frozen=True)
class HFConfig(Settings):
    """The keys of config.json that are read; what the file leaves out or has as null is what transformers assumes."""

    model_type: str = ""
    vocab_size: Vocabulary = field(kw_only=True)
    num_hidden_layers: Layers = field(kw_only=True)
    num_attention_heads: Heads = field(kw_only=True)
    num_key_value_heads: Heads | None = None
    hidden_size: Width = field(kw_only=True)
    intermediate_size: Width = field(kw_only=True)
    head_dim: HeadDim | None = None
    max_position_embeddings: Positions = field(kw_only=True)
    rms_norm_eps: Epsilon = 1e-6
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    quantization_config: Any = None
    num_experts: int = 0
    num_local_experts: int = 0
    n_routed_experts: int = 0
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = 0
    rope_theta: RopeBase | None = None
    partial_rotary_factor: float = 1.0
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    rope_parameters: dict[str, Any] = field(default_factory=dict)


def read_config(checkpoint_dir: str | Path) -> dict[str, Any]:
    """Reads ``config.json`` of a checkpoint folder.

    Args:
        checkpoint_dir: Folder as ``tune download`` or ``save_pretrained`` writes it.

    Returns:
        dict[str, Any]: The parsed file.

    Raises:
        FileNotFoundError: If the folder or the file is missing.
        ValueError: If the file is not a JSON object.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoint_dir {folder} does not exist or is not a folder")
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"checkpoint_dir {folder} has no config.json; a Hugging Face model folder is needed")
    return read_json_object(folder / "config.json")


def read_spec(checkpoint_dir: str | Path) -> DecoderSpec:
    """Reads the specification of the teacher in a checkpoint folder.

    Args:
        checkpoint_dir: Hugging Face model folder, written by transformers 4 or 5.

    Returns:
        DecoderSpec: The teacher's numbers.

    Raises:
        FileNotFoundError: If the folder or its config.json is missing.
        ValueError: For another family or a variant that is not supported, in one line.
    """
    return spec_from_config(read_config(checkpoint_dir), source=str(Path(checkpoint_dir) / "config.json"))


def spec_from_config(config: Mapping[str, Any], *, source: str) -> DecoderSpec:
    """Turns a parsed ``config.json`` into a specification.

    Args:
        config: The parsed file.
        source: Name of the file for error messages.

    Returns:
        DecoderSpec: The teacher's numbers.

    Raises:
        ValueError: For another family or a variant that is not supported, in one line.
    """
    try:
        family = _family(config.get("model_type"))
        known = {key: config[key] for key in keys_of(HFConfig) if config.get(key) is not None}
        return _spec(family, section(HFConfig, known, ""))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _spec(family: str, config: HFConfig) -> DecoderSpec:
    _refuse_variants(config)
    _refuse_sliding_window(config)
    rope_base, rope_scaling = _rope(config)
    default_head_dim = (
        _DEFAULT_QWEN3_HEAD_DIM if family == "qwen3" else config.hidden_size // config.num_attention_heads
    )
    return DecoderSpec(
        family=family,
        vocab_size=config.vocab_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        embed_dim=config.hidden_size,
        intermediate_dim=config.intermediate_size,
        head_dim=config.head_dim or default_head_dim,
        max_seq_len=config.max_position_embeddings,
        norm_eps=config.rms_norm_eps,
        rope_base=rope_base,
        rope_scaling=rope_scaling,
        qkv_bias=family == "qwen2_5",
        qk_norm=family == "qwen3",
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _family(model_type: Any) -> str:
    if "moe" in str(model_type).lower():
        raise ValueError(f"model_type {shown(model_type)} is a mixture of experts, which is not supported")
    if not isinstance(model_type, str) or model_type not in FAMILY_OF_MODEL_TYPE:
        raise ValueError(
            f"model_type is {shown(model_type)}; supported teachers are llama (Llama-3.2, SmolLM2), qwen2 (Qwen2.5) "
            "and qwen3"
        )
    return FAMILY_OF_MODEL_TYPE[model_type]


def _refuse_variants(config: HFConfig) -> None:
    if config.num_experts or config.num_local_experts or config.n_routed_experts:
        raise ValueError(f"the {config.model_type} model is a mixture of experts, which is not supported")
    if config.quantization_config:
        quantization = config.quantization_config
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"the checkpoint is quantised (quantization_config, method {str(method)[:100]}); "
            "weights in bfloat16, float16 or float32 are needed"
        )
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key):
            raise ValueError(f"{key} is true, which is not supported for model_type {config.model_type!r}")
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act is {shown(config.hidden_act)}; only 'silu' is supported")


def _refuse_sliding_window(config: HFConfig) -> None:
    if config.layer_types is not None:
        other = sorted(set(config.layer_types) - {"full_attention"})
        if other:
            raise ValueError(f"layer_types contains {shown(other[0])}; only 'full_attention' is supported")
        return
    # Qwen configs name a window that `use_sliding_window: false` leaves unused; it applies from max_window_layers on.
    in_use = config.use_sliding_window and config.sliding_window is not None
    if in_use and config.max_window_layers < config.num_hidden_layers:
        raise ValueError(
            f"sliding-window attention is in use (sliding_window {config.sliding_window}), which is not supported"
        )


def _rope(config: HFConfig) -> tuple[float, dict[str, float] | None]:
    """Reads base and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta``/``rope_scaling`` (4)."""
    # In this order: where a file has both, transformers 5 lets the older key win.
    parameters = config.rope_scaling or config.rope_parameters
    if "full_attention" in parameters:
        parameters = fit(parameters["full_attention"], dict[str, Any], "rope_parameters.full_attention")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"rope_type is {shown(rope_type)}; supported: 'default' and 'llama3'")
    partial = parameters.get("partial_rotary_factor", config.partial_rotary_factor)
    if partial not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor is {shown(partial)}; only 1.0 is supported")
    theta = parameters.get("rope_theta")
    base = float(fit(theta, RopeBase, "rope_theta")) if theta is not None else config.rope_theta or 10_000.0
    if rope_type == "default":
        return base, None
    missing = [key for key in ROPE_SCALING_KEYS if parameters.get(key) is None]
    if missing:
        raise ValueError(f"rope_type 'llama3' lacks {missing[0]}")
    return base, {key: fit(parameters[key], RopeNumber, key) for key in ROPE_SCALING_KEYS}
