"""What a process does when process 0, and the service it keeps, are gone; whole processes are in
tests/e2e/test_processes.py.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spade_jax import heartbeat
from spade_jax.heartbeat import Heartbeat

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20


class Service:
    """The key-value service of process 0, which answers until it is `gone`."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.gone, self.released = threading.Event(), threading.Event()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if self.gone.is_set():
            self.released.wait()
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        if key.endswith("/beat/"):  # process 0 lives
            self.values[f"{key}0"] = str(time.monotonic())
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    made = Service()
    for name, value in {"BEAT_S": 0.05, "LOST_S": 3.0, "ABORTING_S": DEADLINE_S}.items():
        monkeypatch.setattr(heartbeat, name, value)
    monkeypatch.setattr(heartbeat, "client", lambda: made)
    monkeypatch.setattr(heartbeat, "_delay_abort", lambda: None)  # of this process
    yield made
    made.released.set()


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """What process 0 listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr(heartbeat, "_address", listening.getsockname)
        yield listening


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is not ended at once, but by what a test can see."""
    monkeypatch.setattr(heartbeat.os, "_exit", sys.exit)


def interrupted_after(watch: Heartbeat) -> float:
    """Seconds until the main thread is interrupted; then it leaves, which ends the process."""
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(DEADLINE_S)
    waited = time.monotonic() - began
    watch.leaving = True
    with pytest.raises(SystemExit, match="3"):  # asks nothing of the service
        watch.leave(None)
    watch._left.set()  # its thread goes with this process, which stays
    return waited


def test_a_process_whose_service_is_gone_says_so_and_ends(service, port, exits, capfd):
    watch = Heartbeat(1, 2)
    watch.start()
    time.sleep(0.5)
    assert not watch.reason
    service.gone.set()
    port.close()
    assert interrupted_after(watch) < 2.0
    assert watch.reason.startswith("process 0 of 2 is lost: it no longer listens; see its log")
    assert capfd.readouterr().err == f"spade-jax: {watch.reason}\n"


def test_a_service_out_of_reach_is_waited_for_and_then_lost(service, port, exits):
    watch = Heartbeat(1, 2)
    watch.start()
    service.gone.set()
    assert interrupted_after(watch) > 2.5
    assert "process 0 of 2 is lost: nothing was heard of it for 3 s" in watch.reason


def test_a_process_that_is_leaving_is_not_interrupted(service, port):
    watch = Heartbeat(1, 2)
    watch.leaving = True
    watch.start()
    service.values["spade_jax/failed/0"] = "the disk is full"
    watch.wait_for_reason()
    time.sleep(0.2)
    watch.leave(None)
    assert watch.reason == "process 0 of 2 failed: the disk is full"


def test_a_service_that_comes_back_in_time_changes_nothing(service, port):
    watch = Heartbeat(1, 2)
    watch.start()
    service.gone.set()
    time.sleep(0.5)
    service.released.set()
    time.sleep(0.5)
    watch.end()
    assert not watch.reason


def test_an_abort_leaves_the_other_threads_time_to_say_why():
    """jax's is in a thread of C++; so is this one, which does not hold Python."""
    code = (
        "import ctypes, os, threading, time; from spade_jax import heartbeat; "
        "heartbeat._delay_abort(); "
        "threading.Thread(target=ctypes.CDLL(None).abort, daemon=True).start(); "
        "time.sleep(1); print('said'); os._exit(3)"
    )
    kept = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-uc", code], env=kept, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "said\n"), done.stderr
