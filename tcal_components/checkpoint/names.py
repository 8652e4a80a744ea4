"""One table of names and shapes per family: Hugging Face teacher checkpoints and torchtune state dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from tcal_components.modules.spec import DecoderSpec


class TensorEntry(NamedTuple):
    """One tensor of a teacher.

    Args:
        hf: Name in the Hugging Face checkpoint.
        torchtune: Name in the model's state dict.
        shape: Its shape, the same on both sides.
    """

    hf: str
    torchtune: str
    shape: tuple[int, ...]


def teacher_tensors(spec: DecoderSpec) -> list[TensorEntry]:
    """Lists every tensor of a teacher, in the order of its layers.

    Args:
        spec: Numbers of the teacher.

    Returns:
        list[TensorEntry]: Names on both sides and shapes; no head when it is tied to the embedding.
    """
    entries = [TensorEntry("model.embed_tokens.weight", "tok_embeddings.weight", (spec.vocab_size, spec.embed_dim))]
    for index in range(spec.num_layers):
        entries += [
            TensorEntry(f"model.layers.{index}.{hf}", f"layers.{index}.{torchtune}", shape)
            for hf, torchtune, shape in _layer_tensors(spec)
        ]
    entries.append(TensorEntry("model.norm.weight", "norm.scale", (spec.embed_dim,)))
    if not spec.tie_word_embeddings:
        entries.append(TensorEntry("lm_head.weight", "output.weight", (spec.vocab_size, spec.embed_dim)))
    return entries


def _layer_tensors(spec: DecoderSpec) -> list[TensorEntry]:
    embed, ffn = spec.embed_dim, spec.intermediate_dim
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    entries = [
        TensorEntry("input_layernorm.weight", "sa_norm.scale", (embed,)),
        TensorEntry("self_attn.q_proj.weight", "attn.q_proj.weight", (q_dim, embed)),
        TensorEntry("self_attn.k_proj.weight", "attn.k_proj.weight", (kv_dim, embed)),
        TensorEntry("self_attn.v_proj.weight", "attn.v_proj.weight", (kv_dim, embed)),
        TensorEntry("self_attn.o_proj.weight", "attn.output_proj.weight", (embed, q_dim)),
        TensorEntry("post_attention_layernorm.weight", "mlp_norm.scale", (embed,)),
        TensorEntry("mlp.gate_proj.weight", "mlp.w1.weight", (ffn, embed)),
        TensorEntry("mlp.down_proj.weight", "mlp.w2.weight", (embed, ffn)),
        TensorEntry("mlp.up_proj.weight", "mlp.w3.weight", (ffn, embed)),
    ]
    if spec.qkv_bias:
        entries += [
            TensorEntry("self_attn.q_proj.bias", "attn.q_proj.bias", (q_dim,)),
            TensorEntry("self_attn.k_proj.bias", "attn.k_proj.bias", (kv_dim,)),
            TensorEntry("self_attn.v_proj.bias", "attn.v_proj.bias", (kv_dim,)),
        ]
    if spec.qk_norm:
        entries += [
            TensorEntry("self_attn.q_norm.weight", "attn.q_norm.scale", (spec.head_dim,)),
            TensorEntry("self_attn.k_norm.weight", "attn.k_norm.scale", (spec.head_dim,)),
        ]
    return entries


def hf_to_torchtune(state_dict: Mapping[str, torch.Tensor], spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Renames a Hugging Face teacher's tensors.

    Args:
        state_dict: Tensors by Hugging Face name; other names are left out.
        spec: Numbers of the teacher.

    Returns:
        dict[str, torch.Tensor]: The same tensors by torchtune name.

    Raises:
        ValueError: If a tensor is missing or its shape does not fit ``spec``.
    """
    return _rename(state_dict, [(entry.hf, entry.torchtune, entry.shape) for entry in teacher_tensors(spec)])


def torchtune_to_hf(state_dict: Mapping[str, torch.Tensor], spec: DecoderSpec) -> dict[str, torch.Tensor]:
    """Renames a torchtune teacher's tensors; the inverse of ``hf_to_torchtune``.

    Args:
        state_dict: Tensors by torchtune name; other names are left out.
        spec: Numbers of the teacher.

    Returns:
        dict[str, torch.Tensor]: The same tensors by Hugging Face name.

    Raises:
        ValueError: If a tensor is missing or its shape does not fit ``spec``.
    """
    return _rename(state_dict, [(entry.torchtune, entry.hf, entry.shape) for entry in teacher_tensors(spec)])


def _rename(
    state_dict: Mapping[str, torch.Tensor], table: list[tuple[str, str, tuple[int, ...]]]
) -> dict[str, torch.Tensor]:
    renamed = {}
    for old, new, shape in table:
        if old not in state_dict:
            raise ValueError(f"tensor {old} is missing")
        if tuple(state_dict[old].shape) != shape:
            raise ValueError(f"tensor {old} has shape {tuple(state_dict[old].shape)}; {shape} is needed")
        renamed[new] = state_dict[old]
    return renamed
