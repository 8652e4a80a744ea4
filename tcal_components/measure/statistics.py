"""Streaming statistics of a teacher's attention: exact sums per layer and head, one block of queries at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm

from tcal_components.checkpoint.artifact import Artifact
from tcal_components.distributed import ParallelContext
from tcal_components.distributed.collectives import rank
from tcal_components.measure.capture import AttentionCapture, capture_batch
from tcal_components.measure.constant_direction import constant_direction
from tcal_components.measure.sums import LayerSums, batch_documents
from tcal_components.modules.hybrid_decoder import HybridDecoder

RECENT = 4  # keys at distance 0 to 3: what a convolution of width 4 sees


@dataclass
class LayerStatistics:
    """Means of one layer, float32 on the CPU.

    Attributes:
        distance: d_h = mean_t sum_j A(t, j)(t - j) in tokens, shape [H].
        distance_without_sink: mean distance of the attention that is not on position 0 of its document, shape [H].
        median_distance: median of the same, interpolated between whole distances, shape [H].
        quantiles: 10, 25, 75 and 90 % quantiles of the same, shape [H, 4].
        recent: share of the same at distance 0, 1, 2 and 3, shape [H, 4].
        entropy: mean of entropy / log(t + 1), in [0, 1], shape [H].
        sink: mean attention on position 0 of the document, its own token left out, shape [H].
        context_rms: RMS of the context per head, shape [H].
        output_rms: RMS of y, scalar.
        mean_x: mean input, shape [E].
        w_star: direction with w* . x close to 1, shape [E].
        w_star_std: standard deviation of w* . x, scalar.
    """

    distance: Tensor
    distance_without_sink: Tensor
    median_distance: Tensor
    quantiles: Tensor
    recent: Tensor
    entropy: Tensor
    sink: Tensor
    context_rms: Tensor
    output_rms: Tensor
    mean_x: Tensor
    w_star: Tensor
    w_star_std: Tensor


def finalise_layer(sums: LayerSums, ridge: float = 1e-3) -> LayerStatistics:
    """Turns sums into means.

    Args:
        sums: of at least two tokens of a document.
        ridge: strength of the fit of w*, relative to the mean diagonal.

    Returns:
        LayerStatistics: on the CPU.
    """
    later = sums.later_tokens.clamp_min(1.0)
    mean_x = sums.x / sums.tokens
    w_star, w_star_std = constant_direction(sums.gram / sums.tokens, mean_x, ridge)
    bins = torch.arange(sums.histogram.shape[1], dtype=torch.float64, device=sums.histogram.device)
    mass = sums.histogram.sum(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    values = {
        "distance": sums.distance / sums.tokens,
        "distance_without_sink": sums.histogram @ bins / mass,
        "median_distance": histogram_quantiles(sums.histogram, [0.5])[:, 0],
        "quantiles": histogram_quantiles(sums.histogram, [0.1, 0.25, 0.75, 0.9]),
        "recent": torch.nn.functional.pad(sums.histogram, (0, RECENT))[:, :RECENT] / mass[:, None],
        "entropy": sums.entropy / later,
        "sink": sums.sink / later,
        "context_rms": (sums.context_square / sums.tokens).sqrt(),
        "output_rms": (sums.output_square / sums.tokens).sqrt(),
        "mean_x": mean_x,
        "w_star": w_star,
        "w_star_std": w_star_std,
    }
    return LayerStatistics(**{name: value.float().cpu() for name, value in values.items()})


def histogram_quantiles(histogram: Tensor, levels: Sequence[float]) -> Tensor:
    """Quantiles of a histogram over the distances 0, 1, 2, ...; distance n is spread evenly over [n - 1/2, n + 1/2].

    Args:
        histogram: masses, shape [H, N].
        levels: in (0, 1).

    Returns:
        Tensor: shape [H, len(levels)], at least 0.
    """
    cumulative = histogram.cumsum(dim=1)
    total = cumulative[:, -1:]
    wanted = total * torch.tensor(levels, dtype=histogram.dtype, device=histogram.device)
    index = torch.searchsorted(cumulative, wanted).clamp_max(histogram.shape[1] - 1)
    inside = histogram.gather(1, index)
    before = cumulative.gather(1, index) - inside
    fraction = (wanted - before) / inside.clamp_min(torch.finfo(histogram.dtype).tiny)
    return (index + fraction - 0.5).clamp_min(0.0) * (total > 0)


@dataclass
class StatisticsSums:
    """Sums of all measured layers of one process.

    Args:
        layers: sums by layer.
    """

    layers: dict[int, LayerSums]

    def all_reduce_(self) -> None:
        """Adds the sums of all processes of the default process group, in place."""
        for index in sorted(self.layers):
            for item in fields(LayerSums):
                torch.distributed.all_reduce(getattr(self.layers[index], item.name))

    def finalise(self) -> Statistics:
        """Turns the sums into means.

        Returns:
            Statistics: means by layer.

        Raises:
            ValueError: no token was measured.
        """
        if any(float(sums.later_tokens) == 0.0 for sums in self.layers.values()):
            raise ValueError(
                "the calibration text has no document of at least two tokens, so attention cannot be measured"
            )
        tokens = max((int(sums.tokens) for sums in self.layers.values()), default=0)
        layers = {index: finalise_layer(sums) for index, sums in sorted(self.layers.items())}
        return Statistics(layers=layers, tokens=tokens)


@dataclass
class Statistics:
    """Means of all measured layers.

    Attributes:
        layers: means by layer index.
        tokens: calibration tokens seen.
    """

    layers: dict[int, LayerStatistics]
    tokens: int

    def save(self, artifact: Artifact) -> None:
        """Writes a safetensors file with keys ``layers.{i}.{name}``.

        Args:
            artifact: file to write.
        """
        tensors = {
            f"layers.{index}.{item.name}": getattr(layer, item.name)
            for index, layer in self.layers.items()
            for item in fields(LayerStatistics)
        }
        artifact.save(tensors, tokens=str(self.tokens))

    @classmethod
    def load(cls, path: str | Path) -> Statistics:
        """Reads what :meth:`save` wrote.

        Args:
            path: the file.

        Returns:
            Statistics: on the CPU.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a file of something else.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no statistics file {path}")
        by_layer: dict[int, dict[str, Tensor]] = {}
        with safe_open(str(path), framework="pt") as file:
            header = file.metadata() or {}
            for key in file.keys():  # noqa: SIM118 - safe_open is no mapping
                _, index, name = key.split(".") if key.count(".") == 2 else ("", "-1", key)
                by_layer.setdefault(int(index), {})[name] = file.get_tensor(key)
        expected = {item.name for item in fields(LayerStatistics)}
        if "tokens" not in header or any(set(layer) != expected for layer in by_layer.values()):
            raise ValueError(f"{path} is not a statistics file of the measure stage")
        layers = {index: LayerStatistics(**by_layer[index]) for index in sorted(by_layer)}
        return cls(layers=layers, tokens=int(header["tokens"]))


