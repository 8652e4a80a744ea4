"""Perplexity over held-out text: exact token-weighted means, by position and by context length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.data.packed import IGNORE_INDEX
from tcal_components.evaluation.access import (
    device_of,
    evaluating,
    final_hidden,
    gathered,
    head_of,
    inputs_for,
)

# Positions in a document at which the buckets of `by_position` begin; the last one is open.
POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
# Logits that exist at once: 1024 tokens at vocabulary 151 936 are 0.6 GiB in float32.
CHUNK_TOKENS = 1024


@dataclass
class PerplexityResult:
    """Sums over all predicted tokens, of all processes.

    Attributes:
        nll_sum: Negative log-likelihood in nats.
        tokens: Predicted tokens.
        by_position: Rows ``from``, ``to`` (exclusive), ``tokens``, ``nll_sum`` by position in the document.
    """

    nll_sum: float
    tokens: int
    by_position: list[dict[str, Any]] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood in nats a token; NaN without tokens."""
        return self.nll_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinity where that overflows."""
        return _exp(self.loss)

    def as_dict(self) -> dict[str, Any]:
        """The ``evaluation.perplexity`` entry of a report."""
        rows = [
            {**row, "perplexity": _exp(row["nll_sum"] / row["tokens"]) if row["tokens"] else None}
            for row in self.by_position
        ]
        return {"perplexity": self.perplexity, "nll_sum": self.nll_sum, "tokens": self.tokens, "by_position": rows}


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def evaluation_batches(
    dataset: Any, *, batch_size: int, rank: int = 0, world_size: int = 1, max_sequences: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Every sequence of a packed dataset once, in order, this process's share of each batch.

    All processes get the same number of batches, because sharded models compute together: one that has no sequence left
    gets a sequence without labels.

    Args:
        dataset: Map style, items are dicts of tensors of one shape.
        batch_size: Sequences a batch over all processes; rounded up to a multiple of their number.
        rank: This process.
        world_size: Number of processes.
        max_sequences: Only the first so many.

    Yields:
        dict[str, Tensor]: [b, T] each.
    """
    count = len(dataset) if max_sequences is None else min(len(dataset), max_sequences)
    share = -(-batch_size // world_size)
    for begin in range(0, count, share * world_size):
        first = begin + rank * share
        items = [dataset[index] for index in range(first, min(first + share, count))]
        if not items:
            items = [{**dataset[begin], "labels": torch.full_like(dataset[begin]["labels"], IGNORE_INDEX)}]
        yield {name: torch.stack([item[name] for item in items]) for name in items[0]}


def token_nll(model: nn.Module, batch: Mapping[str, Any], *, chunk_tokens: int = CHUNK_TOKENS) -> Tensor:
    """Negative log-likelihood of every label.

    Args:
        model: A HybridDecoder or a causal language model of transformers.
        batch: One of the inputs of ``inputs_for``: ``tokens``, ``labels`` [B, T] and the arguments of forward.
        chunk_tokens: Tokens that go through the head at once.

    Returns:
        Tensor: [B, T] float64, 0 where the label is ignored.
    """
    labels = batch["labels"]

    def compute() -> Tensor:
        hidden = final_hidden(model, batch)
        counted = labels != IGNORE_INDEX
        head, parts = head_of(model), []
        for states, targets in zip(hidden[counted].split(chunk_tokens), labels[counted].split(chunk_tokens)):
            logits = head(states)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            parts.append(F.cross_entropy(logits, targets, reduction="none").double())
        nll = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
        if parts:
            nll[counted] = torch.cat(parts)
        return nll

    return gathered(model, compute)


def perplexity(
    model: nn.Module,
    data: Any,
    *,
    batch_size: int = 8,
    device: torch.device | str | None = None,
    autocast_dtype: torch.dtype | None = None,
    position_edges: Sequence[int] = POSITION_EDGES,
    chunk_tokens: int = CHUNK_TOKENS,
    max_sequences: int | None = None,
    progress: str | None = None,
) -> PerplexityResult:
    """Perplexity of ``model`` on packed text, all processes together.

    Args:
        model: A HybridDecoder (plain or sharded by FSDP2) or a causal language model of transformers.
        data: A packed dataset, each sequence of which is used once, shared among the processes; or an iterable of this
            process's batches with ``tokens``, ``labels`` and optionally ``input_pos``, ``document``, each [B, T].
        batch_size: Sequences a batch over all processes, when ``data`` is a dataset.
        device: Where the model computes. Default: where its weights are.
        autocast_dtype: Compute under autocast to this type. Default: in the type of the weights.
        position_edges: Where the buckets of ``by_position`` begin.
        chunk_tokens: Tokens that go through the head at once: memory against a little speed.
        max_sequences: Only the first so many sequences of a dataset.
        progress: Label of a progress bar; None shows none.

    Returns:
        PerplexityResult: Sums and their ratio, in float64.

    Raises:
        ValueError: If nothing is predicted.
    """
    device = device_of(model) if device is None else torch.device(device)
    rank, world_size = _rank_and_world()
    batches: Iterable[Mapping[str, Tensor]] = data
    total = None
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (list, tuple)):
        share = -(-batch_size // world_size) * world_size
        count = len(data) if max_sequences is None else min(len(data), max_sequences)
        total = -(-count // share)
        batches = evaluation_batches(
            data, batch_size=batch_size, rank=rank, world_size=world_size, max_sequences=max_sequences
        )
    edges = torch.tensor(list(position_edges)[1:], device=device)
    # [buckets, (nll, tokens)]
    sums = torch.zeros(len(position_edges), 2, dtype=torch.float64, device=device)
    with evaluating(model, device=device, autocast_dtype=autocast_dtype):
        for batch in tqdm(batches, desc=progress, total=total, disable=progress is None or rank != 0, unit="batch"):
            for inputs in inputs_for(model, batch, device):
                counted = inputs["labels"] != IGNORE_INDEX
                nll = token_nll(model, inputs, chunk_tokens=chunk_tokens)[counted]
                bucket = torch.bucketize(inputs["position"][counted], edges, right=True)
                sums[:, 0].index_add_(0, bucket, nll)
                sums[:, 1] += torch.bincount(bucket, minlength=len(sums))
    if world_size > 1:
        torch.distributed.all_reduce(sums)
    rows = [
        {"from": low, "to": high, "tokens": int(tokens), "nll_sum": nll}
        for low, high, (nll, tokens) in zip(position_edges, [*position_edges[1:], 2**62], sums.tolist())
    ]
    tokens = sum(row["tokens"] for row in rows)
    if not tokens:
        raise ValueError("perplexity: the data has no token to predict (every label is ignored)")
    longest = max(index for index, row in enumerate(rows) if row["tokens"])
    return PerplexityResult(float(sums[:, 0].sum()), tokens, rows[: longest + 1])


def check_context_lengths(lengths: Sequence[int], *, scored: int, seq_len: int) -> None:
    """Refuses lengths that :func:`perplexity_by_context` cannot measure.

    Args:
        lengths: Context lengths in tokens.
        scored: Tokens predicted at the end of each sequence.
        seq_len: Tokens of a sequence of the dataset.

    Raises:
        ValueError: If a length does not fit between ``scored`` and the sequences.
    """
    for length in lengths:
        if not scored <= length <= seq_len:
            raise ValueError(
                f"context length {length}: expected at least the {scored} scored tokens and at most the {seq_len} "
                "tokens of a sequence of the dataset"
            )


def perplexity_by_context(
    model: nn.Module,
    dataset: Any,
    *,
    lengths: Sequence[int],
    scored: int = 128,
    batch_size: int = 4,
    device: torch.device | str | None = None,
    autocast_dtype: torch.dtype | None = None,
    max_sequences: int | None = None,
    progress: str | None = None,
) -> dict[int, float]:
    """Perplexity of the *same* tokens after contexts of growing length, so that only the context makes the difference.

    Of every sequence the last ``scored`` tokens are predicted, after the ``length - scored`` tokens before them. Document
    boundaries in the sequence are not cut: the context is what a stream of text gives.

    Args:
        model: A HybridDecoder or a causal language model of transformers.
        dataset: Packed dataset whose sequences are at least ``max(lengths)`` long.
        lengths: Context lengths in tokens, the scored ones included.
        scored: Tokens predicted at the end of each sequence.
        batch_size: Sequences a batch over all processes.
        device: Where the model computes. Default: where its weights are.
        autocast_dtype: Compute under autocast to this type.
        max_sequences: Only the first so many sequences.
        progress: Label of a progress bar; None shows none.

    Returns:
        dict[int, float]: Perplexity by length.

    Raises:
        ValueError: If a length does not fit between ``scored`` and the sequences.
    """
    check_context_lengths(lengths, scored=scored, seq_len=len(dataset[0]["tokens"]))
    rank, world_size = _rank_and_world()

    def windows(length: int) -> Iterator[dict[str, Tensor]]:
        for batch in evaluation_batches(
            dataset, batch_size=batch_size, rank=rank, world_size=world_size, max_sequences=max_sequences
        ):
            labels = batch["labels"][:, -length:].clone()
            labels[:, : length - scored] = IGNORE_INDEX
            yield {"tokens": batch["tokens"][:, -length:], "labels": labels}

    return {
        length: perplexity(
            model,
            windows(length),
            device=device,
            autocast_dtype=autocast_dtype,
            progress=f"{progress}, context {length}" if progress else None,
        ).perplexity
        for length in lengths
    }


def _rank_and_world() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
