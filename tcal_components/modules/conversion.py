"""Swapping a teacher's attention for mixers, for as long as something is measured.

A zero-shot student is its teacher with other mixers in some layers. Exchanging them in place needs no second copy of the
weights, and the layers that keep attention are the teacher's own, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.modules.gated_delta_net import GatedDeltaNet
from tcal_components.modules.spec import DecoderSpec, GatedDeltaNetSpec


def build_mixers(
    spec: DecoderSpec, gdn: GatedDeltaNetSpec, layers: Sequence[int], *, device: torch.device | str = "cpu"
) -> nn.ModuleDict:
    """One Gated DeltaNet for each converted layer, in float32.

    Args:
        spec: the teacher.
        gdn: sizes of the mixer.
        layers: indices of the converted layers.
        device: where the weights live.

    Returns:
        ModuleDict by layer index (as text); weights are library defaults.
    """
    with torch.device(device):
        return nn.ModuleDict(
            {
                str(layer): GatedDeltaNet(
                    embed_dim=spec.embed_dim,
                    num_heads=spec.num_heads,
                    key_head_dim=gdn.key_head_dim or spec.head_dim,
                    value_head_dim=gdn.value_head_dim or spec.head_dim,
                    conv_size=gdn.conv_size,
                    norm_eps=spec.norm_eps,
                )
                for layer in layers
            }
        )


def load_mixers(mixers: nn.ModuleDict, state_dict: Mapping[str, Tensor]) -> nn.ModuleDict:
    """Copy weights into mixers.

    Args:
        mixers: as :func:`build_mixers` returns them.
        state_dict: ``layers.{i}.attn.{name}`` to tensors; other names are left out.

    Returns:
        The same mixers.

    Raises:
        RuntimeError: a missing or unexpected name, or another shape.
    """
    for layer, mixer in mixers.items():
        prefix = f"layers.{layer}.attn."
        mixer.load_state_dict({k[len(prefix) :]: v for k, v in state_dict.items() if k.startswith(prefix)})
    return mixers


def student_state_dict(teacher: Mapping[str, Tensor], mixers: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of the hybrid: the teacher's, with the attention of converted layers replaced.

    Args:
        teacher: state dict of the teacher.
        mixers: ``layers.{i}.attn.{name}`` to tensors.

    Returns:
        State dict of the hybrid (tensors are shared, not copied).
    """
    replaced = tuple({".".join(name.split(".")[:3]) + "." for name in mixers})
    kept = (
        {name: value for name, value in teacher.items() if not name.startswith(replaced)} if replaced else dict(teacher)
    )
    return {**kept, **mixers}


@contextlib.contextmanager
def converted(model: nn.Module, mixers: nn.ModuleDict) -> Iterator[nn.Module]:
    """The model with its attention exchanged for the mixers, restored on exit.

    Args:
        model: a decoder with ``layers[i].attn``; sharded or not.
        mixers: by layer index, on the model's device.

    Yields:
        The same model object, computing as the hybrid.
    """
    blocks: Any = model.layers
    originals = {layer: blocks[int(layer)].attn for layer in mixers}
    try:
        for layer, mixer in mixers.items():
            blocks[int(layer)].attn = mixer
        yield model
    finally:
        for layer, attention in originals.items():
            blocks[int(layer)].attn = attention
