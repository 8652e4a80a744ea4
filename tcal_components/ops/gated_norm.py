"""Root mean square norm with a SiLU gate: flash-linear-attention's fused kernel on CUDA, PyTorch elsewhere."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tcal_components.ops.kernels import fla_function


def gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, *, eps: float) -> Tensor:
    """Computes ``x / sqrt(mean(x^2) + eps) * scale * silu(gate)`` over the last dimension, in float32 at least.

    Args:
        x (Tensor): input, shape [..., V].
        gate (Tensor): gate before SiLU, shape [..., V].
        scale (Tensor): shape [V].
        eps (float): added to the mean square.

    Returns:
        Tensor: shape [..., V], in the dtype of ``x``.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.device.type == "cuda" and dtype == torch.float32:
        return _fla_gated_rms_norm(x, gate.to(x.dtype), scale, eps)
    with torch.autocast(x.device.type, enabled=False):
        normed = F.rms_norm(x.to(dtype), (x.shape[-1],), scale.to(dtype), eps)
        return (normed * F.silu(gate.to(dtype))).to(x.dtype)


# The library's wrappers break torch.compile's graphs in many places; one break is enough.
@torch.compiler.disable
def _fla_gated_rms_norm(x: Tensor, gate: Tensor, scale: Tensor, eps: float) -> Tensor:
    rms_norm_gated = fla_function("fla.modules.fused_norm_gate", "rms_norm_gated")
    return rms_norm_gated(x, gate, scale, None, activation="swish", eps=eps)
