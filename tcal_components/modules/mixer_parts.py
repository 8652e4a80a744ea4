"""Parts of the Gated DeltaNet layer: convolution, decay, output norm."""

import math

import torch
from torch import Tensor, nn

from tcal_components.ops.documents import Documents
from tcal_components.ops.gated_delta_rule import log_decay
from tcal_components.ops.gated_norm import gated_rms_norm
from tcal_components.ops.short_conv import short_conv


class ShortConvolution(nn.Module):
    """Taps of a causal depthwise convolution with SiLU after it.

    Args:
        channels (int): number of channels C.
        size (int): number of taps W.
    """

    def __init__(self, *, channels: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-W ** -0.5, the default of nn.Conv1d, which flash-linear-attention's layer keeps."""
        bound = self.weight.shape[-1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(
        self,
        x: Tensor,
        *,
        documents: Documents | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See :func:`tcal_components.ops.short_conv.short_conv`."""
        return short_conv(
            x,
            self.weight,
            documents=documents,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )


@torch.no_grad()
def set_identity_conv_(conv: ShortConvolution) -> None:
    """Sets the taps of ``conv`` to the identity, in place: 1 at the current token, 0 before it."""
    conv.weight.zero_()
    conv.weight[..., -1] = 1.0


class DecayParameters(nn.Module):
    """Log decay of each head: ``g = -exp(A_log) * softplus(a + dt_bias)``, in float32.

    A module of its own, so that FSDP2 can keep it in float32: in bf16 the decay is off by up to 2 %.

    Args:
        num_heads (int): number of heads H.
    """

    def __init__(self, *, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The library default of flash-linear-attention: A ~ U(0, 16), softplus(dt_bias) log-uniform in [1e-3, 0.1]."""
        self.A_log.uniform_(0.0, 16.0).clamp_(min=1e-4).log_()
        self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp_()
        self.dt_bias.add_(torch.log(-torch.expm1(-self.dt_bias)))  # inverse of softplus

    def forward(self, a: Tensor) -> Tensor:
        """Computes the log decay.

        Args:
            a (Tensor): input-dependent part, shape [..., H].

        Returns:
            Tensor: log decay, negative, shape [..., H], float32 (float64 for float64 inputs).
        """
        return log_decay(a, self.A_log, self.dt_bias)


class GatedHeadRMSNorm(nn.Module):
    """Root mean square norm over the values of a head, times a SiLU gate; both computed in float32.

    Args:
        dim (int): value size V of a head.
        eps (float): added to the mean square.
    """

    def __init__(self, *, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        """Sets the scale to 1."""
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Computes ``rmsnorm(x) * scale * silu(gate)``.

        Args:
            x (Tensor): output of the recurrence, shape [..., V].
            gate (Tensor): gate before SiLU, shape [..., V].

        Returns:
            Tensor: shape [..., V], in the dtype of ``x``.
        """
        return gated_rms_norm(x, gate, self.scale, eps=self.eps)
