"""Rearrangements of copied weights: biases folded, heads repeated, signs."""

from __future__ import annotations

import torch
from torch import Tensor


def fold_bias(weight: Tensor, bias: Tensor, w_star: Tensor) -> Tensor:
    """W + b w*^T, which gives W x + b wherever w* . x = 1, for a student that has no bias.

    Args:
        weight: shape [F, E].
        bias: shape [F].
        w_star: shape [E].

    Returns:
        Tensor: shape [F, E].
    """
    return weight + bias[:, None] * w_star[None, :]


def expand_heads(weight: Tensor, num_kv_heads: int, num_heads: int) -> Tensor:
    """Expands a key or value projection from H_kv to H heads by whole heads.

    Query head h reads key head h // (H / H_kv). Repeating the rows of the 2-D matrix instead would scramble every head.

    Args:
        weight: shape [H_kv D, ...].
        num_kv_heads: H_kv.
        num_heads: H.

    Returns:
        Tensor: shape [H D, ...].
    """
    heads = weight.unflatten(0, (num_kv_heads, -1))
    return heads.repeat_interleave(num_heads // num_kv_heads, dim=0).flatten(0, 1)


def signed_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Per head [W; -W]: silu(W x) and silu(-W x) together keep both signs, and silu(z) - silu(-z) = z.

    Args:
        weight: shape [H D, E].
        num_heads: H.

    Returns:
        Tensor: shape [2 H D, E].
    """
    heads = weight.unflatten(0, (num_heads, -1))
    return torch.cat([heads, -heads], dim=1).flatten(0, 1)


def signed_columns(weight: Tensor, num_heads: int) -> Tensor:
    """Columns of an output projection that read values made by :func:`signed_rows`: per head [W, -W].

    Args:
        weight: shape [E, H D].
        num_heads: H.

    Returns:
        Tensor: shape [E, 2 H D].
    """
    return signed_rows(weight.T, num_heads).T.contiguous()
