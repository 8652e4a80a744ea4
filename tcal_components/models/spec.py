"""What a decoder is made of: the numbers of a teacher and of the Gated DeltaNet layers that replace some of its attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

FAMILIES = ("llama3_2", "qwen2_5", "qwen3")
ROPE_SCALING_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class DecoderSpec:
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

    family: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    embed_dim: int
    intermediate_dim: int
    head_dim: int
    max_seq_len: int
    norm_eps: float
    rope_base: float
    rope_scaling: dict[str, float] | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family is {self.family!r}; allowed: {', '.join(FAMILIES)}")
        for name in (
            "vocab_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "embed_dim",
            "intermediate_dim",
            "head_dim",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; it must be even, because RoPE rotates its two halves")
        if self.rope_scaling is not None and set(self.rope_scaling) != set(ROPE_SCALING_KEYS):
            raise ValueError(
                f"rope_scaling has keys {sorted(self.rope_scaling)}; llama3 scaling needs {', '.join(ROPE_SCALING_KEYS)}"
            )

    def with_max_seq_len(self, max_seq_len: int | None) -> DecoderSpec:
        """Returns this spec for another longest position; None keeps it."""
        return self if max_seq_len is None else replace(self, max_seq_len=max_seq_len)


@dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Shape of the Gated DeltaNet layers of a hybrid (config key ``model.gdn``).

    Args:
        conv_size: Width of the short causal convolution on q, k and v; 0 means none. Default: 4.
        key_head_dim: Size of one q/k head. None means the teacher's ``head_dim``; twice that gives room for signed
            features (W and -W). Default: None.
        value_head_dim: Size of one v head. None means the teacher's ``head_dim``. Default: None.

    Raises:
        ValueError: If a number is out of range.
    """

    conv_size: int = 4
    key_head_dim: int | None = None
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        _check_int("conv_size", self.conv_size, at_least=0)
        for name in ("key_head_dim", "value_head_dim"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), at_least=1)

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
        if gdn is None:
            return cls()
        if isinstance(gdn, cls):
            return gdn
        allowed = [field.name for field in fields(cls)]
        if not isinstance(gdn, Mapping):
            raise ValueError(f"gdn is {gdn!r}; it must be a mapping with keys of {', '.join(allowed)}")
        unknown = [str(key) for key in gdn if key not in allowed]
        if unknown:
            raise ValueError(f"unknown key {unknown[0]!r} in gdn; allowed: {', '.join(allowed)}")
        return cls(**{str(key): gdn[key] for key in gdn})

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
        raise ValueError(f"retained_layers is {retained_layers!r}; it must be a list of layer indices")
    layers = list(retained_layers)
    for index in layers:
        if isinstance(index, bool) or not isinstance(index, int):
            raise ValueError(f"retained_layers contains {index!r}; layer indices are integers")
        if not 0 <= index < num_layers:
            raise ValueError(
                f"retained_layers contains {index}; the teacher has {num_layers} layers, so 0 to {num_layers - 1} is allowed"
            )
    repeated = sorted({index for index in layers if layers.count(index) > 1})
    if repeated:
        raise ValueError(f"retained_layers contains layer {repeated[0]} more than once")
    return tuple(sorted(layers))


def _check_int(name: str, value: Any, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"gdn.{name} is {value!r}; it must be an integer of at least {at_least}")
