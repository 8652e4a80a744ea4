"""Copies a teacher's attention projections into a Gated DeltaNet layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from tcal_components.initialize.weights import expand_heads, fold_bias, signed_columns, signed_rows
from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.mixer_parts import set_identity_conv_
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec


@dataclass(frozen=True, eq=False)
class TeacherAttention:
    """Whole float32 weights of one attention layer, k and v already expanded from H_kv to H heads.

    Attributes:
        num_heads: H.
        q, k, v: projections, shape [H D, E].
        output: output projection, shape [E, H D].
        q_bias, k_bias, v_bias: shape [H D], or None.
        q_scale, k_scale: weight of the norm of each head, shape [D], or None.
    """

    num_heads: int
    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_scale: Tensor | None
    k_scale: Tensor | None

    @property
    def drops(self) -> list[str]:
        """What a student without fold loses besides RoPE: ``qkv_bias`` and ``qk_norm`` where the teacher has them."""
        found = {"qkv_bias": self.q_bias, "qk_norm": self.q_scale}
        return [name for name, value in found.items() if value is not None]


def whole(tensor: Tensor) -> Tensor:
    """A sharded parameter gathered (every process must call this), a plain one as it is; detached.

    Args:
        tensor: plain tensor or DTensor.

    Returns:
        Tensor: plain tensor.
    """
    gathered = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


def read_attention(attention: Any, spec: DecoderSpec, device: torch.device) -> TeacherAttention:
    """Reads the weights of one attention layer, sharded or not.

    Args:
        attention: torchtune's ``MultiHeadAttention`` or a subclass.
        spec: the teacher.
        device: where the copy goes.

    Returns:
        TeacherAttention: float32 weights.
    """

    def read(tensor: Tensor | None, expand: bool = False) -> Tensor | None:
        if tensor is None:
            return None
        value = whole(tensor)
        if isinstance(value, TorchAOBaseTensor):  # a teacher quantised to float8
            value = value.dequantize()
        value = value.to(device=device, dtype=torch.float32)
        return expand_heads(value, spec.num_kv_heads, spec.num_heads) if expand else value

    values: dict[str, Any] = {"q": read(attention.q_proj.weight), "output": read(attention.output_proj.weight)}
    values["q_bias"] = read(attention.q_proj.bias)
    for name in ("k", "v"):
        linear = getattr(attention, f"{name}_proj")
        values[name] = read(linear.weight, expand=True)
        values[f"{name}_bias"] = read(linear.bias, expand=True)
    for name in ("q", "k"):
        norm = getattr(attention, f"{name}_norm")
        values[f"{name}_scale"] = None if norm is None else read(norm.scale)
    return TeacherAttention(num_heads=spec.num_heads, **values)


def check_head_sizes(spec: DecoderSpec, gdn: GatedDeltaNetSpec) -> None:
    """Refuses head sizes that no copy of the teacher's projections fills.

    Args:
        spec: the teacher.
        gdn: sizes of the mixer.

    Raises:
        ValueError: a head size that is neither the teacher's nor twice that.
    """
    for name in ("key_head_dim", "value_head_dim"):
        size = getattr(gdn, name) or spec.head_dim
        if size not in (spec.head_dim, 2 * spec.head_dim):
            raise ValueError(
                f"gdn.{name} is {size}; the teacher's projections fill {spec.head_dim} (its head size) or "
                f"{2 * spec.head_dim} (signed features)"
            )


@torch.no_grad()
def copy_projections_(mixer: GatedDeltaNet, source: TeacherAttention, *, w_star: Tensor | None = None) -> None:
    """Copies W_q, W_k, W_v and W_o into ``mixer`` and makes its convolutions the identity, in place.

    A key size of 2 D takes signed features, [W; -W] per head. So does a value size of 2 D, with [W_o, -W_o] to read
    them: silu(z) - silu(-z) = z, so the layer starts from the teacher's own, linear values.

    Args:
        mixer: its other parameters stay.
        source: weights of the teacher.
        w_star: if given, what the student has no parameter for is folded into the projections: biases along w*
            (shape [E], w* . x close to 1), and the weights of the q/k norms into the rows of W_q and W_k.
    """
    heads = source.num_heads
    head_dim = source.q.shape[0] // heads
    for name in ("q", "k", "v"):
        weight = getattr(source, name)
        if w_star is not None:
            bias, scale = getattr(source, f"{name}_bias"), getattr(source, f"{name}_scale", None)
            if bias is not None:
                weight = fold_bias(weight, bias, w_star)
            if scale is not None:
                weight = weight * scale.repeat(heads)[:, None]
        linear = getattr(mixer, f"{name}_proj")
        size = linear.weight.shape[0] // heads
        linear.weight.copy_(signed_rows(weight, heads) if size == 2 * head_dim else weight)
        conv = getattr(mixer, f"{name}_conv")
        if conv is not None:
            set_identity_conv_(conv)
    signed = mixer.value_head_dim == 2 * head_dim
    mixer.output_proj.weight.copy_(signed_columns(source.output, heads) if signed else source.output)


def read_values(output: Tensor, head_dim: int) -> Tensor:
    """The part of a state output that compares with the teacher's context.

    Args:
        output: shape [..., V] with V = D, or V = 2 D with signed values.
        head_dim: D.

    Returns:
        Tensor: shape [..., D]; for signed values the first half minus the second.
    """
    if output.shape[-1] == head_dim:
        return output
    positive, negative = output.split(head_dim, dim=-1)
    return positive - negative
