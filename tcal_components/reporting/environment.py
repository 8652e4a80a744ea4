"""What a run ran on, and what a stage of it took: versions, device, time, memory."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch

GIB = 2.0**30

# Report key -> names under which the distribution may be installed, the first one found counts.
_DISTRIBUTIONS = {
    "torch": ("torch",),
    "torchtune": ("torchtune",),
    "torchao": ("torchao",),
    "transformers": ("transformers",),
    "fla": ("flash-linear-attention", "fla-core"),
    "triton": ("triton",),
    "tcal": ("taylor-calibrate",),
}


def package_versions() -> dict[str, str | None]:
    """Versions of what decides the numbers; ``None`` where a package is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for key, names in _DISTRIBUTIONS.items():
        versions[key] = None
        for name in names:
            try:
                versions[key] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    versions["torch"] = torch.__version__  # carries the build (+cpu, +cu128), the metadata may not
    return versions


def device_description(device: torch.device | str) -> str:
    """``NVIDIA H200`` for a GPU, the number of threads for the CPU."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


class StageClock:
    """Time, tokens, peak memory and numbers of one stage; yielded by :meth:`Report.stage`.

    Args:
        device: The device whose memory counts; on CPU it is the process's resident memory.
        earlier_seconds: Time spent before an interruption.
        earlier_peak_gib: Peak memory before it.

    Attributes:
        numbers: What the stage has recorded for the report.
    """

    def __init__(self, *, device: torch.device, earlier_seconds: float = 0.0, earlier_peak_gib: float = 0.0) -> None:
        self.device = device
        self.tokens = 0
        self.numbers: dict[str, Any] = {}
        self._earlier_seconds, self._earlier_peak = earlier_seconds, earlier_peak_gib
        self._start = time.perf_counter()
        self._stopped: float | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_peak_rss()

    def add_tokens(self, tokens: int) -> None:
        """Counts tokens (over all processes) for the rate."""
        self.tokens += int(tokens)

    def record(self, values: Mapping[str, Any]) -> None:
        """Keeps sections of the report that are the stage's; those of the same name are merged one level deep."""
        for section, value in values.items():
            known = self.numbers.get(section)
            self.numbers[section] = {**known, **value} if isinstance(known, dict) else value

    def stop(self) -> None:
        """What follows in the stage is not its work, such as the evaluation of what it made."""
        self._stopped = self.seconds

    @property
    def seconds(self) -> float:
        """Wall-clock seconds so far, the time before an interruption included."""
        if self._stopped is not None:
            return self._stopped
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels still in the queue belong to this stage
        return self._earlier_seconds + time.perf_counter() - self._start

    @property
    def peak_memory_gib(self) -> float:
        """Peak since the stage began: allocated GPU memory, or resident memory of this process."""
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _peak_rss_bytes()
        return max(peak / GIB, self._earlier_peak)


def _reset_peak_rss() -> None:
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: resets VmHWM, which else only ever grows over the stages
    except OSError:
        pass


def _peak_rss_bytes() -> float:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) * (1 if sys.platform == "darwin" else 1024)  # macOS counts bytes, Linux KiB
