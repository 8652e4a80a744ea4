"""What a decoder is made of: the numbers of a teacher and of the Gated DeltaNet layers that replace some of its attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from tcal_components.config import ConfigError, OneOf, Range, Settings, section
from tcal_components.config.schema import shown

FAMILIES = ("llama3_2", "qwen2_5", "qwen3")
ROPE_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

# Far above any published teacher of these families, and small enough that a model's outline is built in seconds.
Layers = Annotated[int, Range(1, 1000)]
Heads = Annotated[int, Range(1, 1024)]
HeadDim = Annotated[int, Range(1, 2048)]
Width = Annotated[int, Range(1, 2**18)]
Vocabulary = Annotated[int, Range(1, 2**21)]
Positions = Annotated[int, Range(1, 2**22)]
Epsilon = Annotated[float, Range(above=0, most=1)]
RopeBase = Annotated[float, Range(least=1, most=1e15)]
RopeNumber = Annotated[float, Range(above=0, most=1e9)]


@dataclass(frozen=True)
class DecoderSpec(Settings):
    """Architecture of one teacher.

    Args:
        family: One of ``FAMILIES``.
        vocab_size: Rows of the embedding, padding rows included.
        num_layers: Transformer layers.
        num_heads: Query heads H.
        num_kv_heads: Key and value heads; divides ``num_heads``.
        embed_dim: Hidden size E.
        intermediate_dim: Width of the gated feed-forward network.
        head_dim: Size D of one head; not necessarily ``embed_dim / num_heads``. Even, because RoPE rotates halves.
        max_seq_len: Longest position the model is built for, in tokens.
        norm_eps: Epsilon of every RMSNorm.
        rope_base: RoPE base (theta).
        rope_scaling: None, or the four ``ROPE_SCALING_KEYS`` of llama3 scaling.
        qkv_bias: The q, k and v projections have a bias (Qwen2.5).
        qk_norm: RMSNorm on every head of q and k before RoPE (Qwen3).
        tie_word_embeddings: The output head is the embedding matrix.

    Raises:
        ValueError: If the numbers do not fit each other.
    """

    family: Annotated[str, OneOf(FAMILIES)]
    vocab_size: Vocabulary
    num_layers: Layers
    num_heads: Heads
    num_kv_heads: Heads
    embed_dim: Width
    intermediate_dim: Width
    head_dim: HeadDim
    max_seq_len: Positions
    norm_eps: Epsilon
    rope_base: RopeBase
    rope_scaling: dict[str, RopeNumber] | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim is {self.head_dim}; it must be even, because RoPE rotates its two halves")
        if self.rope_scaling is not None:
            if set(self.rope_scaling) != set(ROPE_SCALING_KEYS):
                raise ConfigError(
                    f"rope_scaling has keys {sorted(self.rope_scaling)}; llama3 scaling needs "
                    f"{', '.join(ROPE_SCALING_KEYS)}"
                )
            if self.rope_scaling["low_freq_factor"] >= self.rope_scaling["high_freq_factor"]:
                raise ConfigError(
                    f"rope_scaling is {self.rope_scaling}, expected low_freq_factor below high_freq_factor"
                )

    def with_max_seq_len(self, max_seq_len: int | None) -> DecoderSpec:
        """Returns this spec for another longest position; None keeps it."""
        return self if max_seq_len is None else replace(self, max_seq_len=max_seq_len)


@dataclass(frozen=True)
class GatedDeltaNetSpec(Settings):
    """Shape of the Gated DeltaNet layers of a hybrid (config key ``model.gdn``).

    Args:
        conv_size: Width of the short causal convolution on q, k and v; 0 means none. Default: 4.
        key_head_dim: Size of one q/k head. None means the teacher's ``head_dim``; twice that gives room for signed
            features (W and -W). Default: None.
        value_head_dim: Size of one v head. None means the teacher's ``head_dim``. Default: None.
    """

    conv_size: Annotated[int, Range(0, 64)] = 4
    key_head_dim: HeadDim | None = None
    value_head_dim: HeadDim | None = None

    @classmethod
    def from_config(cls, gdn: GatedDeltaNetSpec | Mapping[str, Any] | None) -> GatedDeltaNetSpec:
        """Reads the config key ``gdn``.

        Args:
            gdn: None (all defaults), a mapping such as a dict or an OmegaConf DictConfig, or a spec.

        Returns:
            GatedDeltaNetSpec: The spec.

        Raises:
            ValueError: For an unknown key or a value out of range.
        """
        return gdn if isinstance(gdn, GatedDeltaNetSpec) else section(cls, gdn, "gdn")

    def resolve(self, spec: DecoderSpec) -> GatedDeltaNetSpec:
        """Returns this spec with the head sizes that were left to the teacher filled in."""
        return replace(
            self,
            key_head_dim=self.key_head_dim or spec.head_dim,
            value_head_dim=self.value_head_dim or spec.head_dim,
        )


def check_retained_layers(retained_layers: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Checks and sorts the layers that keep attention.

    Args:
        retained_layers: Layer indices from 0, in any order; empty converts every layer.
        num_layers: Layers of the teacher.

    Returns:
        tuple[int, ...]: The indices in ascending order.

    Raises:
        ValueError: For an index that is not an integer, out of range or given twice.
    """
    if isinstance(retained_layers, (str, bytes)) or not isinstance(retained_layers, Iterable):
        raise ValueError(f"retained_layers is {shown(retained_layers)}; it must be a list of layer indices")
    layers = list(retained_layers)
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"retained_layers contains {shown(index)}; layer indices are integers")
        if not 0 <= index < num_layers:
            raise ValueError(
                f"retained_layers contains {index}; the teacher has {num_layers} layers, so 0 to {num_layers - 1} is allowed"
            )
    repeated = sorted(index for index, count in Counter(layers).items() if count > 1)
    if repeated:
        raise ValueError(f"retained_layers contains layer {repeated[0]} more than once")
    return tuple(sorted(layers))
