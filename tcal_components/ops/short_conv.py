"""Short causal depthwise convolution over tokens, cut at document starts, with a state for decoding."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from tcal_components.ops.documents import Documents
from tcal_components.ops.kernels import fla_function


class _ShiftedTaps(torch.autograd.Function):
    """y[t] = sum over lags j of weight[j] * x[t - j], where the token t - j lies in the document of t.

    Written as shifted products: a width of 4 gives a grouped convolution nothing to gain, and the masks of document
    starts fit in exactly. The backward recomputes the masked shifts, so that only x is kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, age: Tensor | None) -> Tensor:
        # x: [B, L + T, C] with L = W - 1 tokens of history; weight: [C, W], last tap = current token; age: [B, T].
        ctx.save_for_backward(x, weight, age)
        lags = weight.shape[1] - 1
        length = x.shape[1] - lags
        y = x[:, lags:] * weight[:, lags]
        for lag in range(1, lags + 1):
            tap = x[:, lags - lag : lags - lag + length]
            if age is not None:
                tap = torch.where((age >= lag).unsqueeze(-1), tap, 0.0)
            y.addcmul_(tap, weight[:, lags - lag])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, age = ctx.saved_tensors
        lags = weight.shape[1] - 1
        length = x.shape[1] - lags
        dx = torch.zeros_like(x)
        dweight = torch.empty_like(weight)
        for lag in range(lags + 1):
            tap, dy_lag = x[:, lags - lag : lags - lag + length], dy
            if lag and age is not None:
                valid = (age >= lag).unsqueeze(-1)
                tap, dy_lag = torch.where(valid, tap, 0.0), torch.where(valid, dy, 0.0)
            dx[:, lags - lag : lags - lag + length].addcmul_(dy_lag, weight[:, lags - lag])
            dweight[:, lags - lag] = (tap * dy_lag).sum(dim=(0, 1))
        return dx, dweight, None


def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    documents: Documents | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution followed by SiLU.

    CUDA runs without a state go through flash-linear-attention's kernel, all others through PyTorch.

    Args:
        x (Tensor): input, shape [B, T, C].
        weight (Tensor): taps, shape [C, 1, W]; the last one weighs the current token (the layout of nn.Conv1d).
        documents (Documents | None): where documents start; no tap reaches over a start.
        initial_state (Tensor | None): the W - 1 inputs before the first token, oldest first, shape [B, W - 1, C];
            zeros where None. Not read in rows whose first token starts a document.
        output_final_state (bool): whether to return the state after the last token.

    Returns:
        tuple[Tensor, Tensor | None]: output, shape [B, T, C], in the dtype of ``x``; state, shape [B, W - 1, C].
    """
    lags = weight.shape[-1] - 1
    taps = weight.squeeze(1)
    state = None
    if output_final_state or initial_state is not None or not _use_fla(x):
        history = x.new_zeros(x.shape[0], lags, x.shape[2]) if initial_state is None else initial_state.to(x.dtype)
        padded = torch.cat([history, x], dim=1)
        if output_final_state:
            state = padded[:, padded.shape[1] - lags :]
            if documents is not None:
                # Inputs before the last start of the row are another document's (or padding).
                distance = torch.arange(lags - 1, -1, -1, device=x.device)
                state = torch.where((documents.age[:, -1:] >= distance).unsqueeze(-1), state, 0.0)
    if initial_state is None and _use_fla(x):
        return _fla_short_conv(x, taps, documents), state
    age = None if documents is None or not (documents.packed or initial_state is not None) else documents.age
    # Half precision is summed in float32, as the kernel does.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        y = F.silu(_ShiftedTaps.apply(padded.to(dtype), taps.to(dtype), age))
    return y.to(x.dtype), state


def short_conv_step(x: Tensor, weight: Tensor, *, window: Tensor) -> Tensor:
    """The convolution of :func:`short_conv` at one more token, for decoding without gradients.

    CUDA tensors go through one kernel of flash-linear-attention, all others through PyTorch.

    Args:
        x (Tensor): input, shape [B, 1, C].
        weight (Tensor): taps, shape [C, 1, W].
        window (Tensor): the last W inputs, oldest first, shape [B, C, W], contiguous; changed in place.

    Returns:
        Tensor: output, shape [B, 1, C], in the dtype of ``x``.
    """
    taps = weight.squeeze(1)
    if _use_fla(x):
        return _fla_short_conv_step(x, taps, window)
    window.copy_(torch.cat([window[..., 1:], x.mT.to(window.dtype)], dim=-1))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        y = F.silu((window.to(dtype) * taps.to(dtype)).sum(-1))
    return y.unsqueeze(1).to(x.dtype)


def _use_fla(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype != torch.float64


# The library's wrappers break torch.compile's graphs in many places; one break is enough.
@torch.compiler.disable
def _fla_short_conv(x: Tensor, taps: Tensor, documents: Documents | None) -> Tensor:
    causal_conv1d = fla_function("fla.modules.convolution", "causal_conv1d")
    batch, length = x.shape[:2]
    kwargs: dict[str, Tensor] = {}
    packed = documents if documents is not None and documents.packed else None
    if packed is not None:
        x = x.flatten(0, 1).unsqueeze(0)
        kwargs = {"cu_seqlens": packed.cu_seqlens, "cu_seqlens_cpu": packed.cu_seqlens_cpu}
    y, _ = causal_conv1d(x=x.contiguous(), weight=taps, activation="silu", **kwargs)
    return y.squeeze(0).unflatten(0, (batch, length)) if packed is not None else y


@torch.compiler.disable
def _fla_short_conv_step(x: Tensor, taps: Tensor, window: Tensor) -> Tensor:
    update = fla_function("fla.modules.causal_conv1d", "causal_conv1d_update")
    y: Tensor = update(x=x, cache=window, weight=taps, activation="silu")[0]
    return y
