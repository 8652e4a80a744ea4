"""Optimizer of the distillation: which parameters learn at which rate."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.distributed.tensor import DTensor
from torchao.optim import adam
from torchtune import config, training

from tcal_components.checkpoint.optimizer_state import named_trainable
from tcal_components.distill.config import DistillConfig
from tcal_components.distill.sharded_adam import step_on_shards
from tcal_components.modules.hybrid_decoder import HybridDecoder

DEFAULT_OPTIMIZER = {"_component_": "torch.optim.AdamW", "betas": [0.9, 0.95]}

_FUSABLE = ("torch.optim.Adam", "torch.optim.AdamW")

# By name: marks on parameters are lost by fully_shard and deepcopy.
_NO_DECAY = (".decay.A_log", ".decay.dt_bias", ".scale", "_conv.weight", ".bias")


def parameter_groups(student: HybridDecoder, *, lr: float, base_lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters of the converted layers' mixers at one learning rate, the rest at another.

    Args:
        student: sharded or not, wrapped or not.
        lr: of ``attn.*`` in converted layers.
        base_lr: of everything else.
        weight_decay: of matrices; norms, biases, convolutions and decay parameters have none.

    Returns:
        Non-empty groups with ``params``, ``lr`` and ``weight_decay``, always in the same order.
    """
    mixers = tuple(f"layers.{index}.attn." for index in student.converted_layers)
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named_trainable(student):
        decays = not name.endswith(_NO_DECAY)
        groups.setdefault((name.startswith(mixers), decays), []).append(parameter)
    return [
        {"params": groups[key], "lr": lr if key[0] else base_lr, "weight_decay": weight_decay if key[1] else 0.0}
        for key in sorted(groups)
    ]


def build_optimizer(
    groups: list[dict[str, Any]], component: Mapping[str, Any] | DictConfig | None
) -> torch.optim.Optimizer:
    """Instantiate an optimizer as torchtune's configs name it.

    Args:
        groups: from ``parameter_groups``; their learning rate and weight decay take precedence.
        component: ``_component_`` and its arguments; None is ``torch.optim.AdamW`` with betas 0.9 and 0.95, fused on CUDA
            unless ``fused`` or ``foreach`` is given. ``torchao.optim.AdamW8bit`` needs 2 instead of 8 bytes a parameter for
            its moments; with weights in bfloat16 give it ``bf16_stochastic_round: true``.

    Returns:
        The optimizer.

    Raises:
        ValueError: if ``_component_`` is missing, or ``lr`` or ``weight_decay`` is there.
    """
    given = OmegaConf.create(dict(DEFAULT_OPTIMIZER if component is None else component))
    if "_component_" not in given:
        raise ValueError("optimizer has no _component_; for example optimizer: {_component_: torch.optim.AdamW}")
    for name in ("lr", "weight_decay"):
        if name in given:
            own = "distill.lr and distill.base_lr" if name == "lr" else "distill.weight_decay"
            raise ValueError(f"{name} is {given[name]}; set {own} instead")
    on_cuda = all(parameter.device.type == "cuda" for group in groups for parameter in group["params"])
    if on_cuda and given["_component_"] in _FUSABLE and not {"fused", "foreach"} & set(given):
        # By default torch loops over parameters under FSDP2, and elsewhere holds square roots of all second moments at once.
        given["fused"] = True
    optimizer = config.instantiate(given, groups)
    sharded = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    if sharded and isinstance(optimizer, adam._AdamBase):
        optimizer.step = types.MethodType(step_on_shards, optimizer)
    return optimizer


def build_schedule(
    optimizer: torch.optim.Optimizer, settings: DistillConfig, *, step: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rates from ``step`` on.

    Args:
        optimizer: its groups have an ``initial_lr`` if ``step`` is not 0.
        settings: ``steps``, and ``lr_scheduler`` or ``warmup_steps``.
        step: optimizer steps done.

    Returns:
        LambdaLR: linear warm-up and a cosine, or what ``lr_scheduler`` names.

    Raises:
        ValueError: if the component returns something else.
    """
    numbers = {"num_training_steps": settings.steps, "last_epoch": step - 1}
    if settings.lr_scheduler is None:
        return training.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=settings.warmup_steps, **numbers)
    schedule = config.instantiate(OmegaConf.create(dict(settings.lr_scheduler)), optimizer, **numbers)
    if not isinstance(schedule, torch.optim.lr_scheduler.LambdaLR):
        raise ValueError(
            f"lr_scheduler makes a {type(schedule).__name__}; allowed is what returns a LambdaLR, such as "
            "torchtune.training.get_cosine_schedule_with_warmup"
        )
    return schedule
