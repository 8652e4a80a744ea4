"""One run a folder: two in the same one would overwrite each other's files, hours later and in silence."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import weakref
from pathlib import Path

_NAME = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderLock:
    """A folder that this process holds as long as the object lives; see :func:`lock_folder`."""

    def __init__(self, path: Path, handle: int) -> None:
        weakref.finalize(self, _release, path, handle)


def _release(path: Path, handle: int) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(os.stat(path), os.fstat(handle)):
            path.unlink()
    os.close(handle)


# A process may hold a folder twice: a notebook that starts a second run after one that failed.
_held: weakref.WeakValueDictionary[Path, FolderLock] = weakref.WeakValueDictionary()


def lock_folder(folder: str | Path) -> FolderLock:
    """Keep other processes from running in a folder until the result is forgotten or this process ends, however it ends.

    The lock is the system's (``flock``) on a file in the folder, which goes with the lock unless its process is killed. On NFS Linux makes it a lock of the server, which
    other hosts see, unless the folder is mounted with ``nolock`` or ``local_lock=flock``; then runs of one host alone see one
    another. Where the file system knows no locks, nothing is refused.

    Args:
        folder: of the run.

    Returns:
        FolderLock: to keep.

    Raises:
        BlockingIOError: another process holds it; one line that says which.
        OSError: the folder is not there or cannot be written.
    """
    folder = Path(folder)
    path = folder.resolve() / _NAME
    if path in _held:
        return _held[path]
    handle = _locked(path, folder)
    lock = FolderLock(path, handle)
    with contextlib.suppress(OSError):  # for people
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _held[path] = lock
    return lock


def _locked(path: Path, folder: Path) -> int:
    """An open file that this process alone has locked, and that is the one in the folder."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 1000).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise BlockingIOError(
                f"output_dir {folder} is in use by {holder}; wait for it to end, or give this run another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(handle)
                raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
        os.close(handle)  # whoever held it has ended in between, and taken the file away
