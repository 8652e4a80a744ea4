"""What any model that can be evaluated writes: our decoders, and causal language models of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from tcal_components.evaluation.access import device_of, evaluating, gathered, is_transformers
from tcal_components.modules.generation import GREEDY, generate
from tcal_components.modules.sampling import Sampling, check_request


def written(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    seed: int = 0,
    batch_size: int = 256,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = None,
) -> list[list[int]]:
    """:func:`~tcal_components.modules.generation.generate` for any model that can be evaluated.

    Returns:
        list: ``max_new_tokens`` token ids for each prompt.

    Raises:
        ValueError: See ``generate``.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seed": seed}
    options |= {"batch_size": batch_size, "progress": progress}
    if not is_transformers(model):
        made: list[list[int]] = gathered(
            model,
            lambda: generate(model, prompts, autocast_dtype=autocast_dtype, **options),  # type: ignore[arg-type]
        )
        return made
    with evaluating(model, device=device_of(model), autocast_dtype=autocast_dtype):
        return _written_by_transformers(model, prompts, **options)


def _written_by_transformers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
    batch_size: int,
    progress: str | None,
) -> list[list[int]]:
    """Prompts of one length at a time: its linear attention and padding do not go together in all versions."""
    check_request(prompts, max_new_tokens, max_seq_len=None)
    device, made = device_of(model), [[0]] * len(prompts)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    groups = [list(group) for _, group in groupby(order, key=lambda index: len(prompts[index]))]
    parts = [group[begin : begin + batch_size] for group in groups for begin in range(0, len(group), batch_size)]
    for part in tqdm(parts, desc=progress, disable=progress is None, unit="batch"):
        text = torch.tensor([list(prompts[index]) for index in part], device=device)
        noise = torch.stack([sampling.noise(seed + index, max_new_tokens) for index in part]).to(device)
        cached, tokens = getattr(model.config, "use_cache", True), text
        state = None
        for step in range(max_new_tokens):
            out = model(input_ids=tokens, past_key_values=state, use_cache=cached, logits_to_keep=1)
            chosen = sampling.choose(out.logits[:, -1].float(), noise[:, step])[:, None]
            text = torch.cat([text, chosen], dim=1)
            # An export without any attention has no cache in transformers: it reads the whole text again.
            state, tokens = (out.past_key_values, chosen) if cached else (None, text)
        for index, row in zip(part, text[:, -max_new_tokens:].tolist()):
            made[index] = row
    return made
