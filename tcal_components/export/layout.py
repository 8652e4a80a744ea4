"""Names and shapes of a hybrid's weights: in the student's state dict and in an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec

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
        pad_values: Whether value heads smaller than key heads are enlarged to them in the export, for engines that know
            one head size. Only where copies of the values fill a key head: then the norm after the recurrence takes its
            mean over the same numbers, and nothing is rounded.
    """

    spec: DecoderSpec
    gdn: GatedDeltaNetSpec
    retained_layers: tuple[int, ...]
    scale_by_norm: bool
    pad_values: bool = False

    @property
    def exported_head_dim(self) -> int:
        """Head size of the exported attention: D, or 2 D."""
        return self.spec.head_dim * (2 if self.scale_by_norm else 1)

    @property
    def value_copies(self) -> int:
        """How often an exported value head holds the student's."""
        keys, values = self.gdn.key_head_dim, self.gdn.value_head_dim
        assert keys is not None and values is not None
        return keys // values if self.pad_values and keys % values == 0 else 1

    @property
    def exported_value_dim(self) -> int:
        """Size of an exported value head."""
        assert self.gdn.value_head_dim is not None
        return self.gdn.value_head_dim * self.value_copies

    @property
    def converted_layers(self) -> tuple[int, ...]:
        """Layers that hold a Gated DeltaNet, ascending."""
        return tuple(index for index in range(self.spec.num_layers) if index not in self.retained_layers)

    @property
    def exported_bias(self) -> bool:
        """Whether the exported attention has biases."""
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


def exported_shapes(layout: HybridLayout) -> dict[str, tuple[int, ...]]:
    """Lists the names of an export's tensors with their shapes."""
    spec, gdn, size = layout.spec, layout.gdn, layout.exported_head_dim
    hidden, heads, wide = spec.embed_dim, spec.num_heads, spec.intermediate_dim
    assert gdn.key_head_dim is not None
    value_dim = heads * layout.exported_value_dim
    channels = 2 * heads * gdn.key_head_dim + value_dim
    rows = {"q_proj": 2 * heads * size, "k_proj": spec.num_kv_heads * size, "v_proj": spec.num_kv_heads * size}
    attention: dict[str, tuple[int, ...]] = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
    attention["o_proj.weight"] = (hidden, heads * size)
    if layout.exported_bias:
        attention |= {f"{name}.bias": (count,) for name, count in rows.items()}
        attention["o_proj.bias"] = (hidden,)
    if spec.qk_norm or layout.scale_by_norm:
        attention |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    mixer: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (channels, hidden),
        "in_proj_z.weight": (value_dim, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (channels, 1, CONV_SIZE),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (layout.exported_value_dim,),
        "out_proj.weight": (hidden, value_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (spec.vocab_size, hidden)}
    for index in range(spec.num_layers):
        prefix, retained = f"model.layers.{index}.", index in layout.retained_layers
        name, module = ("self_attn", attention) if retained else ("linear_attn", mixer)
        shapes |= {f"{prefix}{name}.{key}": shape for key, shape in module.items()}
        shapes |= {f"{prefix}mlp.{key}.weight": (wide, hidden) for key in ("gate_proj", "up_proj")}
        shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, wide)
        shapes |= {f"{prefix}{key}.weight": (hidden,) for key in ("input_layernorm", "post_attention_layernorm")}
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
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
