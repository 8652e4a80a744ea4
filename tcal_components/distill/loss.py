"""The loss that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torchtune import config

from tcal_components.ops.linear_kl import LinearKL

__all__ = ["LinearKL", "build_loss"]


def build_loss(component: Mapping[str, Any] | DictConfig | None) -> LinearKL:
    """The loss that ``kd_loss`` of a config names.

    Args:
        component: ``_component_`` and its arguments; None is :class:`LinearKL` with its defaults.

    Returns:
        LinearKL: the loss.

    Raises:
        ValueError: another loss: torchtune's take logits, which never exist here.
    """
    loss = LinearKL() if component is None else config.instantiate(OmegaConf.create(dict(component)))
    if not isinstance(loss, LinearKL):
        raise ValueError(
            f"kd_loss makes a {type(loss).__name__}; allowed: tcal_components.distill.LinearKL or a subclass, which takes "
            "hidden states"
        )
    return loss
