"""RMSNorm computed in float32 whatever the type of its scale."""

import torch
import torch.nn.functional as F
from torchtune import modules


class RMSNorm(modules.RMSNorm):
    """torchtune's RMSNorm with the scale upcast too.

    torchtune 0.6.1 upcasts only the input: with a bfloat16 scale torch then leaves its fused kernel and warns.

    Args:
        dim: Size of the last dimension.
        eps: Added to the mean square.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dimension.

        Args:
            x: Any shape [..., dim].

        Returns:
            torch.Tensor: Same shape and type as ``x``.
        """
        if x.device.type == "cuda" and x.dtype == self.scale.dtype:
            # The kernel computes in float32 by itself; upcast inputs would be kept for the backward pass, at twice the
            # memory. Autocast would upcast them too.
            with torch.autocast("cuda", enabled=False):
                return F.rms_norm(x, self.normalized_shape, self.scale, self.eps)
        return F.rms_norm(x.float(), self.normalized_shape, self.scale.float(), self.eps).to(x.dtype)
