"""Bytes that a model keeps between decoding steps: by formula, and as measured on the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.evaluation.access import is_transformers, layers_of
from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.spec import GatedDeltaNetSpec


def attention_cache_bytes(*, context: int, batch_size: int, kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Keys and values of one attention layer: ``2 B T H_kv D`` numbers."""
    return 2 * batch_size * context * kv_heads * head_dim * itemsize


def gated_delta_net_cache_bytes(
    *,
    batch_size: int,
    heads: int,
    key_head_dim: int,
    value_head_dim: int,
    conv_positions: int,
    itemsize: int,
    state_itemsize: int = 4,
) -> int:
    """State ``B H K V`` (float32) and the last inputs of the convolutions of one GDN layer, at any context length."""
    state = batch_size * heads * key_head_dim * value_head_dim * state_itemsize
    convolution = batch_size * conv_positions * heads * (2 * key_head_dim + value_head_dim) * itemsize
    return state + convolution


def recurrent_state_bytes(num_heads: int, gdn: GatedDeltaNetSpec, *, layers: int, dtype: torch.dtype) -> int:
    """Bytes that the converted layers of a student keep for one sequence, at any context length.

    Args:
        num_heads: Heads H of a layer.
        gdn: Its shape, with both head sizes filled in.
        layers: Number of converted layers.
        dtype: Type of the convolutions' inputs; the state itself is float32.

    Returns:
        int: Bytes.
    """
    assert gdn.key_head_dim is not None and gdn.value_head_dim is not None
    return layers * gated_delta_net_cache_bytes(
        batch_size=1,
        heads=num_heads,
        key_head_dim=gdn.key_head_dim,
        value_head_dim=gdn.value_head_dim,
        conv_positions=gdn.conv_size,
        itemsize=dtype.itemsize,
    )


def theoretical_cache_bytes(model: nn.Module, *, context: int, batch_size: int = 1, dtype: torch.dtype) -> int:
    """Bytes of the whole model's cache after ``context`` tokens, by formula.

    Args:
        model: A HybridDecoder, or a causal language model of transformers with ``layer_types`` in its config.
        context: Tokens seen.
        batch_size: Sequences.
        dtype: Type of keys, values and convolution inputs.

    Returns:
        int: Bytes.
    """
    itemsize = dtype.itemsize
    if is_transformers(model):
        return sum(_transformers_layers(model.config, context, batch_size, itemsize))
    total = 0
    for layer in layers_of(model):
        mixer = layer.attn
        if isinstance(mixer, GatedDeltaNet):
            total += gated_delta_net_cache_bytes(
                batch_size=batch_size,
                heads=mixer.num_heads,
                key_head_dim=mixer.key_head_dim,
                value_head_dim=mixer.value_head_dim,
                conv_positions=mixer.conv_size,
                itemsize=itemsize,
                state_itemsize=8 if dtype == torch.float64 else 4,
            )
        else:
            total += attention_cache_bytes(
                context=context,
                batch_size=batch_size,
                kv_heads=mixer.num_kv_heads,
                head_dim=mixer.head_dim,
                itemsize=itemsize,
            )
    return total


def _transformers_layers(config: Any, context: int, batch_size: int, itemsize: int) -> Iterator[int]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    for kind in kinds:
        if kind == "linear_attention":
            yield gated_delta_net_cache_bytes(
                batch_size=batch_size,
                heads=config.linear_num_value_heads,
                key_head_dim=config.linear_key_head_dim,
                value_head_dim=config.linear_value_head_dim,
                conv_positions=config.linear_conv_kernel_dim,
                itemsize=itemsize,
            )
        elif kind == "full_attention":
            yield attention_cache_bytes(
                context=context,
                batch_size=batch_size,
                kv_heads=config.num_key_value_heads,
                head_dim=head_dim,
                itemsize=itemsize,
            )
        else:
            raise ValueError(f"no formula for the cache of layers of type {kind!r}; known: full and linear attention")


def measured_cache_bytes(holder: Any) -> int:
    """Bytes of the floating-point tensors of a cache.

    Args:
        holder: A decoder of ours after ``setup_caches``, or the cache object of transformers.

    Returns:
        int: Bytes; index tensors (positions) are bookkeeping and not counted.
    """
    if isinstance(holder, nn.Module):
        caches = [layer.attn.kv_cache for layer in layers_of(holder) if layer.attn.kv_cache is not None]
        tensors = [buffer for cache in caches for buffer in cache.buffers()]
    else:
        tensors = list(_tensors(holder, set()))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.is_floating_point())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Tensors anywhere within lists, dicts and plain objects; its classes differ between transformers' versions."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, seen)
    elif type(value).__module__.startswith("transformers.") and "Config" not in type(value).__name__:
        yield from _tensors(getattr(value, "__dict__", {}), seen)
