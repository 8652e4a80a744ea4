"""Exact streaming sums over the attention of one layer, one block of queries at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from tcal_components.measure.capture import AttentionCapture


@dataclass
class LayerSums:
    """Sums over tokens of one layer, float64. Counts are sums too, so that processes simply add everything.

    Attributes:
        tokens: number of tokens, scalar.
        later_tokens: tokens that are not the first of their document, scalar.
        distance: sum of sum_j A(t, j)(t - j), shape [H].
        entropy: sum of entropy / log(t + 1) over later tokens, shape [H].
        sink: sum of the attention on position 0 over later tokens, shape [H].
        histogram: attention without position 0 by distance, shape [H, max_distance].
        context_square: sum of |c|^2 / D, shape [H].
        output_square: sum of |y|^2 / E, scalar.
        x: sum of x, shape [E].
        gram: sum of x x^T, shape [E, E].
    """

    tokens: Tensor
    later_tokens: Tensor
    distance: Tensor
    entropy: Tensor
    sink: Tensor
    histogram: Tensor
    context_square: Tensor
    output_square: Tensor
    x: Tensor
    gram: Tensor

    @classmethod
    def zeros(cls, *, num_heads: int, embed_dim: int, max_distance: int, device: torch.device) -> LayerSums:
        """Empty sums.

        Args:
            num_heads: H.
            embed_dim: E.
            max_distance: longest sequence T.
            device: where the sums live.

        Returns:
            LayerSums: all zero.
        """
        shapes: dict[str, tuple[int, ...]] = {
            "tokens": (),
            "later_tokens": (),
            "histogram": (num_heads, max_distance),
            "output_square": (),
            "x": (embed_dim,),
            "gram": (embed_dim, embed_dim),
        }
        per_head = (num_heads,)
        return cls(
            **{
                item.name: torch.zeros(shapes.get(item.name, per_head), dtype=torch.float64, device=device)
                for item in fields(cls)
            }
        )

    def add_(self, capture: AttentionCapture, document: Tensor, block_size: int) -> None:
        """Adds the tokens of one captured layer.

        Args:
            capture: with q, k, v and context.
            document: id of each token's document, shape [B, T]; -1 is padding.
            block_size: queries per block; memory is B x H x block_size x T.
        """
        valid = document >= 0
        x = capture.x[valid].double()
        assert capture.context is not None
        context = capture.context.transpose(1, 2)[valid].double()  # [N, H, D]
        self.tokens += valid.sum()
        self.x += x.sum(dim=0)
        self.gram += x.T @ x
        self.context_square += context.square().mean(dim=-1).sum(dim=0)
        self.output_square += capture.y[valid].double().square().mean(dim=-1).sum()
        self._add_attention(capture, document, block_size)

    def _add_attention(self, capture: AttentionCapture, document: Tensor, block_size: int) -> None:
        q, k = capture.q, capture.k
        assert q is not None and k is not None
        length, head_dim = q.shape[2], q.shape[3]
        if length > self.histogram.shape[1]:
            raise ValueError(
                f"sequence of {length} tokens, but the statistics were set up for {self.histogram.shape[1]}"
            )
        compute = torch.promote_types(q.dtype, torch.float32)
        positions = document_positions(document)
        is_start = positions == 0
        index = torch.arange(length, device=q.device)
        keys = k.to(compute)
        for begin in range(0, length, block_size):
            end = min(begin + block_size, length)
            # Keys after the block are never attended to: [B, 1, block, end]
            distance = index[begin:end, None] - index[None, :end]
            same = document[:, begin:end, None] == document[:, None, :end]
            allowed = (same & (distance >= 0))[:, None]
            valid = (document[:, begin:end] >= 0)[:, None, :, None]
            scores = (q[:, :, begin:end].to(compute) * head_dim**-0.5) @ keys[:, :, :end].transpose(-1, -2)
            log_attention = scores.masked_fill(~allowed, float("-inf")).log_softmax(dim=-1)
            attention = log_attention.exp() * valid
            self.distance += torch.einsum("bhts,ts->h", attention, distance.to(compute)).double()
            entropy = -(attention * log_attention.masked_fill(~allowed, 0.0)).sum(dim=-1)  # [B, H, block]
            position = positions[:, None, begin:end]
            later = (position > 0) & valid[..., 0]
            # log(t + 1) is 0 for a first token, whose entropy says nothing.
            share = entropy / torch.log1p(position.clamp_min(1).to(compute))
            self.entropy += (share * later).sum(dim=(0, 2), dtype=torch.float64)
            on_start = is_start[:, None, None, :end]
            self.sink += ((attention * on_start).sum(dim=-1) * later).sum(dim=(0, 2), dtype=torch.float64)
            self.later_tokens += later.sum()
            elsewhere = attention.masked_fill(on_start, 0.0).sum(dim=0, dtype=torch.float64)
            self.histogram.index_add_(1, distance.clamp_min(0).flatten(), elsewhere.flatten(1))


def document_positions(document: Tensor) -> Tensor:
    """Position of each token in its document.

    Args:
        document: ids, shape [B, T]; a document is a run of equal ids.

    Returns:
        Tensor: int64, shape [B, T], 0 at the first token of each run.
    """
    index = torch.arange(document.shape[1], device=document.device).expand_as(document)
    starts = torch.ones_like(document, dtype=torch.bool)
    starts[:, 1:] = document[:, 1:] != document[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values


def batch_documents(batch: Mapping[str, Any]) -> Tensor:
    """Document ids of a prepared batch.

    Args:
        batch: with ``document`` [B, T], else ``input_pos`` [B, T] that restarts at 0, else each row is one document. Only
            ``document`` knows of padding.

    Returns:
        Tensor: int64, shape [B, T]; -1 is padding.
    """
    tokens = batch["tokens"]
    if batch.get("document") is not None:
        return batch["document"].to(tokens.device)
    if batch.get("input_pos") is not None:
        return (batch["input_pos"] == 0).expand_as(tokens).cumsum(dim=1)
    return torch.zeros_like(tokens)