def measure(
    teacher: HybridDecoder,
    layers: Sequence[int],
    batches: Iterable[Mapping[str, Any]],
    *,
    block_size: int = 128,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = "measure",
) -> StatisticsSums:
    """Sums of this process over prepared batches: one forward of the teacher a batch, no T x T tensor.

    In a distributed run each process passes its own batches, the same number on each, then calls ``all_reduce_()``.

    Args:
        teacher: ``HybridDecoder`` teacher, plain or under FSDP2.
        layers: indices of the layers to measure.
        batches: prepared batches (tokens, mask, input_pos, optionally document), all of the same T or shorter than the first.
        block_size: queries per block; memory is B x H x block_size x T.
        autocast_dtype: see :func:`~tcal_components.measure.capture.capture_batch`.
        progress: label of a progress bar, on rank 0; None shows none.

    Returns:
        StatisticsSums: to reduce and finalise.
    """
    spec = teacher.spec
    sums: dict[int, LayerSums] = {}
    for batch in tqdm(batches, desc=progress, unit="batch", disable=progress is None or rank() != 0):
        tokens = batch["tokens"]
        document = batch_documents(batch)
        for index in layers if not sums else ():
            sums[index] = LayerSums.zeros(
                num_heads=spec.num_heads,
                embed_dim=spec.embed_dim,
                max_distance=tokens.shape[1],
                device=tokens.device,
            )

        def add(capture: AttentionCapture, document: Tensor = document) -> None:
            sums[capture.layer].add_(capture, document, block_size)

        capture_batch(teacher, layers, batch, add, autocast_dtype=autocast_dtype)
    if not sums and layers:
        raise ValueError("no calibration batch was given, so there is nothing to measure")
    return StatisticsSums(layers=sums)


def stored_statistics(
    artifact: Artifact,
    *,
    teacher: HybridDecoder,
    layers: Sequence[int],
    batches: Callable[[], Iterable[Mapping[str, Any]]],
    query_block: int,
    ctx: ParallelContext,
) -> Statistics:
    """Statistics of the teacher's attention, from the file if it was made from the same inputs.

    Args:
        artifact: the file; its inputs are the teacher, the text and the layers.
        teacher: plain or under FSDP2.
        layers: to measure.
        batches: gives this process's prepared calibration batches.
        query_block: queries a block.
        ctx: the processes.

    Returns:
        Statistics: of all processes.
    """
    if not artifact.current():
        sums = measure(teacher, layers, list(batches()), block_size=query_block, autocast_dtype=ctx.autocast_dtype)
        if ctx.world_size > 1:
            sums.all_reduce_()
        if ctx.is_first:
            sums.finalise().save(artifact)
        ctx.barrier()
    return Statistics.load(artifact.path)
