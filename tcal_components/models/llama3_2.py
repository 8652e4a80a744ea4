"""Llama-3.2 and models of its shape (SmolLM2): teachers and hybrids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tcal_components.models._decoder import GdnConfig, build_decoder, model_builders
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.spec import DecoderSpec

_LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_2_spec(
    *,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    embed_dim: int,
    intermediate_dim: int,
    head_dim: int | None = None,
    max_seq_len: int = 131_072,
    norm_eps: float = 1e-5,
    rope_base: float = 500_000.0,
    rope_scaling: Mapping[str, float] | None = None,
    tie_word_embeddings: bool = True,
) -> DecoderSpec:
    """Describes a decoder of this family: no bias, no q/k norm.

    Args:
        vocab_size: Rows of the embedding.
        num_layers: Layers.
        num_heads: Query heads.
        num_kv_heads: Key/value heads.
        embed_dim: Hidden size.
        intermediate_dim: Width of the feed-forward network.
        head_dim: Head size. Default: ``embed_dim // num_heads``.
        max_seq_len: Longest sequence in tokens. Default: 131072.
        norm_eps: Epsilon of the norms. Default: 1e-5.
        rope_base: RoPE base. Default: 500000.
        rope_scaling: llama3 scaling (see ``DecoderSpec``). Default: None.
        tie_word_embeddings: The head is the embedding. Default: True.

    Returns:
        DecoderSpec: The numbers.
    """
    return DecoderSpec(
        family="llama3_2",
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
        rope_scaling=None if rope_scaling is None else dict(rope_scaling),
        qkv_bias=False,
        qk_norm=False,
        tie_word_embeddings=tie_word_embeddings,
    )


SPECS: dict[str, DecoderSpec] = {
    "smollm2_135m": llama3_2_spec(
        vocab_size=49_152,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        embed_dim=576,
        intermediate_dim=1536,
        max_seq_len=8192,
        rope_base=100_000.0,
    ),
    "smollm2_360m": llama3_2_spec(
        vocab_size=49_152,
        num_layers=32,
        num_heads=15,
        num_kv_heads=5,
        embed_dim=960,
        intermediate_dim=2560,
        max_seq_len=8192,
        rope_base=100_000.0,
    ),
    "llama3_2_1b": llama3_2_spec(
        vocab_size=128_256,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        embed_dim=2048,
        intermediate_dim=8192,
        rope_scaling=_LLAMA3_SCALING,
    ),
    "llama3_2_3b": llama3_2_spec(
        vocab_size=128_256,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        embed_dim=3072,
        intermediate_dim=8192,
        rope_scaling=_LLAMA3_SCALING,
    ),
}


def llama3_2_decoder(
    *, retained_layers: Iterable[int] | None = None, gdn: GdnConfig = None, **numbers: object
) -> HybridDecoder:
    """Builds a teacher or hybrid of this family from its numbers.

    Args:
        retained_layers: Layers that keep attention; None builds the teacher. Default: None.
        gdn: Shape of the Gated DeltaNet layers. Default: None, the defaults of ``GatedDeltaNetSpec``.
        **numbers: Arguments of ``llama3_2_spec``.

    Returns:
        HybridDecoder: The model with freshly initialised weights.
    """
    return build_decoder(llama3_2_spec(**numbers), retained_layers=retained_layers, gdn=gdn)  # type: ignore[arg-type]


smollm2_135m, smollm2_135m_hybrid = model_builders("smollm2_135m", SPECS["smollm2_135m"], module=__name__)
smollm2_360m, smollm2_360m_hybrid = model_builders("smollm2_360m", SPECS["smollm2_360m"], module=__name__)
llama3_2_1b, llama3_2_1b_hybrid = model_builders("llama3_2_1b", SPECS["llama3_2_1b"], module=__name__)
llama3_2_3b, llama3_2_3b_hybrid = model_builders("llama3_2_3b", SPECS["llama3_2_3b"], module=__name__)
