"""End-to-end distillation of the hybrid student."""

from tcal_components.distill.config import DistillConfig, DistillResult
from tcal_components.distill.loss import LinearKL
from tcal_components.distill.model import DistillModel
from tcal_components.distill.optimizer import parameter_groups
from tcal_components.distill.trainer import Distiller, NonFiniteLossError, distill

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
