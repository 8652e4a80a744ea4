"""What every recipe sets up in the same way: the checked config, the processes, the text and the teacher."""

from tcal_components.setup.sections import COMMON_KEYS, COMPONENTS, ROLES, SUPPLIED, TEXTS, BenchConfig, ParallelConfig
from tcal_components.setup.workbench import Workbench

__all__ = ["COMMON_KEYS", "COMPONENTS", "ROLES", "SUPPLIED", "TEXTS", "BenchConfig", "ParallelConfig", "Workbench"]
