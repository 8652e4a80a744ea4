"""Start-up check of the kernels that a CUDA run needs, so that a fault shows before the first step and not in it."""

import importlib.util
import os
import shutil
from importlib import metadata
from pathlib import Path

import torch
from packaging.version import Version

MIN_FLA = Version("0.6.0")
# Gated backward of flash-linear-attention on Hopper, fault #640 of that project.
HOPPER_FAULT = (Version("3.4.0"), Version("3.7.1"))


def check_gdn_backend(device: torch.device | str) -> list[str]:
    """Finds what would keep the Gated DeltaNet kernels from training rightly on ``device``.

    Args:
        device (torch.device | str): where the model will run. Only CUDA has anything to check: elsewhere plain
            PyTorch is used.

    Returns:
        list[str]: one line a problem, each with the command that mends it; empty if all is well.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return []
    if not torch.cuda.is_available():
        return ["device cuda is asked for, but torch finds no CUDA device; set `device=cpu` or install a CUDA build"]
    return _problems(
        fla=_version("fla-core"),
        triton=_version("triton"),
        hopper=torch.cuda.get_device_capability(device)[0] == 9,
        tilelang=importlib.util.find_spec("tilelang") is not None,
        tilelang_disabled=os.environ.get("FLA_TILELANG") == "0",
        nvcc=_has_nvcc(),
    )


def _problems(
    *, fla: Version | None, triton: Version | None, hopper: bool, tilelang: bool, tilelang_disabled: bool, nvcc: bool
) -> list[str]:
    """The rules of :func:`check_gdn_backend`, apart from the look at the machine."""
    problems = []
    if fla is None:
        problems.append(
            "flash-linear-attention is not installed; run `pip install 'flash-linear-attention>=0.6.0,<0.7'`"
        )
    elif fla < MIN_FLA:
        problems.append(
            f"fla-core {fla} is older than {MIN_FLA} (wrong gradients on Hopper pass in silence there); "
            "run `pip install -U 'flash-linear-attention>=0.6.0,<0.7'`"
        )
    if triton is None:
        problems.append("triton is not installed; run `pip install triton`")
    elif hopper and HOPPER_FAULT[0] <= triton < HOPPER_FAULT[1]:
        fault = f"triton {triton} computes wrong gradients for the gated delta rule on Hopper GPUs"
        if not tilelang:
            problems.append(f"{fault}; run `pip install tilelang` (needs nvcc) or `pip install 'triton>=3.7.1'`")
        elif tilelang_disabled:
            problems.append(f"{fault} and FLA_TILELANG=0 switches the way round it off; run `unset FLA_TILELANG`")
        elif not nvcc:
            problems.append(
                f"{fault} and tilelang, the way round it, finds no nvcc; install the CUDA toolkit and run "
                "`export CUDA_HOME=/usr/local/cuda`, or run `pip install 'triton>=3.7.1'`"
            )
    return problems


def _version(package: str) -> Version | None:
    try:
        return Version(metadata.version(package))
    except metadata.PackageNotFoundError:
        return None


def _has_nvcc() -> bool:
    try:
        # The kernel library's own rule, where this version has it: it decides whether tilelang is used.
        from fla.backends import TileLangBackend

        return bool(TileLangBackend.is_available())
    except (ImportError, AttributeError, RuntimeError, OSError):
        # Not installed, or broken: judge by the files.
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        return shutil.which("nvcc") is not None or any(home and (Path(home) / "bin/nvcc").exists() for home in homes)
