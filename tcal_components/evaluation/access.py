"""One way into a model for every measurement: our decoders and transformers' causal language models.

The head is always applied by the caller to the tokens it needs: at a vocabulary of 151 936 the logits of 4 x 4096 tokens
would take 10 GB in float32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tcal_components.data.masks import prepare_batch


def is_transformers(model: Any) -> bool:
    """Whether ``model`` is a causal language model of transformers (by its interface, so nothing is imported).

    Raises:
        ValueError: If it is neither that nor a decoder with ``hidden``.
    """
    if hasattr(model, "hidden") and hasattr(model, "layers"):
        return False
    if hasattr(model, "get_output_embeddings") and hasattr(model, "base_model"):
        return True
    raise ValueError(
        f"cannot evaluate a {type(model).__name__}: expected a HybridDecoder or a causal language model of transformers"
    )


def final_hidden(model: Any, batch: Mapping[str, Any]) -> Tensor:
    """Hidden states after the final norm.

    Args:
        model: The model.
        batch: ``tokens`` [B, T]; for our decoders also ``mask`` and ``input_pos``, either may be missing.

    Returns:
        Tensor: [B, T, E].
    """
    if is_transformers(model):
        return model.base_model(input_ids=batch["tokens"], use_cache=False).last_hidden_state
    options = {key: batch[key] for key in ("mask", "input_pos") if batch.get(key) is not None}
    # The class's method: under FSDP2 the instance's own `hidden` may gather and release the weights by itself, but
    # here `gathered` holds them until the head has run.
    return type(model).hidden(model, batch["tokens"], **options)


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """The head, [N, E] -> logits [N, V]."""
    return model.get_output_embeddings() if is_transformers(model) else model.output


def layers_of(model: Any) -> list[Any]:
    """The Transformer layers."""
    return list(model.base_model.layers if is_transformers(model) else model.layers)


def gathered(model: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls ``function(*args)`` while the weights of ``model`` are gathered, which matters under FSDP2 only."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    if not isinstance(model, FSDPModule):
        return function(*args)
    sharded: Any = model
    if "gathered_call" not in vars(sharded):
        # FSDP2 gathers in hooks of `forward` and of methods registered like this one.
        sharded.gathered_call = lambda function, *args: function(*args)
        register_fsdp_forward_method(sharded, "gathered_call")
    return sharded.gathered_call(function, *args)


@contextlib.contextmanager
def evaluating(*models: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None = None) -> Iterator[None]:
    """Evaluation mode without gradients, under autocast if asked for; the models' modes are restored."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    enabled = autocast_dtype is not None
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=autocast_dtype, enabled=enabled):
            yield
    finally:
        for model, mode in zip(models, modes):
            model.train(mode)


def device_of(model: nn.Module) -> torch.device:
    """Device of the weights."""
    return next(model.parameters()).device


def inputs_for(model: nn.Module, batch: Mapping[str, Tensor], device: torch.device) -> list[dict[str, Any]]:
    """Inputs that show ``model`` exactly the context that a packed batch gives: the text of the same document.

    Our decoders take a mask. transformers' linear-attention layers do not, so for its models each document of a row
    becomes an input of its own, which is the same computation.

    Args:
        model: The model.
        batch: ``tokens``, ``labels`` and optionally ``input_pos``, ``document`` (or a ready ``mask``), each [B, T].
        device: Where the model computes.

    Returns:
        list[dict]: Each with ``tokens``, ``labels``, ``position`` [b, t] and, for our decoders, the arguments of forward.
    """
    tokens = batch["tokens"]
    position = batch.get("input_pos")
    if position is None:
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    document = batch.get("document")
    if not is_transformers(model):
        if document is None:
            moved = {key: value.to(device) for key, value in batch.items() if isinstance(value, Tensor)}
            prepared: dict[str, Any] = {**batch, **moved}
        else:
            prepared = prepare_batch(dict(batch), device)
        return [{**prepared, "position": position.to(device)}]
    if document is None and batch.get("mask") is not None:
        raise ValueError("a transformers model needs `document` in the batch, not a mask")
    rows = torch.zeros_like(tokens) if document is None else document
    if bool((rows == rows[:, :1]).all()) and bool((rows >= 0).all()):
        parts = [(tokens, batch["labels"], position)]
    else:
        parts = []
        for row in range(tokens.shape[0]):
            for number in rows[row].unique().tolist():
                if number >= 0:
                    inside = rows[row] == number
                    parts.append(
                        (tokens[row, inside][None], batch["labels"][row, inside][None], position[row, inside][None])
                    )
    names = ("tokens", "labels", "position")
    return [{name: tensor.to(device) for name, tensor in zip(names, part)} for part in parts]
