"""A signal becomes a request to stop, once, and nothing stays behind."""

import os
import signal
import sys
import time

import pytest

from tcal_components.distributed.preemption import SIGNALS, one_line_ending, stop_on_signals


def until(true):
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def ending(tmp_path):
    """How a process ends that runs a function, and what it said on stderr."""

    def run(body):
        process = os.fork()
        if process == 0:
            code = 99
            try:
                sys.stderr = (tmp_path / "stderr").open("w")
                os.dup2(sys.stderr.fileno(), 2)
                body()
                code = 0
            except SystemExit as end:
                code = end.code
            finally:
                os._exit(code)
        _, status = os.waitpid(process, 0)
        return os.waitstatus_to_exitcode(status), (tmp_path / "stderr").read_text()

    return run


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_asks_and_a_second_ends_at_once(ending, number, tmp_path):
    def body():
        signal.signal(number, signal.SIG_DFL)
        with stop_on_signals() as request:
            assert not request() and request.signal is None
            os.kill(os.getpid(), number)
            until(request)
            assert request.signal is number
            (tmp_path / "asked").touch()
            os.kill(os.getpid(), number)
            time.sleep(20)

    began = time.monotonic()
    assert ending(body) == (128 + number, "") and (tmp_path / "asked").exists()
    assert time.monotonic() - began < 10


def test_a_second_one_ends_what_waits_for_ever_outside_of_python(ending):
    """As in a collective whose other processes are gone: no Python handler would be called."""

    def body():
        reading, _ = os.pipe()
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGINT)
            until(request)
            if os.fork() == 0:
                time.sleep(0.2)
                os.kill(os.getppid(), signal.SIGTERM)
                os._exit(0)
            os.read(reading, 1)  # restarted after every Python handler

    assert ending(body) == (128 + signal.SIGTERM, "")


def test_a_launcher_repeats_the_signal(ending, monkeypatch):
    """Ctrl-C reaches all processes of a terminal, and torchrun sends each of its own another one."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")

    def body():
        with stop_on_signals() as request:
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
                time.sleep(0.2)
            assert request.signal is signal.SIGINT
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)

    assert ending(body) == (128 + signal.SIGINT, "")


def test_what_was_there_comes_back():
    acted = []
    before = signal.signal(signal.SIGUSR1, lambda *_: acted.append(1)), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals() as request:
            os.kill(os.getpid(), signal.SIGHUP)  # under nohup
            os.kill(os.getpid(), signal.SIGUSR1)
            until(request)
            assert request.signal is signal.SIGUSR1 and acted == []
        with pytest.raises(KeyError), stop_on_signals(signal.SIGUSR1):
            raise KeyError
        os.kill(os.getpid(), signal.SIGUSR1)
        until(lambda: acted)
        with stop_on_signals() as request:
            assert not request(), "each stage has its own"
    finally:
        signal.signal(signal.SIGUSR1, before[0])
        signal.signal(signal.SIGHUP, before[1])


def test_ctrl_c_where_nothing_is_to_be_saved_is_one_line(ending):
    def body():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with one_line_ending():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(20)

    assert ending(body) == (128 + signal.SIGINT, "\nerror: stopped by SIGINT; what is finished is kept\n")


def test_what_is_no_fault_of_the_machine_keeps_its_traceback(capsys):
    with pytest.raises(KeyError), one_line_ending():
        raise KeyError
    with pytest.raises(SystemExit) as end, one_line_ending():
        raise FloatingPointError("the loss is\nnan")
    assert end.value.code == 1 and capsys.readouterr().err == "\nerror: the loss is nan\n"
