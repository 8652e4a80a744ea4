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
        dtype (torch.dtype): of the convolutions' inputs. The recurrent state is float32, or float64 for float64.
        device (torch.device | None): where the buffers lie.
    """

    state: Tensor

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
            # All W inputs, channels first, as flash-linear-attention's decoding kernel wants them.
            window = torch.zeros(batch_size, channels, conv_size, dtype=dtype, device=device)
            self.register_buffer(f"{name}_window", window, persistent=False)
        self.batch_size = batch_size

    def reset(self) -> None:
        """Clears all states."""
        for buffer in self.buffers():
            buffer.zero_()

    def state_before(self, batch_size: int) -> Tensor:
        """The recurrent state of the first ``batch_size`` rows, shape [B, H, K, V]."""
        return self._unshared(self.state[:batch_size])

    @torch.no_grad()
    def set_state(self, state: Tensor) -> None:
        """Replaces the state of the first rows."""
        self.state[: state.shape[0]].copy_(state)

    def window(self, name: str, batch_size: int) -> Tensor:
        """The last W inputs of the convolution ``name`` (q, k or v), to be changed in place, shape [B, C, W]."""
        rows: Tensor = self.get_buffer(f"{name}_window")[:batch_size]
        return rows

    def inputs_before(self, name: str, batch_size: int) -> Tensor:
        """What the convolution ``name`` reads before the next token, shape [B, W - 1, C]."""
        return self._unshared(self.window(name, batch_size)[..., 1:].mT)

    @torch.no_grad()
    def set_inputs(self, name: str, inputs: Tensor) -> None:
        """Replaces them in the first rows."""
        self.window(name, inputs.shape[0])[..., 1:].copy_(inputs.mT)

    @staticmethod
    def _unshared(rows: Tensor) -> Tensor:
        # Autograd would hold rows that the next step overwrites.
        return rows.clone() if torch.is_grad_enabled() else rows
