"""Processes, sharding and the check of the machine at start-up."""

from tcal_components.distributed.parallel import (
    ParallelContext,
    check_cpu_offload,
    materialize,
    parallelize,
    reshard,
    setup_process_group,
    to_storage_dtype,
)
from tcal_components.distributed.state_dicts import gather_full_state_dict, load_full_state_dict

__all__ = [
    "ParallelContext",
    "check_cpu_offload",
    "gather_full_state_dict",
    "load_full_state_dict",
    "materialize",
    "parallelize",
    "reshard",
    "setup_process_group",
    "to_storage_dtype",
]
