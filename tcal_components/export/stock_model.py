"""Loads an export with transformers, quietly and with code that runs on the device at hand."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tcal_components.checkpoint.teacher import locate_tensors


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences progress bars and the loader's report, which `load_stock_model` reads instead."""
    from transformers.utils import logging

    verbosity, progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if progress:
            logging.enable_progress_bar()


def load_stock_model(folder: Path, *, trust_remote_code: bool) -> tuple[Any, list[str]]:
    """Loads the export in float32.

    Args:
        folder: The export.
        trust_remote_code: Whether its class is in the folder.

    Returns:
        tuple[Any, list[str]]: The model, and what does not fit: a tensor of the class that the folder does not hold (a
        quantised load would compute with whatever its memory held), one that the class does not have, and what the
        loader itself complained about.
    """
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, trust_remote_code=trust_remote_code
    )
    model, report = loaded
    problems = []
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    stored, expected = set(locate_tensors(folder)), set(model.state_dict()) - tied
    missing = (expected - stored) | (set(report["missing_keys"]) - tied)
    unexpected = (stored - expected) | set(report["unexpected_keys"])
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            problems.append(f"{len(names)} tensors are {what} for {type(model).__name__} (first: {min(names)})")
    if report.get("mismatched_keys"):
        problems.append(f"transformers finds shapes that do not fit: {min(map(str, report['mismatched_keys']))}")
    return model, problems


@contextlib.contextmanager
def usable_kernels(model: Any, device: torch.device) -> Iterator[None]:
    """Makes transformers use its PyTorch code on a CPU.

    Where triton is installed, transformers 5.6 to 5.24 choose the kernels of flash-linear-attention when the class is
    imported, whatever the device, and a forward on the CPU raises. The choice is undone for the time of the check.
    """
    if device.type != "cpu":
        yield
        return
    module = sys.modules[next(cls for cls in type(model).__mro__ if cls.__name__ == "Qwen3_5ForCausalLM").__module__]
    with contextlib.ExitStack() as stack:
        names = ("chunk_gated_delta_rule", "recurrent_gated_delta_rule")
        functions = [f"torch_{name}" for name in names] + ["causal_conv1d_fn", "causal_conv1d_update"]
        for name in functions:  # since 5.17: global functions that wrap the PyTorch code
            original: Any = getattr(module, name, None)
            if hasattr(original, "__wrapped__"):
                stack.callback(setattr, module, name, original)
                setattr(module, name, original.__wrapped__)
        for layer in model.modules():  # before: attributes of the layer
            if type(layer).__name__ != "Qwen3_5GatedDeltaNet" or "chunk_gated_delta_rule" not in vars(layer):
                continue
            for name in names:
                setattr(layer, name, getattr(module, f"torch_{name}"))
            layer.causal_conv1d_fn = None
            layer.causal_conv1d_update = module.torch_causal_conv1d_update
            if type(layer.norm).__name__ != "Qwen3_5RMSNormGated":
                norm = module.Qwen3_5RMSNormGated(layer.head_v_dim, eps=layer.layer_norm_epsilon)
                norm.load_state_dict(layer.norm.state_dict())
                layer.norm = norm
        yield


def cache_of(out: Any) -> dict[str, Any]:
    """The cache that a model of transformers gave, as an argument of its next call; the name changed within version 5."""
    name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    return {name: getattr(out, name)}
