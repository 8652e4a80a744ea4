"""Prefill speed, decode speed and cache size by context length."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torchtune import utils
from tqdm import tqdm

from tcal_components.evaluation.access import device_of, evaluating, final_hidden, head_of, is_transformers, layers_of
from tcal_components.evaluation.cache_size import measured_cache_bytes, theoretical_cache_bytes
from tcal_components.export.stock_model import cache_of

log = utils.get_logger("INFO")

WARMUP_STEPS = 3  # of decoding, not timed


@dataclass(frozen=True)
class SpeedResult:
    """One context length. A speed is ``None`` where the device's memory did not suffice.

    Attributes:
        context: Tokens in the cache at the end, the decoded ones included.
        batch_size: Sequences at once; speeds count the tokens of all of them.
        dtype: Type of weights and caches.
        prefill_tokens_per_second: Forward over ``context`` tokens, logits of the last one only.
        decode_tokens_per_second: Cached decoding at the end of the context, each kernel launched by the host.
        graph_tokens_per_second: The same step replayed as one CUDA graph, as servers do: what the GPU itself needs. ``None``
            on CPU, for a model of transformers, and where the step cannot be captured.
        cache_bytes: Measured on the tensors.
        cache_bytes_theory: By formula.
        peak_memory_gib: Peak of allocated GPU memory in prefill and decoding, weights included; ``None`` on CPU.
    """

    context: int
    batch_size: int
    dtype: str
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    graph_tokens_per_second: float | None
    cache_bytes: int | None
    cache_bytes_theory: int
    peak_memory_gib: float | None

    def as_dict(self) -> dict[str, Any]:
        """The row of a report's ``evaluation.speed``, without the model's name."""
        return asdict(self)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _vocabulary(model: Any) -> int:
    return model.config.vocab_size if is_transformers(model) else model.spec.vocab_size


def prefill_seconds(model: nn.Module, tokens: Tensor, *, repeats: int = 3) -> float:
    """Median time of one forward over ``tokens`` [B, T] that ends in the logits of the last token."""
    times = []
    for repeat in range(repeats + 1):
        start = _now(tokens.device)
        hidden = final_hidden(model, {"tokens": tokens})
        head_of(model)(hidden[:, -1])
        if repeat:  # the first one compiles and tunes kernels
            times.append(_now(tokens.device) - start)
    return statistics.median(times)


@contextmanager
def _filled_caches(model: Any, batch_size: int, context: int, filled: int, dtype: torch.dtype) -> Iterator[None]:
    """Caches of ``context`` places of which ``filled`` are taken.

    They hold random numbers: speed and size do not depend on them, and a prefill through torchtune's cache would need a
    mask of context x context.
    """
    model.setup_caches(batch_size, dtype, decoder_max_seq_len=context)
    try:
        for layer in layers_of(model):
            cache = layer.attn.kv_cache
            for name, buffer in cache.named_buffers():
                if buffer.is_floating_point():
                    buffer.normal_(std=0.02)
                elif name == "cache_pos":
                    buffer.add_(filled)
        yield
    finally:
        for layer in layers_of(model):
            layer.attn.kv_cache, layer.attn.cache_enabled = None, False
        model.decoder_max_cache_seq_len = None


def _decode_ours(
    model: nn.Module, tokens: Tensor, steps: int, dtype: torch.dtype
) -> tuple[Callable[[Tensor, int], Tensor], Callable[[], int], Any]:
    batch_size, context = tokens.shape
    filled = context - steps
    places = torch.arange(context, device=tokens.device)
    readable = torch.ones((), dtype=torch.bool, device=tokens.device)

    def step(token: Tensor, index: int) -> Tensor:
        at = filled + index
        # One value expanded: the places so far are read without a mask, by the kernels that know grouped heads.
        mask = readable.expand(batch_size, 1, at + 1)
        return model(token, mask=mask, input_pos=places[at : at + 1])[:, -1]

    return step, lambda: measured_cache_bytes(model), _filled_caches(model, batch_size, context, filled, dtype)


def _decode_transformers(
    model: nn.Module, tokens: Tensor, steps: int
) -> tuple[Callable[[Tensor, int], Tensor], Callable[[], int], Any]:
    state: dict[str, Any] = {}

    @contextmanager
    def filled() -> Iterator[None]:
        out = model(input_ids=tokens[:, : tokens.shape[1] - steps], use_cache=True, logits_to_keep=1)
        state.update(cache_of(out))
        del out
        try:
            yield
        finally:
            state.clear()

    def step(token: Tensor, index: int) -> Tensor:
        out = model(input_ids=token, use_cache=True, **state)
        state.update(cache_of(out))
        return out.logits[:, -1]

    return step, lambda: measured_cache_bytes(*state.values()), filled()


def decode_speed(model: nn.Module, tokens: Tensor, *, steps: int, dtype: torch.dtype) -> tuple[float, int]:
    """Greedy cached decoding of the last ``steps`` tokens of a context, in eager PyTorch.

    Our decoders write into caches of the full length; transformers' own cache is copied as it grows.

    Args:
        model: A HybridDecoder or a causal language model of transformers.
        tokens: [B, T]; T is the context at the end.
        steps: Tokens to decode, the first few of which only warm up.
        dtype: Type of our decoders' caches.

    Returns:
        tuple[float, int]: Seconds a step, and bytes of the cache after the last one.
    """
    if is_transformers(model):
        step, size, filled = _decode_transformers(model, tokens, steps)
    else:
        step, size, filled = _decode_ours(model, tokens, steps, dtype)
    with filled:
        token, start = tokens[:, :1], 0.0
        for index in range(steps):
            if index == WARMUP_STEPS:
                start = _now(tokens.device)
            token = step(token, index).argmax(-1, keepdim=True)
        seconds = (_now(tokens.device) - start) / (steps - WARMUP_STEPS)
        return seconds, size()


def graph_decode_seconds(model: nn.Module, tokens: Tensor, *, steps: int, dtype: torch.dtype) -> float:
    """Time of a greedy decoding step that is replayed as a CUDA graph: no launch waits for the host.

    The captured step reads the whole context, whatever place it writes, so that every replay does the work of the last step.

    Args:
        model: A HybridDecoder on a CUDA device.
        tokens: [B, T]; T is the context at the end.
        steps: Tokens to decode, the first few of which only warm up.
        dtype: Type of the caches.

    Returns:
        float: Seconds a step.

    Raises:
        RuntimeError: If an operation of the step cannot be captured.
    """
    batch_size, context = tokens.shape
    device = tokens.device
    last = torch.full((1,), context - 1, device=device)
    mask = torch.ones((), dtype=torch.bool, device=device).expand(batch_size, 1, context)
    token = tokens[:, :1].clone()

    def step() -> None:
        token.copy_(model(token, mask=mask, input_pos=last)[:, -1].argmax(-1, keepdim=True))

    with _filled_caches(model, batch_size, context, context - steps, dtype):
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(beside):  # libraries allocate what they keep before the capture
            for _ in range(WARMUP_STEPS):
                step()
        torch.cuda.current_stream(device).wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        start = _now(device)
        for _ in range(steps - WARMUP_STEPS):
            graph.replay()
        return (_now(device) - start) / (steps - WARMUP_STEPS)


def _graph_seconds(model: nn.Module, tokens: Tensor, *, steps: int, dtype: torch.dtype) -> float | None:
    if tokens.device.type != "cuda" or is_transformers(model):
        return None
    try:
        return graph_decode_seconds(model, tokens, steps=steps, dtype=dtype)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        log.warning("speed: no CUDA graph of a decoding step: %s", str(error).splitlines()[0])
        return None


def speed(
    model: nn.Module,
    *,
    contexts: Sequence[int],
    batch_size: int = 1,
    decode_tokens: int = 32,
    repeats: int = 3,
    progress: str | None = None,
) -> list[SpeedResult]:
    """Measures a model at each context length; weights and caches have the type of the model's weights.

    Args:
        model: A HybridDecoder whose ``max_seq_len`` covers the contexts, or a causal language model of transformers.
        contexts: Context lengths in tokens.
        batch_size: Sequences at once.
        decode_tokens: Tokens decoded at the end of each context; more than 3, which warm up.
        repeats: Prefills of which the median counts.
        progress: Label of a progress bar; None shows none.

    Returns:
        list[SpeedResult]: One for each context.

    Raises:
        ValueError: If a context does not fit the model, or is shorter than the decoded tokens.
    """
    device, dtype = device_of(model), next(model.parameters()).dtype
    longest = getattr(model, "max_seq_len", None)
    if decode_tokens <= WARMUP_STEPS:
        raise ValueError(
            f"speed: decode_tokens is {decode_tokens}; expected more than the {WARMUP_STEPS} warm-up steps"
        )
    for context in contexts:
        if context <= decode_tokens:
            raise ValueError(f"speed: context {context} is not longer than the {decode_tokens} tokens to decode in it")
        if longest is not None and context > longest:
            raise ValueError(f"speed: context {context} exceeds the model's max_seq_len {longest}; build it with more")
    results = []
    with evaluating(model, device=device):
        for context in tqdm(contexts, desc=progress, disable=progress is None, unit="context"):
            generator = torch.Generator().manual_seed(context)
            tokens = torch.randint(0, _vocabulary(model), (batch_size, context), generator=generator).to(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
            prefill = _unless_out_of_memory(prefill_seconds, model, tokens, repeats=repeats)
            decode = _unless_out_of_memory(decode_speed, model, tokens, steps=decode_tokens, dtype=dtype)
            peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
            graph = _unless_out_of_memory(_graph_seconds, model, tokens, steps=decode_tokens, dtype=dtype)
            results.append(
                SpeedResult(
                    context=context,
                    batch_size=batch_size,
                    dtype=str(dtype).removeprefix("torch."),
                    prefill_tokens_per_second=tokens.numel() / prefill if prefill else None,
                    decode_tokens_per_second=batch_size / decode[0] if decode else None,
                    graph_tokens_per_second=batch_size / graph if graph else None,
                    cache_bytes=decode[1] if decode else None,
                    cache_bytes_theory=theoretical_cache_bytes(
                        model, context=context, batch_size=batch_size, dtype=dtype
                    ),
                    peak_memory_gib=peak,
                )
            )
    return results


def _unless_out_of_memory(measure: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return measure(*args, **options)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
