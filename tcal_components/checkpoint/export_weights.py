"""Weights of a hybrid under the names and in the shapes of transformers' Qwen3.5 text class.

One tensor at a time, so that a shard and not the model is the memory that an export needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F

from tcal_components.checkpoint.export_norms import (
    constant_dimension,
    join_norm,
    pack_factors,
    pack_floats,
    split_norm,
)
from tcal_components.models.spec import DecoderSpec, GatedDeltaNetSpec

CONV_SIZE = 4
MIXER_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
MLP_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


@dataclass(frozen=True)
class HybridLayout:
    """Everything about a hybrid that decides names and shapes.

    Args:
        spec: Numbers of the teacher.
        gdn: Shape of the Gated DeltaNet layers, head sizes filled in.
        retained_layers: Layers that keep attention, ascending.
        scale_by_norm: Whether the exported class normalises q and k although the student does not, so that its heads
            are enlarged (see ``constant_dimension``). Always True for such a student in the stock class.
    """

    spec: DecoderSpec
    gdn: GatedDeltaNetSpec
    retained_layers: tuple[int, ...]
    scale_by_norm: bool

    @property
    def exported_head_dim(self) -> int:
        """Head size of the exported attention: D, or 2 D."""
        return self.spec.head_dim * (2 if self.scale_by_norm else 1)

    @property
    def converted_layers(self) -> tuple[int, ...]:
        """Layers that hold a Gated DeltaNet, ascending."""
        return tuple(index for index in range(self.spec.num_layers) if index not in self.retained_layers)

    @property
    def exported_bias(self) -> bool:
        """Whether the exported attention has q, k and v biases."""
        return self.spec.qkv_bias or self.scale_by_norm

    def foldable(self, key: str) -> bool:
        """Whether linear layers can take the factors of the norm with student key ``key``."""
        if key == "norm.scale":
            return not self.spec.tie_word_embeddings
        return key.endswith((".sa_norm.scale", ".mlp_norm.scale"))


def student_shapes(layout: HybridLayout) -> dict[str, tuple[int, ...]]:
    """Lists the keys of a student's state dict with their shapes, in the order of the layers."""
    spec, gdn = layout.spec, layout.gdn
    hidden, heads, wide = spec.embed_dim, spec.num_heads, spec.intermediate_dim
    q_dim, kv_dim = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    assert gdn.key_head_dim is not None and gdn.value_head_dim is not None
    key_dim, value_dim = heads * gdn.key_head_dim, heads * gdn.value_head_dim
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        prefix = f"layers.{index}."
        attn: dict[str, tuple[int, ...]]
        if index in layout.retained_layers:
            attn = {
                "q_proj.weight": (q_dim, hidden),
                "k_proj.weight": (kv_dim, hidden),
                "v_proj.weight": (kv_dim, hidden),
                "output_proj.weight": (hidden, q_dim),
            }
            if spec.qkv_bias:
                attn |= {"q_proj.bias": (q_dim,), "k_proj.bias": (kv_dim,), "v_proj.bias": (kv_dim,)}
            if spec.qk_norm:
                attn |= {"q_norm.scale": (spec.head_dim,), "k_norm.scale": (spec.head_dim,)}
        else:
            sizes = (key_dim, key_dim, value_dim, value_dim, heads, heads)
            attn = {f"{name}.weight": (size, hidden) for name, size in zip(MIXER_PROJECTIONS, sizes)}
            attn["output_proj.weight"] = (hidden, value_dim)
            if gdn.conv_size:
                attn |= {f"{name[0]}_conv.weight": (size, 1, gdn.conv_size) for name, size in zip("qkv", sizes)}
            attn |= {"decay.A_log": (heads,), "decay.dt_bias": (heads,), "o_norm.scale": (gdn.value_head_dim,)}
        shapes |= {f"{prefix}attn.{name}": shape for name, shape in attn.items()}
        shapes |= {f"{prefix}mlp.{name}.weight": (wide, hidden) for name in ("w1", "w3")}
        shapes[f"{prefix}mlp.w2.weight"] = (hidden, wide)
        shapes |= {f"{prefix}{name}.scale": (hidden,) for name in ("sa_norm", "mlp_norm")}
    shapes["norm.scale"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["output.weight"] = (spec.vocab_size, hidden)
    return shapes


def check_state_dict(state_dict: Mapping[str, torch.Tensor], layout: HybridLayout) -> None:
    """Checks keys and shapes of a student's state dict.

    Raises:
        ValueError: For the first key that is missing, left over or of another shape.
    """
    shapes = student_shapes(layout)
    missing = [key for key in shapes if key not in state_dict]
    extra = [key for key in state_dict if key not in shapes]
    if missing or extra:
        parts = [
            f"{len(keys)} {what} (first: {keys[0]})"
            for keys, what in ((missing, "missing"), (extra, "unknown"))
            if keys
        ]
        raise ValueError(
            f"the student's state dict does not fit its specification: {' and '.join(parts)}; "
            f"retained layers are {list(layout.retained_layers)}"
        )
    for key, shape in shapes.items():
        if tuple(state_dict[key].shape) != shape:
            raise ValueError(f"{key} has shape {tuple(state_dict[key].shape)}; the specification says {shape}")


def parameter_count(layout: HybridLayout) -> int:
    """Counts the student's parameters."""
    return sum(prod(shape) for shape in student_shapes(layout).values())


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

    def _take(self, key: str, columns: torch.Tensor | None = None, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads one weight, rounded to the exported type and then scaled by powers of two (so the order is free)."""
        value = self._state_dict[key].detach().cpu().to(dtype or self._dtype)
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{key} has values that are not finite in {dtype or self._dtype}; the student cannot be exported"
            )
        return (value if columns is None else value * columns.to(value.dtype)).contiguous()

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
        # The gate's factor 1/2 is undone here; doubling is exact. (o_proj has a bias only by the class: left out.)
        weight = self._take(f"{source}output_proj.weight").unflatten(1, (-1, spec.head_dim)) * 2.0
        yield f"{target}o_proj.weight", F.pad(weight, (0, pad)).flatten(1).contiguous()
        for name in ("q", "k"):
            exported = f"{target}{name}_norm.weight"
            if constants is None:
                yield exported, self._norm(f"{source}{name}_norm.scale", exported)[0]
            else:
                weight = torch.zeros(size, dtype=torch.float64)
                weight[: spec.head_dim] = constants.q_weight if name == "q" else constants.k_weight
                # 0 on the constant's dimension: it reaches neither a score nor the cache.
                yield exported, (weight - 1.0).to(self._dtype)

    def _mixer(self, source: str, target: str, columns: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
        conv_size = self._layout.gdn.conv_size
        q, k, v, g, b, a = (self._take(f"{source}{name}.weight", columns) for name in MIXER_PROJECTIONS)
        yield f"{target}in_proj_qkv.weight", torch.cat([q, k, v])
        yield f"{target}in_proj_z.weight", g
        yield f"{target}in_proj_b.weight", b
        yield f"{target}in_proj_a.weight", a
        if conv_size:
            # Narrower convolutions get zero taps on the oldest tokens.
            taps = torch.cat([self._take(f"{source}{name}_conv.weight") for name in "qkv"])
            taps = F.pad(taps, (CONV_SIZE - conv_size, 0))
        else:
            taps = q.new_zeros(len(q) + len(k) + len(v), 1, CONV_SIZE)
            taps[..., -1] = 1.0
        yield f"{target}conv1d.weight", taps.contiguous()
        # float32: in bfloat16 the decay would be off by up to 2 %.
        yield f"{target}A_log", self._take(f"{source}decay.A_log", dtype=torch.float32)
        yield f"{target}dt_bias", self._take(f"{source}decay.dt_bias", dtype=torch.float32)
        yield f"{target}norm.weight", self._take(f"{source}o_norm.scale")
        yield f"{target}out_proj.weight", self._take(f"{source}output_proj.weight")


def rounded_parameter(key: str, value: torch.Tensor, *, layout: HybridLayout, dtype: torch.dtype) -> torch.Tensor:
    """Rounds one student weight as an export in ``dtype`` does; the result is float32 on the same device."""
    if key.endswith((".decay.A_log", ".decay.dt_bias")):
        return value.detach().float()
    if key.endswith((".o_norm.scale", ".weight", ".bias")):
        return value.detach().to(dtype).float()
    weight = value.detach().float()
    return join_norm(*split_norm(weight, dtype=dtype, fold=layout.foldable(key)))
