"""Torchtune's metric loggers: what one needs is known before anything is read, and what it refuses is one line."""

from __future__ import annotations

import importlib.util
from typing import Any

from omegaconf import DictConfig
from torchtune.config import instantiate

from tcal_components.config import ConfigError

# Package and name to install it by, of torchtune's loggers that need one.
_NEEDS = {
    "WandBLogger": ("wandb", "wandb"),
    "TensorBoardLogger": ("tensorboard", "tensorboard"),
    "CometLogger": ("comet_ml", "comet_ml"),
}


def check_metric_logger(node: Any) -> None:
    """Refuses a logger whose package is missing.

    Args:
        node: section ``metric_logger``; None is no logger.

    Raises:
        ConfigError: in one line, with the command that installs it.
    """
    name = str(node.get("_component_")) if isinstance(node, DictConfig) else ""
    package, install = _NEEDS.get(name.rpartition(".")[2], ("", ""))
    if name.startswith("torchtune.") and package and importlib.util.find_spec(package) is None:
        raise ConfigError(f"metric_logger {name.rpartition('.')[2]} needs the package {package}: pip install {install}")


def open_metric_logger(cfg: DictConfig) -> Any:
    """Makes the logger that a config names and gives it the config, as torchtune's recipes do; in the first process.

    Args:
        cfg: of the recipe; its ``output_dir`` gets the file ``torchtune_config.yaml``.

    Returns:
        What has torchtune's ``log_dict`` and ``close``; None where the config names no logger.

    Raises:
        ConfigError: the logger cannot start: no account, no network, no such argument; in one line.
    """
    node = cfg.get("metric_logger")
    if node is None:
        return None
    check_metric_logger(node)
    try:
        logger = instantiate(node)
        if hasattr(logger, "log_config"):
            logger.log_config(cfg)
    except OSError:
        raise  # with the file that it is of
    except Exception as error:  # each service has kinds of its own
        raise ConfigError(f"metric_logger {node['_component_']} cannot start: {error}") from error
    return logger
