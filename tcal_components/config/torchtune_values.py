"""Reads torchtune's keys and components into ours, before anything else looks at a config.

What has the same meaning here is written to the key that it has here, and torchtune's own top-level key stays where it is:
other values may refer to it. What has none is refused in the line that :mod:`tcal_components.config.torchtune_keys` has for it.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from tcal_components.config.numbers import Count, Positive, Rate, Share, Steps
from tcal_components.config.parse import read
from tcal_components.config.schema import ConfigError, Settings, fit, shown
from tcal_components.config.torchtune_components import switch_off
from tcal_components.config.torchtune_keys import TORCHTUNE_KEYS, line

LINEAR_KL = "tcal_components.distill.LinearKL"
# Where a key is read to that means the same.
_RENAMED = {
    "clip_grad_norm": "distill.clip_grad_norm",
    "log_every_n_steps": "distill.log_every_steps",
    "kd_ratio": "kd_loss.kd_ratio",
    "fsdp_cpu_offload": "parallel.cpu_offload",
    "fsdp_reshard_after_forward": "parallel.reshard_after_forward",
}
_DIRECTIONS = {"Forward": "forward", "Reverse": "reverse", "Symmetric": "symmetric"}
_DIVERGENCES = {
    f"torchtune.modules.loss.{name}{kind}": direction
    for name, direction in _DIRECTIONS.items()
    for kind in ("KLLoss", "KLWithChunkedOutputLoss")
}
_CROSS_ENTROPY = ("torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss")
_PROFILER = "torchtune.training.setup_torch_profiler"


@dataclasses.dataclass(frozen=True)
class TorchtuneNumbers(Settings):
    """Torchtune's keys of numbers and switches that are read into ours."""

    batch_size: Count | None = None
    gradient_accumulation_steps: Count | None = None
    epochs: Count | None = None
    max_steps_per_epoch: Steps | None = None
    clip_grad_norm: Positive | None = None
    log_every_n_steps: Steps | None = None
    kd_ratio: Share | None = None
    fsdp_cpu_offload: bool | None = None
    fsdp_reshard_after_forward: bool | None = None


def read_torchtune_training(cfg: DictConfig) -> None:
    """Writes torchtune's keys of training into sections ``distill``, ``kd_loss``, ``parallel`` and ``profiler``, in place.

    Args:
        cfg: of ``taylor_calibrate_kd``.

    Raises:
        ConfigError: a value that nothing here does, or one that contradicts our own key of it; in one line.
    """
    for name in ("loss", "profiler"):
        switch_off(cfg, name)
    for name, row in TORCHTUNE_KEYS.items():
        if "." not in name and row.outcome == "some" and name in cfg and _plain(cfg, name) not in row.accepts:
            raise ConfigError(line(name))
    if "collate_fn" in cfg:
        raise ConfigError(line("collate_fn"))
    _read_optimizer(cfg)
    numbers = read(TorchtuneNumbers, cfg)
    _read_losses(cfg)
    for key, ours in _RENAMED.items():
        if key in cfg and (getattr(numbers, key) is not None or key == "clip_grad_norm"):
            _put(cfg, ours, getattr(numbers, key), key)
    if numbers.batch_size is not None:
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        step = numbers.batch_size * (numbers.gradient_accumulation_steps or 1) * processes
        told = f"batch_size x gradient_accumulation_steps x {processes} processes"
        _put(cfg, "distill.batch_size", step, told)
        _put(cfg, "distill.micro_batch_size", numbers.batch_size, "batch_size")
    elif numbers.gradient_accumulation_steps is not None:
        raise ConfigError(line("gradient_accumulation_steps"))
    if numbers.max_steps_per_epoch is not None and numbers.epochs is None:
        raise ConfigError(line("max_steps_per_epoch"))
    _read_profiler(cfg)


