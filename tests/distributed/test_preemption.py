"""A signal becomes a request to stop, once, and nothing stays behind."""

import os
import signal

import pytest

from tcal_components.distributed.preemption import stop_on_signals


def test_first_signal_asks_second_acts():
    acted = []
    before = signal.signal(signal.SIGUSR1, lambda *_: acted.append(1))
    try:
        with stop_on_signals(signal.SIGUSR1) as request:
            assert not request()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert request() and request.signal is signal.SIGUSR1 and acted == []
            os.kill(os.getpid(), signal.SIGUSR1)
            assert acted == [1]
        with pytest.raises(KeyError), stop_on_signals():
            raise KeyError
        os.kill(os.getpid(), signal.SIGUSR1)
        assert acted == [1, 1]
        assert signal.getsignal(signal.SIGTERM) is not None
    finally:
        signal.signal(signal.SIGUSR1, before)
