"""Reads the architecture out of a Hugging Face ``config.json`` and refuses what these models do not compute."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tcal_components.models.spec import ROPE_SCALING_KEYS, DecoderSpec

FAMILY_OF_MODEL_TYPE = {"llama": "llama3_2", "qwen2": "qwen2_5", "qwen3": "qwen3"}
# What transformers assumes when the file does not say.
_DEFAULT_ROPE_BASE = 10_000.0
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_QWEN3_HEAD_DIM = 128


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
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint_dir {folder} has no config.json; a Hugging Face model folder is needed")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}; a JSON object is needed")
    return config


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
    family = _family(config, source)
    _refuse_variants(config, source)
    num_layers = _integer(config, "num_hidden_layers", source)
    _refuse_sliding_window(config, num_layers, source)
    num_heads = _integer(config, "num_attention_heads", source)
    embed_dim = _integer(config, "hidden_size", source)
    rope_base, rope_scaling = _rope(config, source)
    default_head_dim = _DEFAULT_QWEN3_HEAD_DIM if family == "qwen3" else embed_dim // num_heads
    try:
        return DecoderSpec(
            family=family,
            vocab_size=_integer(config, "vocab_size", source),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_integer(config, "num_key_value_heads", source, default=num_heads),
            embed_dim=embed_dim,
            intermediate_dim=_integer(config, "intermediate_size", source),
            head_dim=_integer(config, "head_dim", source, default=default_head_dim),
            max_seq_len=_integer(config, "max_position_embeddings", source),
            norm_eps=_number(config, "rms_norm_eps", source, default=_DEFAULT_NORM_EPS),
            rope_base=rope_base,
            rope_scaling=rope_scaling,
            qkv_bias=family == "qwen2_5",
            qk_norm=family == "qwen3",
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except ValueError as error:
        raise ValueError(str(error) if source in str(error) else f"{source}: {error}") from None


def _family(config: Mapping[str, Any], source: str) -> str:
    model_type = config.get("model_type")
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if config.get(key)]
    if "moe" in str(model_type).lower() or experts:
        raise ValueError(f"{source}: model_type {model_type!r} is a mixture of experts, which is not supported")
    if model_type not in FAMILY_OF_MODEL_TYPE:
        raise ValueError(
            f"{source}: model_type is {model_type!r}; supported teachers are llama (Llama-3.2, SmolLM2), "
            "qwen2 (Qwen2.5) and qwen3"
        )
    return FAMILY_OF_MODEL_TYPE[model_type]


def _refuse_variants(config: Mapping[str, Any], source: str) -> None:
    if config.get("quantization_config"):
        quantization = config["quantization_config"]
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"{source}: the checkpoint is quantised (quantization_config, method {method}); "
            "weights in bfloat16, float16 or float32 are needed"
        )
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise ValueError(f"{source}: {key} is true, which is not supported for model_type {config['model_type']!r}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"{source}: hidden_act is {activation!r}; only 'silu' is supported")


def _refuse_sliding_window(config: Mapping[str, Any], num_layers: int, source: str) -> None:
    layer_types = config.get("layer_types")
    if layer_types is not None:
        other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
        if other:
            raise ValueError(f"{source}: layer_types contains {other[0]!r}; only 'full_attention' is supported")
        return
    # Qwen configs name a window that `use_sliding_window: false` leaves unused; it applies from max_window_layers on.
    in_use = config.get("use_sliding_window", False) and config.get("sliding_window") is not None
    if in_use and config.get("max_window_layers", 0) < num_layers:
        raise ValueError(
            f"{source}: sliding-window attention is in use (sliding_window {config['sliding_window']}), "
            "which is not supported"
        )


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, dict[str, float] | None]:
    """Reads base and scaling from ``rope_parameters`` (transformers 5) or ``rope_theta``/``rope_scaling`` (4)."""
    # In this order: where a file has both, transformers 5 lets the older key win.
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{source}: rope parameters are {parameters!r}; a mapping is needed")
    if "full_attention" in parameters:
        parameters = parameters["full_attention"]
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ValueError(f"{source}: rope_type is {rope_type!r}; supported: 'default' and 'llama3'")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1.0:
        raise ValueError(f"{source}: partial_rotary_factor is {partial}; only 1.0 is supported")
    base = float(_number({**config, **parameters}, "rope_theta", source, default=_DEFAULT_ROPE_BASE))
    if rope_type == "default":
        return base, None
    missing = [key for key in ROPE_SCALING_KEYS if parameters.get(key) is None]
    if missing:
        raise ValueError(f"{source}: rope_type 'llama3' lacks {missing[0]}")
    return base, {key: _number(parameters, key, source) for key in ROPE_SCALING_KEYS}


def _integer(config: Mapping[str, Any], key: str, source: str, *, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{source}: {key} is {value!r}; a positive integer is needed")
    return value


def _number(config: Mapping[str, Any], key: str, source: str, *, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise ValueError(f"{source}: {key} is {value!r}; a positive number is needed")
    return value
