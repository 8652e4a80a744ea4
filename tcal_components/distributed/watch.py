"""Processes of one run look after one another: none waits for hours for one that has died or hangs."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import os
import secrets
import select
import socket
import sys
import threading
import time
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

# How long the others may wait while the first process alone reads, writes, exports and verifies: a large model on a slow
# disk takes longer than any time after which a silent process should count as hung.
_WAIT = datetime.timedelta(hours=4)

# What a process says once a second: all is well; it has come to its end; it ends before that and has said why.
_HERE, _DONE, _LEFT = b"h", b"d", b"l"


def patient_group() -> Any:
    """All processes, over gloo, in a group whose collectives wait for hours; the first call is made by all together."""
    return _patient_group(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _patient_group(world: Any) -> Any:
    return dist.new_group(backend="gloo", timeout=_WAIT)


def barrier() -> None:
    """Wait for all processes, for hours while one of them is at work; one that died or hangs is found by :class:`Watch`."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier(group=patient_group())


def shared(value: T) -> T:
    """The first process's value, in all of them; they wait for it as at a :func:`barrier`."""
    if not dist.is_initialized():
        return value
    found = [value]
    dist.broadcast_object_list(found, src=0, group=patient_group())
    return found[0]


def is_first() -> bool:
    """Whether this is the first process of the run."""
    return not dist.is_initialized() or dist.get_rank() == 0


def is_first_of_machine() -> bool:
    """Whether this is the first process of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Watch:
    """Ends this process, with one line, when another one of the run has died or no longer answers.

    A thread in every process sends the first process a byte a second, and gets one. The system closes the connections of a
    process that dies, which the others notice at once; one that is stopped, or whose machine is gone, falls silent. The bytes
    come from a thread, so a process that writes or tokenises for an hour is well. (Where a main thread alone hangs, the
    timeout of the collective that the others are in ends them.) No NCCL or gloo: their own timeouts tell neither which
    process it was nor leave the connection to the others usable.

    All processes make one together.

    Args:
        limit: silence after which a process counts as hung.
    """

    def __init__(self, limit: datetime.timedelta) -> None:
        self._limit = limit.total_seconds()
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._peers = self._connect()
        self._mine = _HERE
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        atexit.register(self._leave)
        self._excepthook, sys.excepthook = sys.excepthook, self._hook

    def close(self) -> None:
        """Wait until all processes have come to their end, and stop watching: the last call of a run that went well."""
        self._mine = _DONE
        self._thread.join()
        atexit.unregister(self._leave)
        sys.excepthook = self._excepthook

    def _connect(self) -> dict[int, socket.socket]:
        """By rank, a connection of every other process to the first one."""
        found: list[Any] = [None]
        if self._rank == 0:
            server = socket.create_server(("", 0))
            found = [(server.getsockname()[1], secrets.token_bytes(16))]
        dist.broadcast_object_list(found, src=0, group=patient_group())
        port, secret = found[0]
        if self._rank:
            first = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=60)
            first.sendall(secret + self._rank.to_bytes(4, "big"))
            return {0: first}
        peers: dict[int, socket.socket] = {}
        with server:
            server.settimeout(60)
            while len(peers) < self._world - 1:
                peer, _ = server.accept()
                peer.settimeout(60)
                hello = peer.recv(20, socket.MSG_WAITALL)
                if hello[:16] == secret:  # and not somebody who tries all ports
                    peers[int.from_bytes(hello[16:], "big")] = peer
        return peers

    def _leave(self) -> None:
        self._mine = _LEFT
        self._thread.join(timeout=5)

    def _hook(self, *error: Any) -> None:
        """A collective fails where another process has died: then the thread says so meanwhile, and ends this one."""
        self._thread.join(timeout=5)
        self._excepthook(*error)

    def _run(self) -> None:
        said = dict.fromkeys(self._peers, _HERE)
        began = time.monotonic()
        heard, last, spoke = dict.fromkeys(self._peers, began), began, 0.0
        while True:
            mine, now = self._mine, time.monotonic()
            say = mine
            if self._rank == 0 and _LEFT in said.values():
                say = _LEFT
            elif self._rank == 0 and mine == _DONE and set(said.values()) != {_DONE}:
                say = _HERE
            if say != _HERE or now - spoke >= 1:
                spoke = now
                for peer in self._peers.values():
                    with contextlib.suppress(OSError):  # it is gone, as its end of the connection will tell
                        peer.send(say, socket.MSG_DONTWAIT)
            if mine == _LEFT or (self._rank == 0 and say == _DONE):
                return
            if say == _LEFT:
                self._end(after=2)
            if now - last > 10:  # it was this process that was stopped, perhaps all of them
                heard = dict.fromkeys(self._peers, now)
            last = now
            ready, _, _ = select.select(list(self._peers.values()), [], [], 0.2)
            for rank, peer in list(self._peers.items()):
                if peer in ready:
                    if not (data := _received(peer)):
                        if said[rank] == _HERE:
                            self._blame(rank, "has died")
                        del self._peers[rank]
                        continue
                    said[rank], heard[rank] = data[-1:], now
                if said[rank] == _HERE and now - heard[rank] > self._limit:
                    minutes = f"{self._limit / 60:.3g}"
                    self._blame(rank, f"has not answered for {minutes} minutes (parallel.timeout_minutes)")
            if self._rank and said[0] == _DONE:
                return
            if self._rank and said[0] == _LEFT:
                self._end(after=2)

    def _blame(self, rank: int, what: str) -> None:
        for other, peer in self._peers.items():
            if other != rank:
                with contextlib.suppress(OSError):
                    peer.send(_LEFT, socket.MSG_DONTWAIT)
        time.sleep(0.5)  # after a signal to all processes this one ends meanwhile, without a word
        # All others know when it is the first process: one of each machine says so.
        if self._rank <= 1 or os.environ.get("LOCAL_RANK") == "0":
            line = f"\nerror: process {rank} of {self._world} {what}; process {self._rank} ends too\n"
            os.write(2, line.encode())
        self._end()

    def _end(self, after: float = 0) -> None:
        time.sleep(after)  # it may be on its way out too, as after a signal to all of them
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def _received(peer: socket.socket) -> bytes:
    try:
        return peer.recv(64)
    except OSError:
        return b""
