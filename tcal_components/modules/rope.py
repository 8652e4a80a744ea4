"""Rotary position embedding in the half-rotation form of Hugging Face checkpoints, with llama3 scaling.

Source: RoFormer, arXiv 2104.09864; the scaling is the one of Llama 3.1's release. Half rotation pairs dimension i with
i + D/2, so q and k weights of a Hugging Face folder are used without permuting their rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn


def rope_frequencies(dim: int, base: float, scaling: Mapping[str, float] | None = None) -> torch.Tensor:
    """Computes the angle per position of every dimension pair, in the order of operations that transformers uses.

    Args:
        dim: Head size D.
        base: RoPE base.
        scaling: None, or llama3 scaling: ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
            ``original_max_position_embeddings``.

    Returns:
        torch.Tensor: Radians per token, float32 [D / 2], on the CPU.
    """
    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))
    if scaling is None:
        return freqs
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    trained_len = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freqs
    # Waves longer than the trained context are slowed by the factor, short ones are kept, those between are blended.
    scaled = torch.where(wavelength > trained_len / low, freqs / factor, freqs)
    smooth = (trained_len / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (wavelength >= trained_len / high) & (wavelength <= trained_len / low)
    return torch.where(between, blended, scaled)


class HalfRotationRoPE(nn.Module):
    """Rotates (x_i, x_{i + D/2}) by the angle position * frequency_i.

    Built on the meta device, the table is filled by ``to_empty`` or, where only parameters get storage (FSDP2), by a call
    of ``rope_init`` under the device, which torchtune's recipes make.

    Args:
        dim: Head size D.
        max_seq_len: Positions in the table. Default: 4096.
        base: RoPE base. Default: 10000.
        scaling: llama3 scaling as in ``rope_frequencies``. Default: None.
    """

    table: torch.Tensor

    def __init__(
        self, *, dim: int, max_seq_len: int = 4096, base: float = 10_000.0, scaling: Mapping[str, float] | None = None
    ) -> None:
        super().__init__()
        self.dim = dim
        self.max_seq_len = max_seq_len
        self.base = base
        self.scaling = None if scaling is None else dict(scaling)
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.rope_init()

    def rope_init(self) -> None:
        """Fills the table of cosines and sines, float32 [max_seq_len, D] (first half cosines, second half sines)."""
        # The table's own device; but where it was built on meta and the caller says where the model now lives, there.
        device = self.table.device
        if device.type == "meta":
            device = torch.get_default_device()
        self._fill(device)

    def _fill(self, device: torch.device) -> None:
        freqs = rope_frequencies(self.dim, self.base, self.scaling).to(device)
        angles = torch.outer(torch.arange(self.max_seq_len, dtype=torch.float32, device=device), freqs)
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # Only the device may change: `to(bfloat16).float()` would leave rounded angles behind, and `to_empty` whatever
        # the memory held (more than once, since the layers share this module). An empty slice tells the new device.
        device = fn(self.table[:0]).device
        if device != self.table.device:
            if self.table.is_meta:
                self._fill(device)
            else:
                self.register_buffer("table", self.table.to(device), persistent=False)
        return self

    def forward(self, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
        """Rotates every head.

        Args:
            x: Queries or keys [B, T, H, D].
            input_pos: Positions [B, T], [T], or [B] when T is 1; None means 0 to T - 1.

        Returns:
            torch.Tensor: Rotated, [B, T, H, D], of the type of ``x``.
        """
        rows = self.table[: x.shape[1]] if input_pos is None else self.table[input_pos]
        # The leading -1 is B for positions of each sequence and 1 for shared ones.
        cos, sin = rows.view(-1, x.shape[1], 1, self.dim).to(x.dtype).chunk(2, dim=-1)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