def read_torchtune_length(cfg: DictConfig, *, rows: int, seq_len: int) -> None:
    """Writes ``distill.tokens`` where a config says in epochs how long the distillation is, in place.

    An epoch has as many steps as torchtune's: whole batches of the training text, at most ``max_steps_per_epoch``.

    Args:
        cfg: of ``taylor_calibrate_kd``.
        rows: sequences of the training text.
        seq_len: tokens a sequence.

    Raises:
        ConfigError: the text is shorter than a batch, or ``distill.tokens`` says otherwise; in one line.
    """
    numbers = read(TorchtuneNumbers, cfg)
    batch_size = OmegaConf.select(cfg, "distill.batch_size")
    if numbers.epochs is None or not isinstance(batch_size, int) or batch_size < 1:
        return
    steps = min(rows // batch_size, numbers.max_steps_per_epoch or rows)
    if not steps:
        raise ConfigError(f"epochs: the training text has {rows} sequences, fewer than the {batch_size} of one step")
    _put(cfg, "distill.tokens", numbers.epochs * steps * batch_size * seq_len, "the length in epochs")


def _read_optimizer(cfg: DictConfig) -> None:
    """One rate for everything is one for both parts; it is moved, because optimizers get theirs by group."""
    node = cfg.get("optimizer")
    if not isinstance(node, DictConfig):
        return
    if "weight_decay" in node:
        raise ConfigError(line("optimizer.weight_decay"))
    if "lr" in node:
        rate = fit(node["lr"], Rate, "optimizer.lr")
        for ours in ("distill.lr", "distill.base_lr"):
            _put(cfg, ours, rate, "optimizer.lr")
        del node["lr"]


def _read_losses(cfg: DictConfig) -> None:
    node = cfg.get("kd_loss")
    name = node.get("_component_") if isinstance(node, DictConfig) else None
    ratio = cfg.get("kd_ratio") if cfg.get("kd_ratio") is not None else OmegaConf.select(cfg, "kd_loss.kd_ratio")
    if isinstance(name, str) and name.startswith("torchtune."):
        if name not in _DIVERGENCES:
            raise ConfigError(line("kd_loss._component_"))
        if "num_output_chunks" in node:
            raise ConfigError(line("kd_loss.num_output_chunks"))
        given = _plain(cfg, "kd_loss")
        if given.pop("sym_kd_ratio", 0.5) != 0.5:
            raise ConfigError(line("kd_loss.sym_kd_ratio"))
        if ratio is None:
            raise ConfigError(
                f"kd_loss {name} needs kd_ratio beside it (torchtune's default is 0.5; 1 is the divergence alone)"
            )
        cfg.kd_loss = {**given, "_component_": LINEAR_KL, "direction": _DIVERGENCES[name]}
    loss = cfg.get("loss")
    if loss is not None:
        given = _plain(cfg, "loss")
        if not isinstance(given, dict) or given.get("_component_") not in _CROSS_ENTROPY or len(given) > 1:
            raise ConfigError(line("loss._component_"))
        if ratio is None:
            raise ConfigError(line("loss"))


def _read_profiler(cfg: DictConfig) -> None:
    node = cfg.get("profiler")
    if not isinstance(node, DictConfig):
        return
    if node.get("_component_", _PROFILER) != _PROFILER:  # torchtune's recipes take no other either
        raise ConfigError(f"profiler._component_ is {shown(node['_component_'])}; allowed: {_PROFILER}")
    node["_component_"] = _PROFILER
    if node.get("output_dir") is None:
        node["output_dir"] = f"{cfg.get('output_dir')}/profiling_outputs"


def _put(cfg: DictConfig, ours: str, value: Any, theirs: str) -> None:
    """Writes a value to the key that it has here; another one that is there already contradicts it."""
    section, _, key = ours.partition(".")
    if cfg.get(section) is None:
        if section == "distill" and "distill" not in (cfg.get("stages") or []):
            raise ConfigError(f"{theirs} is of the distillation, which neither stages nor a section distill ask for")
        cfg[section] = {"_component_": LINEAR_KL} if section == "kd_loss" else {}
    node = cfg[section]
    if not isinstance(node, DictConfig):
        return  # said where the section is read
    if node.get(key) is not None and node[key] != value:
        raise ConfigError(f"{theirs} gives {ours} {value}, but {ours} is {shown(node[key])}; leave one of them out")
    node[key] = value


def _plain(cfg: DictConfig, key: str) -> Any:
    value = cfg[key]
    return OmegaConf.to_container(value, resolve=True) if isinstance(value, (DictConfig, ListConfig)) else value
