"""Assembly of teachers and hybrids from a specification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import nn
from torchtune.modules import FeedForward, TiedLinear, TransformerSelfAttentionLayer

from tcal_components.modules.attention import GroupedQueryAttention
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.rms_norm import RMSNorm
from tcal_components.modules.rope import HalfRotationRoPE
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec, check_retained_layers

GdnConfig = GatedDeltaNetSpec | Mapping[str, Any] | None


def build_decoder(
    spec: DecoderSpec, *, retained_layers: Iterable[int] | None = None, gdn: GdnConfig = None
) -> HybridDecoder:
    """Builds a teacher, or a hybrid in which all layers but the retained ones hold a Gated DeltaNet.

    Works under ``torch.device("meta")``; call every module's ``rope_init`` after giving such a model its storage.

    Args:
        spec: Numbers of the teacher.
        retained_layers: Layers that keep attention; None builds the teacher. Default: None.
        gdn: Shape of the Gated DeltaNet layers, as ``GatedDeltaNetSpec.from_config`` reads it. Default: None.

    Returns:
        HybridDecoder: The model with freshly initialised weights.

    Raises:
        ValueError: For layer indices or a ``gdn`` that do not fit, or a ``gdn`` without ``retained_layers``.
    """
    kept, gdn_spec = None, None
    if retained_layers is not None:
        kept = check_retained_layers(retained_layers, spec.num_layers)
        gdn_spec = GatedDeltaNetSpec.from_config(gdn).resolve(spec)
    elif gdn is not None:
        raise ValueError("gdn was given without retained_layers; a teacher has no Gated DeltaNet layers")

    # One table of angles for all layers.
    rope = HalfRotationRoPE(
        dim=spec.head_dim, max_seq_len=spec.max_seq_len, base=spec.rope_base, scaling=spec.rope_scaling
    )
    layers = nn.ModuleList()
    for index in range(spec.num_layers):
        mixer: nn.Module
        if kept is None or gdn_spec is None or index in kept:
            mixer = _attention(spec, rope)
        else:
            mixer = _gated_delta_net(spec, gdn_spec)
        layers.append(
            TransformerSelfAttentionLayer(
                attn=mixer,
                mlp=FeedForward(
                    gate_proj=nn.Linear(spec.embed_dim, spec.intermediate_dim, bias=False),
                    down_proj=nn.Linear(spec.intermediate_dim, spec.embed_dim, bias=False),
                    up_proj=nn.Linear(spec.embed_dim, spec.intermediate_dim, bias=False),
                ),
                sa_norm=RMSNorm(spec.embed_dim, eps=spec.norm_eps),
                mlp_norm=RMSNorm(spec.embed_dim, eps=spec.norm_eps),
            )
        )
    tok_embeddings = nn.Embedding(spec.vocab_size, spec.embed_dim)
    return HybridDecoder(
        spec=spec,
        gdn=gdn_spec,
        retained_layers=kept,
        tok_embeddings=tok_embeddings,
        layers=layers,
        norm=RMSNorm(spec.embed_dim, eps=spec.norm_eps),
        output=TiedLinear(tok_embeddings)
        if spec.tie_word_embeddings
        else nn.Linear(spec.embed_dim, spec.vocab_size, bias=False),
    )


def _attention(spec: DecoderSpec, rope: HalfRotationRoPE) -> GroupedQueryAttention:
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return GroupedQueryAttention(
        embed_dim=spec.embed_dim,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        q_proj=nn.Linear(spec.embed_dim, q_dim, bias=spec.qkv_bias),
        k_proj=nn.Linear(spec.embed_dim, kv_dim, bias=spec.qkv_bias),
        v_proj=nn.Linear(spec.embed_dim, kv_dim, bias=spec.qkv_bias),
        output_proj=nn.Linear(q_dim, spec.embed_dim, bias=False),
        pos_embeddings=rope,
        q_norm=RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None,
        k_norm=RMSNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None,
        max_seq_len=spec.max_seq_len,
    )


def _gated_delta_net(spec: DecoderSpec, gdn: GatedDeltaNetSpec) -> nn.Module:
    # Imported here, so that a teacher needs nothing of the mixer and its kernels.
    from tcal_components.modules.gated_delta_net import GatedDeltaNet

    assert gdn.key_head_dim is not None and gdn.value_head_dim is not None
    return GatedDeltaNet(
        embed_dim=spec.embed_dim,
        num_heads=spec.num_heads,
        key_head_dim=gdn.key_head_dim,
        value_head_dim=gdn.value_head_dim,
        conv_size=gdn.conv_size,
        norm_eps=spec.norm_eps,
    )


class TeacherBuilder(Protocol):
    """A model builder that needs no argument, for a config's ``teacher_model._component_``."""

    __name__: str

    def __call__(self, *, max_seq_len: int | None = None) -> HybridDecoder: ...


class HybridBuilder(Protocol):
    """A model builder that needs the retained layers, for a config's ``model._component_``."""

    __name__: str

    def __call__(
        self, *, retained_layers: Iterable[int], gdn: GdnConfig = None, max_seq_len: int | None = None
    ) -> HybridDecoder: ...


def model_builders(name: str, spec: DecoderSpec, *, module: str) -> tuple[TeacherBuilder, HybridBuilder]:
    """Makes the two builders of one published model.

    Args:
        name: Name of the teacher's builder; the hybrid's gets the suffix ``_hybrid``.
        spec: Numbers of the published model.
        module: ``__name__`` of the module that publishes them.

    Returns:
        tuple[TeacherBuilder, HybridBuilder]: ``name`` and ``name_hybrid``.
    """

    def teacher(*, max_seq_len: int | None = None) -> HybridDecoder:
        return build_decoder(spec.with_max_seq_len(max_seq_len))

    def hybrid(
        *, retained_layers: Iterable[int], gdn: GdnConfig = None, max_seq_len: int | None = None
    ) -> HybridDecoder:
        return build_decoder(spec.with_max_seq_len(max_seq_len), retained_layers=retained_layers, gdn=gdn)

    length = f"max_seq_len: Longest sequence in tokens. Default: {spec.max_seq_len}."
    teacher.__doc__ = f"""Builds the teacher {name} with freshly initialised weights.

    Args:
        {length}

    Returns:
        HybridDecoder: The model.
    """
    hybrid.__doc__ = f"""Builds the hybrid of {name} with freshly initialised weights.

    Args:
        retained_layers: Layers of 0 to {spec.num_layers - 1} that keep attention.
        gdn: Mapping with keys of ``GatedDeltaNetSpec``. Default: None, its defaults.
        {length}

    Returns:
        HybridDecoder: The model.
    """
    for builder, builder_name in ((teacher, name), (hybrid, f"{name}_hybrid")):
        builder.__name__ = builder.__qualname__ = builder_name
        builder.__module__ = module
    return teacher, hybrid
