"""Qwen3: teachers and hybrids."""

from __future__ import annotations

from collections.abc import Iterable

from tcal_components.models._decoder import GdnConfig, build_decoder, model_builders
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec


def qwen3_spec(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int = 128,
    max_seq_len: int = 40_960,
    norm_eps: float = 1e-6,
    rope_base: float = 1_000_000.0,
    tie_word_embeddings: bool = True,
) -> DecoderSpec:
    """Describes a decoder of this family: q/k norm before RoPE, no bias.

    Args:
        vocab_size: Rows of the embedding.
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        embed_dim: Hidden size.
        intermediate_dim: Width of the feed-forward network.
        head_dim: Head size. Default: 128.
        max_seq_len: Longest sequence in tokens. Default: 40960.
        norm_eps: Epsilon of the norms. Default: 1e-6.
        rope_base: RoPE base. Default: 1000000.
        tie_word_embeddings: The head is the embedding. Default: True.

    Returns:
        DecoderSpec: The numbers.
    """
    return DecoderSpec(
        family="qwen3",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        embed_dim=embed_dim,
        intermediate_dim=intermediate_dim,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        norm_eps=norm_eps,
        rope_base=rope_base,
        rope_scaling=None,
        qkv_bias=False,
        qk_norm=True,
        tie_word_embeddings=tie_word_embeddings,
    )


SPECS: dict[str, DecoderSpec] = {
    "qwen3_0_6b": qwen3_spec(
        vocab_size=151_936,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        embed_dim=1024,
        intermediate_dim=3072,
    ),
    "qwen3_1_7b": qwen3_spec(
        vocab_size=151_936,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        embed_dim=2048,
        intermediate_dim=6144,
    ),
    "qwen3_4b": qwen3_spec(
        vocab_size=151_936,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=2560,
        intermediate_dim=9728,
    ),
    "qwen3_8b": qwen3_spec(
        vocab_size=151_936,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=4096,
        intermediate_dim=12288,
        tie_word_embeddings=False,
    ),
    "qwen3_14b": qwen3_spec(
        vocab_size=151_936,
        num_layers=40,
        num_heads=40,
        num_kv_heads=8,
        embed_dim=5120,
        intermediate_dim=17408,
        tie_word_embeddings=False,
    ),
}


def qwen3_decoder(
    *, retained_layers: Iterable[int] | None = None, gdn: GdnConfig = None, **numbers: object
) -> HybridDecoder:
    """Builds a teacher or hybrid of this family from its numbers.

    Args:
        retained_layers: Layers that keep attention; None builds the teacher. Default: None.
        gdn: Shape of the Gated DeltaNet layers. Default: None, the defaults of ``GatedDeltaNetSpec``.
        **numbers: Arguments of ``qwen3_spec``.

    Returns:
        HybridDecoder: The model with freshly initialised weights.
    """
    return build_decoder(qwen3_spec(**numbers), retained_layers=retained_layers, gdn=gdn)  # type: ignore[arg-type]


qwen3_0_6b, qwen3_0_6b_hybrid = model_builders("qwen3_0_6b", SPECS["qwen3_0_6b"], module=__name__)
qwen3_1_7b, qwen3_1_7b_hybrid = model_builders("qwen3_1_7b", SPECS["qwen3_1_7b"], module=__name__)
qwen3_4b, qwen3_4b_hybrid = model_builders("qwen3_4b", SPECS["qwen3_4b"], module=__name__)
qwen3_8b, qwen3_8b_hybrid = model_builders("qwen3_8b", SPECS["qwen3_8b"], module=__name__)
qwen3_14b, qwen3_14b_hybrid = model_builders("qwen3_14b", SPECS["qwen3_14b"], module=__name__)
