"""Floating-point operations of a training step in closed form, for benchmarks."""

from __future__ import annotations

from collections.abc import Sequence

from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

# Tokens of a chunk of the gated delta rule on CUDA.
CHUNK = 64

FORMULA = (
    "FLOPs a token. Forward: 2 per weight of every matrix product (head included, embedding, norms and convolutions not); "
    "attention 4 H D (attended tokens, causal and within the document); gated delta rule H (6 K V + 64 (6 K + 4 V)). "
    "Distillation: teacher forward + 3 x student forward. Alignment: teacher forward without head + mixers: 2 x their "
    "input projections (no gradient of the input), 3 x output projection, 3 x gated delta rule. Recomputation for "
    "activation checkpointing is not counted."
)


class ModelFlops:
    """Forward FLOPs a token of a teacher and of its hybrid, by part; see ``FORMULA``.

    Args:
        spec: numbers of the teacher.
        retained_layers: layers that keep attention in the hybrid.
        gdn: sizes of the mixers.
        attended: mean number of tokens that a token attends to.
    """

    def __init__(
        self, spec: DecoderSpec, *, retained_layers: Sequence[int], gdn: GatedDeltaNetSpec, attended: float
    ) -> None:
        gdn = gdn.resolve(spec)
        assert gdn.key_head_dim is not None and gdn.value_head_dim is not None
        embed, heads, head_dim = spec.embed_dim, spec.num_heads, spec.head_dim
        key, value = gdn.key_head_dim, gdn.value_head_dim
        self.layers, self.converted = spec.num_layers, spec.num_layers - len(retained_layers)
        self.head = 2.0 * spec.vocab_size * embed
        self.mlp = 2.0 * 3 * embed * spec.intermediate_dim
        projections = 2.0 * embed * head_dim * (2 * heads + 2 * spec.num_kv_heads)
        self.attention = projections + 4.0 * heads * head_dim * attended
        self.mixer_inputs = 2.0 * embed * heads * (2 * key + 2 * value + 2)
        self.mixer_output = 2.0 * embed * heads * value
        self.recurrence = heads * (6.0 * key * value + CHUNK * (6.0 * key + 4.0 * value))

    def distillation(self) -> float:
        """FLOPs a token of a distillation step."""
        layers = self.layers * (self.mlp + self.attention)
        mixer = self.mixer_inputs + self.mixer_output + self.recurrence
        student = layers + self.converted * (mixer - self.attention) + self.head
        return layers + self.head + 3.0 * student

    def alignment(self) -> float:
        """FLOPs a token of an alignment step of all converted layers."""
        mixer = 2.0 * self.mixer_inputs + 3.0 * self.mixer_output + 3.0 * self.recurrence
        return self.layers * (self.mlp + self.attention) + self.converted * mixer
