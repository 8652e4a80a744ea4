"""The processes of a run: what they agree on, what they say, and how they end."""

from __future__ import annotations

import datetime
import signal
from typing import NoReturn

import torch
from torchtune import utils

from tcal_components.config import (
    ConfigError,
)
from tcal_components.distributed import (
    ParallelContext,
    check_cpu_offload,
)
from tcal_components.distributed.preemption import StopRequest
from tcal_components.distributed.watch import Watch
from tcal_components.precision.dtypes import parse_dtype
from tcal_components.setup.sections import ParallelConfig

log = utils.get_logger("INFO")


class Processes:
    """This process among those of a run.

    Args:
        device: "cpu" or "cuda".
        dtype: of the computation.
        parallel: the config section.
        resumes: what continues an interrupted run, in words.

    Attributes:
        ctx: processes, device and compute dtype.

    Raises:
        ConfigError: a device, type or offload that cannot be had here.
    """

    def __init__(self, device: str, dtype: str, parallel: ParallelConfig, *, resumes: str = "the same command") -> None:
        self.parallel, self.resumes = parallel, resumes
        timeout = datetime.timedelta(minutes=parallel.timeout_minutes)
        self.ctx = ParallelContext.create(
            device, dtype=parse_dtype(dtype, "dtype"), dp_replicate=parallel.dp_replicate, timeout=timeout
        )
        self.watch = Watch(timeout) if torch.distributed.is_initialized() else None
        if parallel.cpu_offload:
            try:
                check_cpu_offload(self.ctx)
            except ValueError as error:
                raise ConfigError(f"parallel.{error}") from error

    def check_batch_size(self, batch_size: int, where: str) -> None:
        """Refuse a batch that the processes cannot share equally.

        Args:
            batch_size: sequences a step over all processes.
            where: its key, for the message.

        Raises:
            ConfigError: it is no multiple of their number.
        """
        if batch_size % self.ctx.world_size:
            raise ConfigError(
                f"{where} is {batch_size}, expected a multiple of the {self.ctx.world_size} processes: it counts the "
                "sequences of a step over all of them"
            )

    def any_process(self, stop: StopRequest) -> bool:
        """Whether a signal has come to any of the processes."""
        return bool(self.ctx.all_sum(torch.tensor(int(stop()), device=self.ctx.device)))

    def end_early(self, what: str, step: int, stop: StopRequest) -> NoReturn:
        """Leave as a signal would have, but with everything saved.

        Args:
            what: was going on.
            step: of it, up to which it is saved.
            stop: the signal; it may have come to another process.

        Raises:
            SystemExit: with the status that shells give a process which a signal ended.
        """
        name = stop.signal.name if stop.signal else "a signal to another process"
        self.log(f"{what}: stopped by {name} after step {step}; {self.resumes} goes on from there")
        raise SystemExit(128 + (stop.signal or signal.SIGTERM))

    def close(self) -> None:
        """The end of a run that went well: wait for the other processes, which would else take this one's end for a fault."""
        if self.watch is not None:
            self.watch.close()
            torch.distributed.destroy_process_group()

    def log(self, text: str) -> None:
        """A line in the log, of the first process."""
        if self.ctx.is_first:
            log.info(text)
