"""Signals while a run is open, and what is left of them afterwards."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from outcore.train.stopping import StopRequest


def test_the_first_signal_asks_and_is_told() -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(told.append) as stop:
        assert not stop.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.is_set
    assert told == ["SIGTERM"]
    assert stop.signal is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_signal_ends_the_process_at_once() -> None:
    script = (
        "import os, signal, time\n"
        "from outcore.train.stopping import StopRequest\n"
        "with StopRequest():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=50)
    assert done.returncode == 128 + signal.SIGINT


@pytest.mark.usefixtures("no_nohup")
def test_a_terminal_that_goes_away_only_asks() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is signal.SIGHUP
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signal is signal.SIGTERM


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_while_the_display_writes_only_asks() -> None:
    """Python's streams refuse a write from a handler that interrupts one of theirs."""

    class Interrupted(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, text: Any) -> int:
            written.append(bytes(text))
            if stop.signal is None:
                os.kill(os.getpid(), signal.SIGTERM)
            return len(text)

    written: list[bytes] = []
    stream = io.BufferedWriter(Interrupted())

    def tell(name: str) -> None:
        stream.write(name.encode())
        stream.flush()

    with StopRequest(tell) as stop:
        stream.write(b"step 1")
        stream.flush()
        assert stop.signal is signal.SIGTERM
        assert written == [b"step 1"]
        assert stop.is_set
        assert written == [b"step 1", b"SIGTERM"], "told once the line is out"
