"""Qwen2.5: teachers and hybrids."""

from __future__ import annotations

from collections.abc import Iterable

from tcal_components.models._decoder import GdnConfig, build_decoder, model_builders
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec


def qwen2_5_spec(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int | None = None,
    max_seq_len: int = 32_768,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = True,
) -> DecoderSpec:
    """Describes a decoder of this family: bias on q, k and v, no q/k norm.

    Args:
        vocab_size: Rows of the embedding.
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        embed_dim: Hidden size.
        intermediate_dim: Width of the feed-forward network.
        head_dim: Head size. Default: ``embed_dim // num_heads``.
        max_seq_len: Longest sequence in tokens. Default: 32768.
        norm_eps: Epsilon of the norms. Default: 1e-6.
        rope_base: RoPE base. Default: 1000000.
        tie_word_embeddings: The head is the embedding. Default: True.

    Returns:
        DecoderSpec: The numbers.
    """
    return DecoderSpec(
        family="qwen2_5",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        head_dim=head_dim or embed_dim // num_heads,
        max_seq_len=max_seq_len,
        norm_eps=norm_eps,
        rope_base=rope_base,
        rope_scaling=None,
        qkv_bias=True,
        qk_norm=False,
        tie_word_embeddings=tie_word_embeddings,
    )


SPECS: dict[str, DecoderSpec] = {
    "qwen2_5_0_5b": qwen2_5_spec(
        vocab_size=151_936,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        embed_dim=896,
        intermediate_dim=4864,
    ),
    "qwen2_5_1_5b": qwen2_5_spec(
        vocab_size=151_936,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        embed_dim=1536,
        intermediate_dim=8960,
    ),
    "qwen2_5_3b": qwen2_5_spec(
        vocab_size=151_936,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        embed_dim=2048,
        intermediate_dim=11008,
    ),
    "qwen2_5_7b": qwen2_5_spec(
        vocab_size=152_064,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        embed_dim=3584,
        intermediate_dim=18944,
        tie_word_embeddings=False,
    ),
}


def qwen2_5_decoder(
    *, retained_layers: Iterable[int] | None = None, gdn: GdnConfig = None, **numbers: object
) -> HybridDecoder:
    """Builds a teacher or hybrid of this family from its numbers.

    Args:
        retained_layers: Layers that keep attention; None builds the teacher. Default: None.
        gdn: Shape of the Gated DeltaNet layers. Default: None, the defaults of ``GatedDeltaNetSpec``.
        **numbers: Arguments of ``qwen2_5_spec``.

    Returns:
        HybridDecoder: The model with freshly initialised weights.
    """
    return build_decoder(qwen2_5_spec(**numbers), retained_layers=retained_layers, gdn=gdn)  # type: ignore[arg-type]


qwen2_5_0_5b, qwen2_5_0_5b_hybrid = model_builders("qwen2_5_0_5b", SPECS["qwen2_5_0_5b"], module=__name__)
qwen2_5_1_5b, qwen2_5_1_5b_hybrid = model_builders("qwen2_5_1_5b", SPECS["qwen2_5_1_5b"], module=__name__)
qwen2_5_3b, qwen2_5_3b_hybrid = model_builders("qwen2_5_3b", SPECS["qwen2_5_3b"], module=__name__)
qwen2_5_7b, qwen2_5_7b_hybrid = model_builders("qwen2_5_7b", SPECS["qwen2_5_7b"], module=__name__)
