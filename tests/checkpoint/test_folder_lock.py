"""One process a folder, whoever died in it before."""

import os
import signal
from pathlib import Path

import pytest

from tcal_components.checkpoint import folder_lock
from tcal_components.checkpoint.folder_lock import lock_folder


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the folder until it is killed."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        lock = lock_folder(tmp_path)
        os.write(writing, b"!")
        while lock:
            signal.pause()
    assert os.read(reading, 1) == b"!"
    alive = True

    def kill(number=signal.SIGKILL):
        nonlocal alive
        if alive:
            os.kill(process, number)
            os.waitpid(process, 0)
        alive = False

    yield process, kill
    kill()


def test_a_second_process_is_refused_in_one_line(holder, tmp_path):
    process, kill = holder
    with pytest.raises(BlockingIOError) as error:
        lock_folder(tmp_path)
    text = str(error.value)
    assert text.startswith(f"output_dir {tmp_path} is in use by process {process} on ") and "\n" not in text
    assert text.endswith("; wait for it to end, or give this run another output_dir")
    with pytest.raises(BlockingIOError):  # by another name
        lock_folder(os.path.relpath(tmp_path))
    kill()
    lock = lock_folder(tmp_path)
    assert f"process {os.getpid()} " in (tmp_path / ".lock").read_text()
    del lock


def test_it_is_free_once_it_is_forgotten(tmp_path):
    def free():
        """Whether another process gets it."""
        process = os.fork()
        if process == 0:
            folder_lock._held.clear()  # another process has none
            try:
                lock_folder(tmp_path)
                os._exit(0)
            except BlockingIOError:
                os._exit(1)
        return os.waitpid(process, 0)[1] == 0

    one, again = lock_folder(tmp_path), lock_folder(Path(str(tmp_path)))
    assert again is one, "a process may begin a second run where its first one failed"
    assert not free()
    del one
    assert not free()
    del again
    assert free()


def test_a_file_system_without_locks_refuses_nobody(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(folder_lock.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", flock)
    assert lock_folder(tmp_path)


def test_a_folder_that_is_not_there_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        lock_folder(tmp_path / "none")
    assert Path(error.value.filename) == tmp_path / "none" / ".lock"
