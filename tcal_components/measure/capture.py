"""What each attention layer of a teacher reads and writes, one layer at a time during a forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from tcal_components.modules.hybrid_decoder import HybridDecoder

# Keys of a prepared batch that the decoder's forward takes; the rest (labels, document) stays with the caller.
FORWARD_KEYS = ("mask", "input_pos")


@dataclass(frozen=True, eq=False)
class AttentionCapture:
    """Tensors of one attention layer in one forward. Hold none of them longer than the callback.

    Attributes:
        layer: index of the layer.
        x: input after the input norm, shape [B, T, E].
        y: output after the output projection, shape [B, T, E].
        q: queries after bias, norm and RoPE, shape [B, H, T, D]; None when only x and y were asked for.
        k: keys after bias, norm and RoPE with heads expanded, shape [B, H, T, D]; or None.
        v: values with heads expanded, shape [B, H, T, D]; or None.
        context: attention output before the output projection, shape [B, H, T, D]; or None.
        mask: mask as given to the layer.
        input_pos: positions as given to the layer, shape [B, T]; or None.
    """

    layer: int
    x: Tensor
    y: Tensor
    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    context: Tensor | None
    mask: Any
    input_pos: Tensor | None


@contextlib.contextmanager
def capture_attention(
    model: nn.Module,
    layers: Sequence[int],
    callback: Callable[[AttentionCapture], None],
    *,
    with_qkv: bool = True,
) -> Iterator[None]:
    """Calls ``callback`` right after the attention of each chosen layer ran, so only one layer's tensors are alive.

    Hooks and the instance attribute ``_attention_call`` are used and restored on exit, also after an exception. Both
    work on plain modules and under FSDP2.

    Args:
        model: decoder with ``layers[i].attn``.
        layers: indices of the layers to look at.
        callback: gets one :class:`AttentionCapture` per chosen layer and forward, in the order of the layers; runs
            outside of any autocast.
        with_qkv: also give q, k, v and the context; needs attention in every chosen layer. Without it any mixer works.

    Raises:
        ValueError: an index out of range, or ``with_qkv`` and a chosen layer without attention.
    """
    blocks: Any = model.layers
    total = len(blocks)
    for index in layers:
        if not 0 <= index < total:
            raise ValueError(f"layer {index} cannot be captured: the model has layers 0 to {total - 1}")
    undo: list[Callable[[], Any]] = []
    try:
        for index in sorted(set(layers)):
            attention = blocks[index].attn
            seen: dict[str, Tensor] = {}
            if with_qkv:
                undo.append(_wrap_attention_call(attention, index, seen))
            hook = _make_hook(index, seen, callback)
            undo.append(attention.register_forward_hook(hook, with_kwargs=True).remove)
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _wrap_attention_call(attention: Any, index: int, seen: dict[str, Tensor]) -> Callable[[], None]:
    original = vars(attention).get("_attention_call")
    if original is None:
        raise ValueError(
            f"layer {index} holds {type(attention).__name__}, not attention: it has no q, k and v to capture"
        )

    def wrapped(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        context = original(q, k, v, *args, **kwargs)
        seen.update(q=q, k=k, v=v, context=context)
        return context

    attention._attention_call = wrapped

    def restore() -> None:
        attention._attention_call = original

    return restore


def _make_hook(
    index: int, seen: dict[str, Tensor], callback: Callable[[AttentionCapture], None]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Tensor) -> None:
        x = args[0] if args else kwargs["x"]
        tensors = {name: seen.pop(name, None) for name in ("q", "k", "v", "context")}
        capture = AttentionCapture(
            layer=index, x=x, y=output, mask=kwargs.get("mask"), input_pos=kwargs.get("input_pos"), **tensors
        )
        # The teacher's own autocast must not lower the precision of sums and solves.
        with torch.autocast(output.device.type, enabled=False):
            callback(capture)

    return hook


def run_hidden(model: HybridDecoder, batch: Mapping[str, Any]) -> Tensor:
    """Runs the decoder without its head: nothing here reads logits, which outweigh everything else in memory.

    Args:
        model: a ``HybridDecoder``, plain or sharded by FSDP2.
        batch: prepared batch with ``tokens`` [B, T] and optionally ``mask`` and ``input_pos``; other keys are left out.

    Returns:
        Tensor: final-normed hidden states, shape [B, T, E].
    """
    if isinstance(model, FSDPModule) and "hidden" not in vars(model):
        # FSDP2 gathers parameters in hooks of forward only; this gives `hidden` the same hooks, once.
        register_fsdp_forward_method(model, "hidden")
    return model.hidden(batch["tokens"], **{key: batch[key] for key in FORWARD_KEYS if batch.get(key) is not None})


@contextlib.contextmanager
def teacher_mode(model: nn.Module) -> Iterator[None]:
    """Runs a block in evaluation mode without gradients and restores the mode of ``model``."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def capture_batch(
    model: HybridDecoder,
    layers: Sequence[int],
    batch: Mapping[str, Any],
    callback: Callable[[AttentionCapture], None],
    *,
    with_qkv: bool = True,
    autocast_dtype: torch.dtype | None = None,
) -> None:
    """One forward of the teacher over ``batch``, with ``callback`` after every chosen layer.

    Args:
        model: teacher.
        layers: indices of the layers to look at.
        batch: prepared batch.
        callback: see :func:`capture_attention`.
        with_qkv: see :func:`capture_attention`.
        autocast_dtype: run the forward under autocast to this type; None runs it in the type of its weights.
    """
    device = batch["tokens"].device.type
    with (
        teacher_mode(model),
        capture_attention(model, layers, callback, with_qkv=with_qkv),
        torch.autocast(device, dtype=autocast_dtype, enabled=autocast_dtype is not None),
    ):
        run_hidden(model, batch)


def student_precision(y: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Autocast to the type in which the teacher computed ``y``, so fp32 master weights compute as the teacher does.

    Casts are not cached: the cache of the teacher's enclosing autocast would outlive an optimizer step.

    Args:
        y: output of the teacher's layer.

    Returns:
        A context manager; without effect for fp32 and fp64.
    """
    low = y.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(y.device.type, dtype=y.dtype if low else None, enabled=low, cache_enabled=False)
