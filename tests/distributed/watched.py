"""Three processes that watch one another, for test_watch.py: ``python watched.py FOLDER LIMIT``.

All cases run at the same time, forked from one process that has imported everything. The result, one JSON object on stdout,
has by case how each process ended, the seconds from the fault to the end of the last one that had none, and what was said.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tcal_components.distributed import setup_process_group
from tcal_components.distributed.watch import Watch, barrier

WORLD = 3


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def leaves() -> None:
    print("error: the disk is full", file=sys.stderr)
    sys.exit(3)


def raises() -> None:
    raise KeyError("a fault of ours")


def writes() -> None:
    time.sleep(3 * float(sys.argv[2]))


def member(rank: int, port: int, faulty: bool, fault: Callable[[], None], log: Path) -> None:
    """One process of a case; its end is that of the interpreter."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    limit = datetime.timedelta(seconds=float(sys.argv[2]))
    setup_process_group("cpu", timeout=limit)
    watch = Watch(limit)
    barrier()
    if faulty:
        log.with_suffix(".fault").write_text(str(time.monotonic()))
        fault()
    barrier()
    watch.close()


def main() -> None:
    cases = {
        "the first writes for long": (0, writes),
        "the last dies": (2, dies),
        "the first dies": (0, dies),
        "the second hangs": (1, hangs),
        "the first hangs": (0, hangs),
        "the second leaves": (1, leaves),
        "the last raises": (2, raises),
    }
    folder, ids = Path(sys.argv[1]), {}
    for name, (faulty, fault) in cases.items():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(WORLD):
            process = os.fork()
            if process == 0:
                return member(rank, port, rank == faulty, fault, folder / name)
            ids[process] = name, rank
    status: dict[str, dict[int, int]] = {name: {} for name in cases}
    ended = dict.fromkeys(cases, 0.0)
    while any(len(found) < WORLD for found in status.values()):
        process, code = os.wait()
        name, rank = ids[process]
        status[name][rank] = os.waitstatus_to_exitcode(code)
        faulty, fault = cases[name]
        if rank != faulty:
            ended[name] = time.monotonic()
            if fault is hangs and len(status[name]) == WORLD - 1:
                os.kill(next(other for other, who in ids.items() if who == (name, faulty)), signal.SIGKILL)
    found = {
        name: {
            "status": [status[name][rank] for rank in range(WORLD)],
            "seconds": ended[name] - float((folder / name).with_suffix(".fault").read_text()),
            "said": (folder / name).read_text(),
        }
        for name in cases
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
