"""float8 matrix products of the decoder's linear layers, through torchao (0.13 to 0.15)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear
from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")

# The products are done in tiles of 16; torchao raises in the first forward pass for anything else.
_TILE = 16
# Decay and write gate: a few rows each that steer the state over thousands of tokens; float8 saves nothing there.
_SENSITIVE = ("a_proj", "b_proj")


@dataclasses.dataclass(frozen=True)
class Float8Layers:
    """Which linear layers compute in float8.

    Attributes:
        converted: names of those that do.
        kept: name and reason of those that stay in the model's own precision.
    """

    converted: tuple[str, ...]
    kept: dict[str, str]

    def summary(self) -> str:
        """One line for the log: layers that stay, grouped by reason and with the layer number left out."""
        kinds: dict[str, set[str]] = {}
        for name, reason in self.kept.items():
            kinds.setdefault(reason, set()).add(".".join(part for part in name.split(".") if not part.isdigit()))
        stay = "; ".join(f"{', '.join(sorted(names))} ({reason})" for reason, names in sorted(kinds.items()))
        return f"float8: {len(self.converted)} linear layers; not in float8: {stay or 'none'}"


def float8_problem(device: torch.device | str) -> str | None:
    """Why a device cannot do float8 products, with what to do about it; None if it can."""
    device = torch.device(device)
    fall_back = "set precision: {student: null, teacher: null}"
    if device.type != "cuda":
        return f"float8 needs a CUDA device, this run is on {device.type}; {fall_back}"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"float8 needs compute capability 8.9 (Ada, Hopper), this GPU has {capability[0]}.{capability[1]}; {fall_back}"
    return None


def apply_float8(
    model: nn.Module,
    *,
    device: torch.device | str,
    frozen: bool = False,
    sharded: bool = False,
    recipe: str = "tensorwise",
    emulate: bool = False,
    keep: Callable[[str, nn.Linear], bool] | None = None,
) -> Float8Layers:
    """Let the linear layers in ``model.layers`` compute in float8; embedding and head stay as they are.

    A model that is trained, or sharded by FSDP2, keeps its weights in their own precision and casts them in each product: call
    this *before* ``parallelize``. A frozen model in one process is quantised for good, which halves the memory of bf16
    weights: call this *after* its weights were loaded, in bfloat16 (autocast cannot cast quantised weights).

    FSDP2's float8 all-gather stays off: it saves traffic for the tensorwise recipe only, and every weight becomes a wrapped
    tensor that loading by assignment silently unwraps.

    Args:
        model: a decoder with ``layers``.
        device: where it runs.
        frozen: nothing in the model is trained.
        sharded: ``parallelize`` will shard it.
        recipe: "tensorwise" is fastest, "rowwise" (one scale a row) more accurate, "rowwise_with_gw_hp" computes the
            gradients of weights in the model's own precision. A quantised frozen model always has one scale a row.
        emulate: compute the same numbers without float8 hardware, slowly; for tests.
        keep: names and layers to leave alone besides those whose shapes do not fit.

    Returns:
        What was converted and what was not.

    Raises:
        ValueError: for an unknown recipe, a device without float8, or frozen weights that are not bfloat16.
    """
    if recipe not in RECIPES:
        raise ValueError(f"float8 recipe is '{recipe}', allowed: {', '.join(RECIPES)}")
    problem = float8_problem(device)
    if problem and not emulate:
        raise ValueError(problem)
    kept: dict[str, str] = {}
    converted: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            reason = _reason_to_keep(name, module, keep)
            if reason is None:
                converted.append(name)
            else:
                kept[name] = reason
    chosen = frozenset(converted)
    if frozen and not sharded and not emulate:
        wrong = {str(p.dtype) for name in chosen for p in model.get_submodule(name).parameters()} - {"torch.bfloat16"}
        if wrong:
            raise ValueError(
                f"a float8 teacher is quantised from bfloat16 weights, these are {', '.join(sorted(wrong))}"
            )
        # torchao's default would switch all fp32 products to TF32 and tune every later compilation for minutes.
        quantise = Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)
        quantize_(model, quantise, filter_fn=lambda _, name: name in chosen)
    else:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name in chosen)
    return Float8Layers(tuple(converted), kept)


@contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Within it, trained layers multiply in the model's own precision, as the exported weights will be used.

    Args:
        model: with layers that :func:`apply_float8` converted for training, sharded or not; others are left as they are.
    """
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    try:
        for layer in layers:
            layer.forward = partial(nn.Linear.forward, layer)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _reason_to_keep(name: str, module: nn.Linear, keep: Callable[[str, nn.Linear], bool] | None) -> str | None:
    if not name.startswith("layers."):
        return "head"
    if name.rpartition(".")[2] in _SENSITIVE:
        return "gates"
    if module.in_features % _TILE or module.out_features % _TILE:
        return f"shape not in multiples of {_TILE}"
    if keep is not None and keep(name, module):
        return "asked for"
    return None
