"""End-to-end distillation of the hybrid student."""

from tcal_components.distill.config import DistillConfig, DistillResult
from tcal_components.distill.gradient import NonFiniteLossError
from tcal_components.distill.loop import distill, train
from tcal_components.distill.loss import LinearKL
from tcal_components.distill.model import DistillModel
from tcal_components.distill.optimizer import parameter_groups
from tcal_components.distill.trainer import Distiller

__all__ = [
    "DistillConfig",
    "DistillModel",
    "DistillResult",
    "Distiller",
    "LinearKL",
    "NonFiniteLossError",
    "distill",
    "parameter_groups",
    "train",
]
