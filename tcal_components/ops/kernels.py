"""flash-linear-attention's functions, imported at first use and with one launch configuration for each kernel.

The library lets triton time every configuration that it knows of: some 75 compilations in the first forward and as many in
the first backward, again for packed documents and for every other class of batch sizes, which is minutes before the first
step. Here every kernel that the Gated DeltaNet layer launches has one configuration; whether tuned ones are faster was not
measured, and :func:`tune_kernels` is there for it.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

# Kernel: (block sizes, warps, stages). Few warps and stages, for room in shared memory; run with head sizes 64 and 128.
_LAUNCH: dict[str, tuple[dict[str, int], int, int]] = {
    "fla.modules.causal_conv1d.ops.causal_conv1d_fwd_kernel": ({"BD": 32}, 4, 3),
    "fla.modules.causal_conv1d.ops.causal_conv1d_bwd_kernel": ({"BD": 32}, 4, 3),
    "fla.modules.causal_conv1d.ops.causal_conv1d_update_kernel": ({"BD": 64}, 4, 3),
    "fla.modules.norm.l2norm.l2norm_fwd_kernel": ({"BT": 32}, 4, 3),
    "fla.modules.norm.l2norm.l2norm_bwd_kernel": ({"BT": 32}, 4, 3),
    "fla.modules.norm.fused_norm_gate.layer_norm_gated_fwd_kernel": ({"BT": 16}, 4, 3),
    "fla.modules.norm.fused_norm_gate.layer_norm_gated_bwd_kernel": ({"BT": 16}, 4, 3),
    "fla.ops.utils.cumsum.chunk_local_cumsum_scalar_kernel": ({}, 2, 3),
    "fla.ops.gated_delta_rule.chunk_fwd.chunk_gated_delta_rule_fwd_kkt_solve_kernel": ({"BK": 64}, 2, 3),
    "fla.ops.gated_delta_rule.wy_fast.recompute_w_u_fwd_kernel": ({}, 4, 2),
    "fla.ops.gated_delta_rule.wy_fast.prepare_wy_repr_bwd_kernel": ({}, 4, 2),
    "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_fwd_kernel_h_blockdim64": ({"BV": 32}, 4, 2),
    "fla.ops.common.chunk_delta_h.chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": ({"BV": 32}, 4, 1),
    "fla.ops.common.chunk_o.chunk_fwd_kernel_o": ({"BK": 64, "BV": 64}, 4, 3),
    "fla.ops.common.chunk_o.chunk_bwd_kernel_dqkwg": ({}, 4, 2),
    "fla.ops.common.chunk_o.chunk_bwd_kernel_dv_local": ({}, 4, 2),
}
_state = {"tune": False}


def tune_kernels(enabled: bool) -> None:
    """Chooses whether kernels are tuned at their first use, before any of them runs.

    Args:
        enabled (bool): time all configurations of every kernel, and keep the results on disk (by triton's own cache) for
            later processes. False, the default, takes the fixed ones.
    """
    _state["tune"] = enabled
    if enabled:
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")


@functools.cache
def fla_function(module: str, name: str) -> Callable[..., Any]:
    """A function of flash-linear-attention.

    Imported late, and for CUDA tensors only: without a GPU the library imports but cannot run.

    Args:
        module (str): such as ``fla.ops.gated_delta_rule``.
        name (str): of the function.

    Returns:
        Callable: the function; its kernels have their launch configuration.
    """
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    if not _state["tune"]:
        fix_launch_configurations()
    return function


def fix_launch_configurations() -> list[str]:
    """Leaves each of the library's kernels that have been imported with the one configuration of the table.

    A kernel is left as it is, to be tuned by triton, where this version of the library does not know the configuration of
    the table.

    Returns:
        list[str]: names of the kernels that have one configuration now.
    """
    fixed = []
    for name, tuner in _tuners():
        wanted = _LAUNCH.get(name)
        if wanted is None:
            continue
        kept = [c for c in tuner.configs if (c.kwargs, c.num_warps, c.num_stages) == wanted]
        if kept:
            tuner.configs = kept[:1]
            fixed.append(name)
    return fixed


def _tuners() -> Iterator[tuple[str, Any]]:
    """Qualified name and tuner of every kernel in the modules of the library that are imported."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    seen: set[int] = set()
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for kernel in list(vars(module).values()):
            while isinstance(kernel, Heuristics):
                kernel = kernel.fn
            if isinstance(kernel, Autotuner) and id(kernel) not in seen:
                seen.add(id(kernel))
                yield f"{kernel.base_fn.__module__}.{kernel.base_fn.__name__}", kernel
