"""End-to-end distillation of the hybrid student."""

from tcal_components.distillation.linear_kl import LinearKL
from tcal_components.distillation.model import DistillModel
from tcal_components.distillation.optimizer import parameter_groups
from tcal_components.distillation.settings import DistillConfig, DistillResult
from tcal_components.distillation.trainer import Distiller, NonFiniteLossError, distill

__all__ = [
    "DistillConfig",
    "DistillModel",
    "DistillResult",
    "Distiller",
    "LinearKL",
    "NonFiniteLossError",
    "distill",
    "parameter_groups",
]
