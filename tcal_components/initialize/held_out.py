"""What mixers do on held-out text: half-lives, gates and error, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from tcal_components.distributed.collectives import rank
from tcal_components.initialize.held_out_sums import HeldoutSums
from tcal_components.initialize.layer import LayerBatch
from tcal_components.measure.capture import AttentionCapture, capture_batch
from tcal_components.measure.statistics import batch_documents
from tcal_components.modules.hybrid_decoder import HybridDecoder


@torch.no_grad()
def diagnose(
    teacher: HybridDecoder,
    mixers: nn.ModuleDict,
    batches: Iterable[Mapping[str, Any]],
    *,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = "gates and half-lives",
) -> dict[int, dict[str, Any]]:
    """Runs mixers on the inputs of the teacher's layers.

    Args:
        teacher: decoder with attention in every layer of ``mixers``.
        mixers: by layer index (as text), on the device of the batches.
        batches: this process's prepared batches, the same number on every process.
        autocast_dtype: run the teacher under autocast to this type.
        progress: label of a progress bar, on rank 0; None shows none.

    Returns:
        dict: by layer what :meth:`~tcal_components.initialize.held_out_sums.HeldoutSums.notes` gives, of all processes.
    """
    layers = sorted(int(layer) for layer in mixers)
    sums: dict[int, HeldoutSums] = {}
    batches = list(batches)  # so that the bar knows how many
    for batch in tqdm(batches, desc=progress, unit="batch", disable=progress is None or rank() != 0):
        valid: Tensor = batch_documents(batch) >= 0

        def add(capture: AttentionCapture, valid: Tensor = valid) -> None:
            mixer: Any = mixers[str(capture.layer)]
            data = LayerBatch(x=capture.x, y=capture.y, context=None, input_pos=capture.input_pos, valid=valid)
            if capture.layer not in sums:
                sums[capture.layer] = HeldoutSums.zeros(mixer.num_heads, data.y.device)
            sums[capture.layer].add_(mixer, data)

        capture_batch(teacher, layers, batch, add, with_qkv=False, autocast_dtype=autocast_dtype)
    for layer in layers:
        sums[layer].all_reduce_()
    return {layer: sums[layer].notes() for layer in layers}
