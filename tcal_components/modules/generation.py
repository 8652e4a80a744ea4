"""Generation with our decoders: many prompts at once, greedy or sampled, cached, replayed as a CUDA graph where there is one.

The prompts of a batch stand right-aligned in the caches, so that all rows write the same place in every step. They are
read in groups of equal length, so that no padding is ever computed: neither attention nor the recurrence meets any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from tcal_components.modules.attention import KeyValueCache
from tcal_components.modules.hybrid_decoder import HybridDecoder
from tcal_components.modules.replayed_step import ReplayedStep
from tcal_components.modules.sampling import Sampling, check_request

PLACES = 256  # the cached places that a step on CUDA reads are a multiple of this: a new graph only so often
CHECK_STEPS = 32  # between two looks at which rows have stopped, each of which waits for the GPU


GREEDY = Sampling()


@torch.no_grad()
def generate(
    model: HybridDecoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop_tokens: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 256,
    prefill_tokens: int = 16384,
    autocast_dtype: torch.dtype | None = None,
    progress: str | None = None,
) -> list[list[int]]:
    """Continues every prompt.

    A row depends on its prompt and its seed alone, up to rounding: not on the other rows, their number or their order.

    Args:
        model: Teacher or hybrid, without caches of its own; on the CPU or a CUDA device. One that FSDP2 shards has to have
            its root gathered, and every process makes the same call.
        prompts: Token ids, at least one each.
        max_new_tokens: Most tokens made for a prompt.
        sampling: How tokens are chosen. Default: greedy.
        stop_tokens: A row ends with the first of these.
        seed: Prompt i draws from a generator of its own, seeded with ``seed + i``. Calls that are to draw unlike each
            other need seeds further apart than they have prompts.
        batch_size: Prompts at once. Attention caches ``2 H_kv D`` numbers a token and layer for each of them.
        prefill_tokens: Tokens of prompts that are read at once.
        autocast_dtype: Compute under autocast to this type, which is then that of the caches.
        progress: Label of a progress bar; None shows none.

    Returns:
        list[list[int]]: What was made for each prompt, the stop token included.

    Raises:
        ValueError: For an empty prompt, lengths beyond the model's, or a model that holds caches.
    """
    check_request(prompts, max_new_tokens, max_seq_len=model.max_seq_len)
    if model.caches_are_setup():
        raise ValueError("generation: the model has caches already, which would be overwritten")
    weight = next(model.norm.parameters())
    device, dtype = weight.device, autocast_dtype or weight.dtype
    made: list[list[int]] = [[] for _ in prompts]
    # Like lengths together: short caches, few groups.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    training = model.training
    model.eval()
    try:
        # Without the cache of cast weights, which a graph must not hold.
        with (
            torch.compiler.set_stance("force_eager"),  # compiled layers would be compiled anew for every shape here
            torch.autocast(device.type, dtype=autocast_dtype, enabled=autocast_dtype is not None, cache_enabled=False),
            tqdm(total=len(prompts), desc=progress, disable=progress is None, unit="prompt") as bar,
        ):
            for begin in range(0, len(order), batch_size):
                part = order[begin : begin + batch_size]
                noise = torch.stack([sampling.noise(seed + index, max_new_tokens) for index in part])
                batch = _Batch(model, [prompts[index] for index in part], noise.to(device), sampling, dtype)
                tokens = batch.run(torch.tensor(list(stop_tokens), device=device), prefill_tokens)
                for index, row in zip(part, tokens.tolist()):
                    ends = [place for place, token in enumerate(row) if token in stop_tokens]
                    made[index] = row[: ends[0] + 1] if ends else row
                bar.update(len(part))
    finally:
        model.train(training)
    return made


class _Batch:
    """Prompts that are decoded together, shortest first.

    Args:
        model: The decoder.
        prompts: Token ids.
        noise: Uniform numbers, [B, N] for N tokens each.
        sampling: How tokens are chosen.
        dtype: Type of the caches.
    """

    def __init__(
        self,
        model: HybridDecoder,
        prompts: Sequence[Sequence[int]],
        noise: Tensor,
        sampling: Sampling,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.prompts, self.noise, self.sampling, self.dtype = model, prompts, noise, sampling, dtype
        device = noise.device
        self.longest = max(map(len, prompts))
        self.capacity = _up(self.longest + noise.shape[1] - 1, PLACES)
        self.rows = torch.arange(len(prompts))  # which prompt a row is of
        self.start = torch.tensor([self.longest - len(prompt) for prompt in prompts], device=device)
        self.token = torch.zeros(len(prompts), 1, dtype=torch.long, device=device)
        self.out = torch.zeros(noise.shape, dtype=torch.long, device=device)
        self.place = torch.tensor([self.longest], device=device)  # where the next step writes

    def run(self, stop: Tensor, prefill_tokens: int) -> Tensor:
        """Decodes until every row has stopped or has its N tokens.

        Args:
            stop: Ids that end a row.
            prefill_tokens: Tokens of prompts that are read at once.

        Returns:
            Tensor: [B, N] on the CPU; what stands behind a stop token means nothing.
        """
        found, count = torch.zeros(self.out.shape, dtype=torch.long), self.out.shape[1]
        with self._caches():
            self._read_prompts(prefill_tokens)
            made, step, shape = 1, None, None
            while made < count:
                if len(stop):
                    done = torch.isin(self.out[:, :made], stop).any(1).cpu()
                    if bool(done.all()):
                        break
                    if 2 * int(done.sum()) >= len(done):
                        found[self.rows[done]] = self.out.cpu()[done]
                        self._keep(~done)
                steps = min(CHECK_STEPS, count - made)
                places = self.longest + made + steps - 1
                places = min(_up(places, PLACES), self.capacity) if self.out.is_cuda else places
                if step is None or shape != (len(self.rows), places):
                    step, shape = None, (len(self.rows), places)  # a graph holds memory: first the old one goes
                    # A graph would hold weights that FSDP2 frees.
                    graph = self.out.is_cuda and not isinstance(self.model, FSDPModule)
                    step = ReplayedStep(self._step_over(places), self.out.device if graph else None)
                for _ in range(steps):
                    step()
                made += steps
            del step
        found[self.rows] = self.out.cpu()
        return found

    @contextmanager
    def _caches(self) -> Iterator[None]:
        self.model.setup_caches(len(self.prompts), self.dtype, decoder_max_seq_len=self.capacity)
        self.caches: list[Any] = [layer.attn.kv_cache for layer in self.model.layers]
        try:
            yield
        finally:
            for layer in self.model.layers:
                layer.attn.kv_cache, layer.attn.cache_enabled = None, False
            self.model.decoder_max_cache_seq_len = None
            del self.caches

    def _read_prompts(self, prefill_tokens: int) -> None:
        """Fills the caches and chooses the first token of every row."""
        model, begin = self.model, 0
        device = self.out.device
        for length, group in groupby(self.prompts, key=len):
            tokens = torch.tensor(list(group), device=device)
            position = torch.arange(length, device=device)
            for part in tokens.split(max(1, prefill_tokens // length)):
                rows = slice(begin, begin + len(part))
                for layer, cache in zip(model.layers, self.caches):
                    layer.attn.kv_cache = _rows_of(cache, rows, slice(self.longest - length, self.longest))
                logits = self._logits(part, input_pos=position)
                self.token[rows, 0] = self.sampling.choose(logits, self.noise[rows, 0])
                begin += len(part)
        self.out[:, 0] = self.token[:, 0]
        for layer, cache in zip(model.layers, self.caches):
            layer.attn.kv_cache = cache
            if isinstance(cache, KeyValueCache):
                cache.cache_pos.add_(self.longest)

    def _logits(self, tokens: Tensor, **options: Any) -> Tensor:
        """Logits [B, V] at the last of the tokens [B, T].

        Not by the model's ``forward``: it wants a mask for prompts, makes the logits of all tokens, and within a gathered
        root of FSDP2 it would free that.
        """
        hidden = self.model.tok_embeddings(tokens)
        for layer in self.model.layers:
            hidden = layer(hidden, **options)
        return self.model.output(self.model.norm(hidden[:, -1:]))[:, -1].float()

    def _step_over(self, places: int) -> Callable[[], None]:
        """One token for every row, reading the first ``places`` places; without any wait for the device."""
        column = torch.arange(places, device=self.out.device)

        def step() -> None:
            readable = (column >= self.start[:, None]) & (column <= self.place)
            # Positions [B, 1]: one a row.
            logits = self._logits(self.token, mask=readable[:, None], input_pos=(self.place - self.start)[:, None])
            made = self.place - (self.longest - 1)
            chosen = self.sampling.choose(logits, self.noise.index_select(1, made)[:, 0])
            self.token.copy_(chosen[:, None])
            self.out.index_copy_(1, made, self.token)
            self.place.add_(1)

        return step

    def _keep(self, kept: Tensor) -> None:
        """Goes on with some of the rows only."""
        self.rows = self.rows[kept]
        kept = kept.to(self.out.device)
        for name in ("start", "token", "out", "noise"):
            setattr(self, name, getattr(self, name)[kept])
        for cache in self.caches:
            for name, buffer in list(cache.named_buffers()):
                if name != "cache_pos":
                    setattr(cache, name, buffer[kept])
            cache.batch_size = len(self.rows)


class _PromptPlaces(nn.Module):
    """Stands for a key/value cache while prompts are read: stores their keys and values, and gives back those alone."""

    def __init__(self, cache: KeyValueCache, rows: slice, places: slice) -> None:
        super().__init__()
        self.stored = cache.k_cache[rows, :, places], cache.v_cache[rows, :, places]

    def update(self, k_val: Tensor, v_val: Tensor) -> tuple[Tensor, Tensor]:
        """Takes keys and values [b, H_kv, T, D] of whole prompts."""
        for stored, value in zip(self.stored, (k_val, v_val)):
            stored.copy_(value)
        return k_val, v_val


def _rows_of(cache: Any, rows: slice, places: slice) -> nn.Module:
    """Some rows of a layer's cache, as a cache of prompts that take ``places``; shares its memory."""
    if isinstance(cache, KeyValueCache):
        return _PromptPlaces(cache, rows, places)
    view = copy.copy(cache)
    view._buffers = {name: buffer[rows] for name, buffer in cache.named_buffers()}
    return view


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
