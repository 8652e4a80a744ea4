"""The decoding cache of the Gated DeltaNet mixer."""

import torch
from torch import Tensor, nn


class GatedDeltaNetCache(nn.Module):
    """State of one mixer between decoding steps; the counterpart of torchtune's KVCache, of constant size.

    Args:
        batch_size (int): largest batch B.
        state_shape (tuple[int, int, int]): heads, key size and value size of the recurrent state.
        conv_channels (tuple[int, ...]): channels of the q, k and v convolutions; empty without convolution.
        conv_size (int): taps of the convolutions.
        dtype (torch.dtype): of the convolution states. The recurrent state is float32, or float64 for float64.
        device (torch.device | None): where the buffers lie.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        state_shape: tuple[int, int, int],
        conv_channels: tuple[int, ...],
        conv_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        state = torch.zeros(batch_size, *state_shape, dtype=state_dtype, device=device)
        self.register_buffer("state", state, persistent=False)
        for name, channels in zip("qkv", conv_channels):
            conv_state = torch.zeros(batch_size, conv_size - 1, channels, dtype=dtype, device=device)
            self.register_buffer(f"{name}_conv_state", conv_state, persistent=False)
        self.batch_size = batch_size

    def reset(self) -> None:
        """Clears all states."""
        for buffer in self.buffers():
            buffer.zero_()

    def read(self, name: str, batch_size: int) -> Tensor:
        """The first ``batch_size`` rows of the buffer ``name``."""
        rows = getattr(self, name)[:batch_size]
        # Autograd would hold rows that the next step overwrites.
        return rows.clone() if torch.is_grad_enabled() else rows

    @torch.no_grad()
    def write(self, name: str, value: Tensor | None) -> None:
        """Replaces the first rows of the buffer ``name`` by ``value``."""
        assert value is not None
        getattr(self, name)[: value.shape[0]].copy_(value)
