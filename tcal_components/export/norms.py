"""Norms of an exported hybrid: weights stored as w - 1, exact powers of two folded away, and a norm that does nothing.

The exported class multiplies by ``1 + weight`` in every RMSNorm except the gated one of Gated DeltaNet.
"""

from __future__ import annotations

import base64
import math
import zlib
from functools import lru_cache
from typing import NamedTuple

import torch

# Smallest exponent that is folded: far below any trained norm weight, far above the subnormal range of bfloat16.
_MIN_EXPONENT = -60
# Size of the constant of `constant_dimension`; its square stays far from the largest float32 and bfloat16.
_CONSTANT_EXPONENT = 40


def split_norm(weight: torch.Tensor, *, dtype: torch.dtype, fold: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Splits norm weights w into the stored ``w' - 1`` and factors that the next linear layers take.

    In bfloat16 ``w - 1`` loses the low bits of a w below 1/2. There w = factor * w' with w' in [1/2, 1) and factor a
    signed power of two, so that scaling the columns of the linear layers that read the norm is exact. The split is
    idempotent: splitting ``factor * (1 + stored)`` again gives the same two tensors.

    Args:
        weight: Norm weights [E].
        dtype: Type of the stored weights.
        fold: Whether linear layers can take the factors. Not for q/k norms, nor the final norm before a tied head.

    Returns:
        tuple[torch.Tensor, torch.Tensor | None]: Stored weights [E] in ``dtype``, and factors [E] in float32 or None
        where every factor is 1.
    """
    w = weight.detach().float()
    if not fold:
        return (w - 1.0).to(dtype), None
    mantissa, exponent = torch.frexp(w.abs())
    # A mantissa that would round to 1 is the same number as 1/2 with the next exponent; only that form is stable.
    rounds_up = (mantissa - 1.0).to(dtype) == 0
    mantissa = torch.where(rounds_up, torch.full_like(mantissa, 0.5), mantissa)
    exponent = exponent + rounds_up.to(exponent.dtype)
    folded = (w < 0.5) & (w != 0) & (exponent >= _MIN_EXPONENT)
    factor = torch.where(folded, torch.sign(w) * _power_of_two(exponent), torch.ones_like(w))
    stored = (torch.where(folded, mantissa, w) - 1.0).to(dtype)
    return stored, None if bool((factor == 1).all()) else factor


def join_norm(stored: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Inverse of :func:`split_norm`: norm weights [E] in float32."""
    w = 1.0 + stored.float()
    return w if factor is None else w * factor


def pack_factors(factor: torch.Tensor) -> str:
    """Writes signed powers of two [E] as text: one byte each (sign and exponent), compressed, base64."""
    exponent = torch.frexp(factor.abs())[1] - 1
    code = (exponent + 64) + 128 * (factor < 0)
    return base64.b64encode(zlib.compress(bytes(code.tolist()), 9)).decode("ascii")


def unpack_factors(text: str) -> torch.Tensor:
    """Inverse of :func:`pack_factors`: float32 factors [E]."""
    code = torch.tensor(list(zlib.decompress(base64.b64decode(text))), dtype=torch.int32)
    sign = torch.where(code >= 128, -1.0, 1.0)
    return sign * _power_of_two(code % 128 - 64)


def pack_floats(values: torch.Tensor) -> str:
    """Writes float32 values [E] as base64 text, bit for bit."""
    return base64.b64encode(values.detach().float().contiguous().cpu().numpy().astype("<f4").tobytes()).decode("ascii")


def unpack_floats(text: str) -> torch.Tensor:
    """Inverse of :func:`pack_floats`."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).clone()


class ConstantDimension(NamedTuple):
    """Biases and norm weights with which the class's q/k norms only scale (see :func:`constant_dimension`)."""

    q_bias: float
    q_weight: float
    k_bias: float
    k_weight: float


@lru_cache(maxsize=16)
def constant_dimension(head_dim: int) -> ConstantDimension:
    """Finds the numbers that turn the q and k norms of a head of size D' = 2 D into plain scalings.

    A bias puts a huge constant C into dimension D of q and k; then the root mean square is C / sqrt(D') whatever the
    other dimensions hold, and the norm multiplies them by ``weight * sqrt(D') / C``. Scores must come out as
    ``q.k / sqrt(D)`` although the class scales by ``1 / sqrt(D')``, so

        q_weight * k_weight / (q_bias * k_bias) = 1 / (sqrt(D) * sqrt(2 D)) = 1 / (D * sqrt(2)).

    The right side is irrational. All four numbers have significands of 8 bits, so bfloat16 holds them, and are chosen
    so that the quotient is right to about 1e-8, below float32 rounding: a bfloat16 export carries no scale error.

    Args:
        head_dim: D.

    Returns:
        ConstantDimension: The four numbers; biases are near 2^40.
    """
    significands = torch.arange(128, 256, dtype=torch.float64)
    left, right = torch.triu_indices(128, 128)
    products, order = torch.sort(significands[left] * significands[right])
    target = head_dim * math.sqrt(2.0)
    scale = 2.0 ** math.floor(math.log2(target))
    best: tuple[float, int, int] | None = None
    for shift in (1.0, 2.0):  # the quotient of two products lies in (1/4, 4): target / scale, or half of it
        wanted = products * (target / scale / shift)
        index = torch.searchsorted(products, wanted).clamp(1, len(products) - 1)
        index = torch.where(wanted - products[index - 1] < products[index] - wanted, index - 1, index)
        error = (products[index] / wanted - 1.0).abs()
        denominator = int(error.argmin())
        candidate = (float(error[denominator]), int(index[denominator]), denominator)
        best = candidate if best is None or candidate[0] < best[0] else best
    assert best is not None
    biases, weights = order[best[1]], order[best[2]]
    q_bias, k_bias = (float(significands[i[biases]]) * 2.0 ** (_CONSTANT_EXPONENT - 7) for i in (left, right))
    q_weight = float(significands[left[weights]])
    k_weight = float(significands[right[weights]])
    # Powers of two: k keeps its size, q takes what is left to reach the target.
    k_weight *= 2.0 ** round(math.log2(k_bias / math.sqrt(2 * head_dim) / k_weight))
    q_weight *= 2.0 ** round(math.log2(q_bias * k_bias / (target * k_weight) / q_weight))
    return ConstantDimension(q_bias, q_weight, k_bias, k_weight)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    # Assembled from bits: a vectorised pow(2, n) need not be exact.
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
