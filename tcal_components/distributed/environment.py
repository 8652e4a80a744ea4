"""Start-up check: what would fail or mislead hours later, found before any weight is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import metadata
from typing import Any

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version

from tcal_components.distributed.parallel import ParallelContext
from tcal_components.ops.check import check_gdn_backend
from tcal_components.precision.float8 import float8_problem

GIB = 2**30

# More are not advised.
_MOST_PROCESSES = 4096

# torchtune 0.6.1 imports with these versions of torchao alone and is its last release.
_REQUIREMENTS = (
    Requirement("torch>=2.11"),
    Requirement("torchtune==0.6.1"),
    Requirement("torchao>=0.13,<0.16"),
    Requirement("transformers>=5.6.2,<6"),
    Requirement("flash-linear-attention>=0.6.0,<0.7"),
)
_SHOWN = ("torch", "torchtune", "torchao", "transformers", "flash-linear-attention", "triton")


@dataclasses.dataclass(frozen=True)
class StartupReport:
    """What a run starts with.

    Attributes:
        facts: one line each, for the log.
        problems: one line each, with the command that mends it; empty if all is well.
    """

    facts: tuple[str, ...]
    problems: tuple[str, ...]

    def raise_for_problems(self) -> None:
        """Refuse to start.

        Raises:
            ValueError: one line with every problem.
        """
        if self.problems:
            raise ValueError("; ".join(self.problems))


def startup_report(
    ctx: ParallelContext,
    *,
    needed_bytes: Callable[[int], float] | None = None,
    float8: bool = False,
    kernels: bool = True,
) -> StartupReport:
    """Check versions, kernels, memory and communication.

    Args:
        ctx: the processes.
        needed_bytes: estimate of what weights, gradients and optimizer state take in one process of so many.
        float8: whether float8 was asked for.
        kernels: whether Gated DeltaNet layers will run.

    Returns:
        Facts and problems as this process sees them.
    """
    found = {name: _version(name) for name in _SHOWN}
    facts = ["versions: " + ", ".join(f"{name} {version}" for name, version in found.items() if version)]
    problems = _version_problems({str(r.name): _version(r.name) for r in _REQUIREMENTS}, ctx.device)
    if kernels:
        problems += check_gdn_backend(ctx.device)
    if ctx.device.type == "cuda":
        facts.append(f"device: {ctx.world_size} x {torch.cuda.get_device_name(ctx.device)}")
        if ctx.dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            problems.append("this GPU does not compute in bf16; run with `dtype=fp32`")
        if ctx.world_size > 1 and not dist.is_nccl_available():
            problems.append(
                "several GPUs need NCCL and this torch has none; run `pip install torch` for Linux with CUDA"
            )
    else:
        facts.append(f"device: cpu, {ctx.world_size} process(es) of {torch.get_num_threads()} threads")
    if float8 and (problem := float8_problem(ctx.device)):
        problems.append(problem)
    if needed_bytes is not None:
        need, free = needed_bytes(ctx.world_size), free_bytes(ctx.device)
        facts.append(f"memory: {need / GIB:.2f} GiB estimated a process, {free / GIB:.2f} GiB free")
        problems += _memory_problem(needed_bytes, free, ctx)
    return StartupReport(tuple(facts), tuple(problems))


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of this machine for the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _memory_problem(needed_bytes: Callable[[int], float], free: float, ctx: ParallelContext) -> list[str]:
    # On the CPU all processes share what is free.
    share = free if ctx.device.type == "cuda" else free / ctx.world_size
    need = needed_bytes(ctx.world_size)
    if need <= share:
        return []
    mend = "take a smaller model"
    if ctx.device.type == "cuda":
        more = range(ctx.world_size + ctx.dp_replicate, _MOST_PROCESSES + 1, ctx.dp_replicate)
        # What every process holds whole may be too much for any number of them.
        if enough := next((processes for processes in more if needed_bytes(processes) <= share), None):
            mend = f"run `tune run --nproc_per_node {enough} ...`"
    asked = f"about {need / GIB:.1f} GiB are needed a process before activations and {share / GIB:.1f} GiB are free"
    return [f"{asked}; {mend}, store weights in bfloat16, or use `optimizer._component_=torchao.optim.AdamW8bit`"]


def _version_problems(found: dict[str, str | None], device: torch.device) -> list[str]:
    problems = []
    for requirement in _REQUIREMENTS:
        version = found.get(requirement.name)
        if requirement.name == "flash-linear-attention" and (device.type != "cuda" or version is None):
            continue  # the check of the kernels speaks of it
        if version is None:
            problems.append(f"{requirement.name} is not installed; run `pip install '{requirement}'`")
        elif not requirement.specifier.contains(Version(version).base_version, prereleases=True):
            problems.append(
                f"{requirement.name} is {version}, tested with {requirement.specifier}; run `pip install '{requirement}'`"
            )
    return problems


def _version(name: str) -> Any:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
