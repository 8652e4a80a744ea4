"""Weights of a hybrid under the names and in the shapes of transformers' Qwen3.5 text class.

One tensor at a time, so that a shard and not the model is the memory that an export needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from tcal_components.export.layout import (
    CONV_SIZE,
    MIXER_PROJECTIONS,
    MLP_NAMES,
    HybridLayout,
    check_state_dict,
)
from tcal_components.export.norms import (
    constant_dimension,
    join_norm,
    pack_factors,
    pack_floats,
    split_norm,
)
from tcal_components.precision.dtypes import is_finite


class WeightExporter:
    """Turns a student's state dict into the exported tensors.

    Args:
        state_dict: Student weights, complete (not sharded), any float type, any device.
        layout: What the student is.
        dtype: Type of the exported weights; A_log and dt_bias stay float32.

    Attributes:
        norm_records (dict[str, dict[str, str]]): Filled while :meth:`tensors` runs: per exported norm the folded
            ``factors`` and, where ``w - 1`` is not reversible, the ``exact`` weights. Import needs them to give back
            the same bits.
    """

    def __init__(self, state_dict: Mapping[str, torch.Tensor], *, layout: HybridLayout, dtype: torch.dtype) -> None:
        check_state_dict(state_dict, layout)
        self._state_dict = state_dict
        self._layout = layout
        self._dtype = dtype
        self.norm_records: dict[str, dict[str, str]] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields exported names and contiguous tensors on the CPU.

        Raises:
            ValueError: For a weight that is not finite, or too large for ``dtype``.
        """
        layout = self._layout
        yield "model.embed_tokens.weight", self._take("tok_embeddings.weight")
        for index in range(layout.spec.num_layers):
            source, target = f"layers.{index}.", f"model.layers.{index}."
            stored, factor = self._norm(f"{source}sa_norm.scale", f"{target}input_layernorm.weight")
            yield f"{target}input_layernorm.weight", stored
            if index in layout.retained_layers:
                yield from self._attention(f"{source}attn.", f"{target}self_attn.", factor)
            else:
                yield from self._mixer(f"{source}attn.", f"{target}linear_attn.", factor)
            stored, factor = self._norm(f"{source}mlp_norm.scale", f"{target}post_attention_layernorm.weight")
            yield f"{target}post_attention_layernorm.weight", stored
            for name, exported in MLP_NAMES.items():
                columns = factor if name != "w2" else None
                yield f"{target}mlp.{exported}.weight", self._take(f"{source}mlp.{name}.weight", columns)
        stored, factor = self._norm("norm.scale", "model.norm.weight")
        yield "model.norm.weight", stored
        if not layout.spec.tie_word_embeddings:
            yield "lm_head.weight", self._take("output.weight", factor)

    def _take(
        self, key: str, scale: torch.Tensor | float | None = None, *, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Reads one weight, rounded to the exported type and then scaled by powers of two (so the order is free)."""
        value = self._state_dict[key].detach().to(dtype or self._dtype)  # where it lies: half the bytes to copy
        if scale is not None:
            value = value * torch.as_tensor(scale).to(value)
        if not is_finite(value):
            raise ValueError(
                f"{key} has values that are not finite in {dtype or self._dtype}; the student cannot be exported"
            )
        return value.cpu().contiguous()

    def _norm(self, key: str, exported: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight = self._take(key, dtype=torch.float32)
        stored, factor = split_norm(weight, dtype=self._dtype, fold=self._layout.foldable(key))
        record = {}
        if factor is not None:
            record["factors"] = pack_factors(factor)
        if self._dtype == torch.float32 and not torch.equal(join_norm(stored, factor), weight):
            record["exact"] = pack_floats(weight)
        if record:
            self.norm_records[exported] = record
        return stored, factor

    def _attention(self, source: str, target: str, columns: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        spec, size = self._layout.spec, self._layout.exported_head_dim
        pad = size - spec.head_dim
        constants = constant_dimension(spec.head_dim) if self._layout.scale_by_norm else None
        for name in ("q", "k", "v"):
            # [heads * D, E] -> [heads, D', E]; q has a gate of D' zero rows after each head: sigmoid(0) is 1/2.
            rows = pad + (size if name == "q" else 0)
            weight = self._take(f"{source}{name}_proj.weight", columns).unflatten(0, (-1, spec.head_dim))
            yield f"{target}{name}_proj.weight", F.pad(weight, (0, 0, 0, rows)).flatten(0, 1).contiguous()
            if self._layout.exported_bias:
                if spec.qkv_bias:
                    bias = self._take(f"{source}{name}_proj.bias").unflatten(0, (-1, spec.head_dim))
                else:
                    bias = weight.new_zeros(weight.shape[:2])
                bias = F.pad(bias, (0, rows))
                if constants is not None and name != "v":
                    bias[:, spec.head_dim] = constants.q_bias if name == "q" else constants.k_bias
                yield f"{target}{name}_proj.bias", bias.flatten().contiguous()
        # The gate's factor 1/2 is undone here; doubling is exact.
        weight = self._take(f"{source}output_proj.weight", 2.0).unflatten(1, (-1, spec.head_dim))
        yield f"{target}o_proj.weight", F.pad(weight, (0, pad)).flatten(1).contiguous()
        if self._layout.exported_bias:
            # The class gives o_proj a bias wherever q, k and v have one. Zeros, never left out: a quantised load
            # computes with whatever its memory held for a tensor that is missing.
            yield f"{target}o_proj.bias", weight.new_zeros(spec.embed_dim)
        for name in ("q", "k"):
            exported = f"{target}{name}_norm.weight"
            if spec.qk_norm:
                yield exported, self._norm(f"{source}{name}_norm.scale", exported)[0]
            elif constants is not None:
                weight = torch.zeros(size, dtype=torch.float64)
                weight[: spec.head_dim] = constants.q_weight if name == "q" else constants.k_weight
                # 0 on the constant's dimension: it reaches neither a score nor the cache.
                yield exported, (weight - 1.0).to(self._dtype)

    def _mixer(self, source: str, target: str, columns: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        conv_size, copies = self._layout.gdn.conv_size, self._layout.value_copies
        q, k, v, g, b, a = (self._take(f"{source}{name}.weight", columns) for name in MIXER_PROJECTIONS)
        v = self._value_heads(v, copied=True)
        yield f"{target}in_proj_qkv.weight", torch.cat([q, k, v])
        yield f"{target}in_proj_z.weight", self._value_heads(g)
        yield f"{target}in_proj_b.weight", b
        yield f"{target}in_proj_a.weight", a
        if conv_size:
            # Narrower convolutions get zero taps on the oldest tokens.
            q_taps, k_taps, v_taps = (self._take(f"{source}{name}_conv.weight") for name in "qkv")
            taps = torch.cat([q_taps, k_taps, self._value_heads(v_taps, copied=True)])
            taps = F.pad(taps, (CONV_SIZE - conv_size, 0))
        else:
            taps = q.new_zeros(len(q) + len(k) + len(v), 1, CONV_SIZE)
            taps[..., -1] = 1.0
        yield f"{target}conv1d.weight", taps.contiguous()
        # float32: in bfloat16 the decay would be off by up to 2 %.
        yield f"{target}A_log", self._take(f"{source}decay.A_log", dtype=torch.float32)
        yield f"{target}dt_bias", self._take(f"{source}decay.dt_bias", dtype=torch.float32)
        yield f"{target}norm.weight", self._take(f"{source}o_norm.scale").repeat(copies)
        out = self._take(f"{source}output_proj.weight")
        yield f"{target}out_proj.weight", self._value_heads(out.T).T.contiguous()

    def _value_heads(self, rows: torch.Tensor, *, copied: bool = False) -> torch.Tensor:
        """Enlarges value heads [H V, ...] to the exported size: by copies, or by zero rows where nothing reads them."""
        copies = self._layout.value_copies
        if copies == 1:
            return rows
        heads = rows.unflatten(0, (self._layout.spec.num_heads, -1))
        more = heads if copied else torch.zeros_like(heads)
        return torch.cat([heads, *[more] * (copies - 1)], dim=1).flatten(0, 1)


def rounded_parameter(key: str, value: torch.Tensor, *, layout: HybridLayout, dtype: torch.dtype) -> torch.Tensor:
    """Rounds one student weight as an export in ``dtype`` does; the result is float32 on the same device."""
    if key.endswith((".decay.A_log", ".decay.dt_bias")):
        return value.detach().float()
    if key.endswith((".o_norm.scale", ".weight", ".bias")):
        return value.detach().to(dtype).float()
    weight = value.detach().float()
    return join_norm(*split_norm(weight, dtype=dtype, fold=layout.foldable(key)))
