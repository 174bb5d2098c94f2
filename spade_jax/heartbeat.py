"""Whether the other processes of a run are there, and how this one ends when one of them is not.

A thread (`Heartbeat`) gives signs of life through the key-value service of `jax.distributed`, which
process 0 keeps, and sees those of the others. An error in one process ends all of them with its
reason. Of a process that just disappears nothing is heard any more, and after `LOST_S` the others
end. When process 0 disappears the service does too: what is asked of it does not return, and jax
aborts the process. So a second thread, which asks the service nothing, watches for that, and an
abort waits until it has said why. Starting lost processes again is not done here: a run is resumed
as a whole.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import jax

from spade_jax.errors import LostProcess
from spade_jax.terminal import visible

BEAT_S = 1.0  # between two signs of life of a process
SILENT_S = 5.0  # without one, it may be lost
LOST_S = 60.0  # without one, a process is lost; jax itself would wait longer, and abort
GRACE_S = 20.0  # for a process to end in order when another has failed
LINGER_S = 2.0  # that process 0 stays behind the others, which still use its service
ABORTING_S = 2.0  # for the same when process 0 is gone: `_delay_abort` gives 6 s in all
ROOM = "spade_jax"  # before the names of all that is kept in the service


def client() -> Any:
    """jax's client of the key-value service."""
    from jax._src import distributed  # no public module offers it

    return distributed.global_state.client


def forget_service() -> None:
    """Keep jax from waiting, at the exit, for processes that will not come."""
    from jax._src import distributed

    state = distributed.global_state
    for part in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))  # its destructor would wait as well
    state.client = state.service = None


def _address() -> tuple[str, int]:
    """Where the service is."""
    from jax._src import distributed

    host, _, port = str(distributed.global_state.coordinator_address).rpartition(":")
    return host.strip("[]"), int(port)


def first_line(error: BaseException) -> str:
    """What a long error is about."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _delay_abort() -> None:
    """Let an abort of this process wait for 6 s, and go on then.

    jax aborts from a thread of its own, as soon as the connection to process 0 breaks. The handler
    is the C function `sleep`, which takes the number of the signal, 6, for seconds: it needs no
    lock and no Python, whatever state the process is in, and the other threads go on.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal.restype = ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


class Heartbeat:
    """The threads of one process: they end it when another fails, first by an interrupt, then,
    where that is not heard, at once.
    """

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self.reason = ""
        self.stop = False  # whether some process was asked to
        self.leaving = False  # whether this process ends already, and needs no interrupt
        self._client, self._address = client(), _address()
        self._served = time.monotonic()  # when the service answered last
        self._unserved = False  # whether it is gone
        self._ended, self._left = threading.Event(), threading.Event()
        self._found, self._exiting = threading.Event(), threading.Lock()
        self._heard = dict.fromkeys(range(count), time.monotonic())  # when each was heard of last
        self._beating = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._guarding = threading.Thread(target=self._guard, name="process 0", daemon=True)

    def start(self) -> None:
        self._beating.start()
        if self.index:
            _delay_abort()
            self._guarding.start()

    def end(self) -> None:
        """All is well: watch no more."""
        self._ended.set()
        self._beating.join()
        self._left.set()

    def wait_for_reason(self) -> None:
        """Give the failure of another process time to be seen, unless all others are alive."""
        asked = time.monotonic()
        while not self._found.wait(BEAT_S):
            if time.monotonic() - asked > SILENT_S and not self._silent(SILENT_S):
                return

    def _silent(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [process for process, at in self._heard.items() if now - at > seconds]

    def leave(self, reason: str | None) -> None:
        """Say why, unless another process has said it, and that this one is gone; process 0, which
        keeps the service, waits until all that live have said so. Without it this process ends
        here: jax aborts it before an orderly end of Python, which may take seconds.
        """
        self._ended.set()
        if not self._unserved:
            self._beating.join()
            deadline = time.monotonic() + GRACE_S + 5 * BEAT_S
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the service may be gone
                if reason:
                    self._client.key_value_set(f"{ROOM}/failed/{self.index}", reason)
                self._client.key_value_set(f"{ROOM}/left/{self.index}", "")
                awaited = set(range(self.count)) - set(self._silent(SILENT_S))
                while self.index == 0 and awaited and time.monotonic() < deadline:
                    time.sleep(BEAT_S / 4)
                    awaited -= self._told("left").keys()
            if self.index == 0:
                time.sleep(LINGER_S)
        if self._unserved:
            self._exit()
        self._left.set()

    def _told(self, kind: str) -> dict[int, str]:
        """What the processes have said of one kind, by their index."""
        found = self._client.key_value_dir_get(f"{ROOM}/{kind}/")
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _beat(self) -> None:
        beats: dict[int, str] = {}
        number = 0
        while not self._ended.wait(BEAT_S):
            number += 1
            try:
                self._client.key_value_set(
                    f"{ROOM}/beat/{self.index}", str(number), allow_overwrite=True
                )
                if self.stop:
                    self._client.key_value_set(f"{ROOM}/stop/0", "", allow_overwrite=True)
                heard, failed = self._told("beat"), self._told("failed")
                if self._told("stop"):
                    self.stop = True
            except jax.errors.JaxRuntimeError:  # whether the service is gone is for `_guard`
                continue
            now = self._served = time.monotonic()
            self._heard |= {p: now for p, beat in heard.items() if beat != beats.get(p)}
            beats = heard
            if failed:
                process = min(failed)
                self._fail(f"process {process} of {self.count} failed: {failed[process]}")
                return
            if silent := self._silent(LOST_S):
                self._fail(self._lost(silent[0], f"nothing was heard of it for {LOST_S:.0f} s"))
                return

    def _guard(self) -> None:
        """See that the service is there, until this process has left."""
        while not self._left.wait(BEAT_S / 2):
            late = time.monotonic() - self._served
            if late > LOST_S:
                how = f"nothing was heard of it for {LOST_S:.0f} s"
            elif late > 1.5 * BEAT_S and self._is_refused():
                how = "it no longer listens"
            else:
                continue
            self.reason = self.reason or self._lost(0, how)
            self._unserved = True
            self._end_for(self.reason)
            if not self._left.wait(ABORTING_S):
                self._exit()
            return

    def _is_refused(self) -> bool:
        """Whether the machine of process 0 says that nobody listens there. One that says nothing
        may be out of reach for a moment only.
        """
        try:
            socket.create_connection(self._address, timeout=BEAT_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def _lost(self, process: int, how: str) -> str:
        return (
            f"process {process} of {self.count} is lost: {how}; see its log and its machine, then "
            "go on with --resume"
        )

    def _fail(self, reason: str) -> None:
        """End this process for a reason that lies in another."""
        if self._ended.is_set():
            return
        self._end_for(reason)
        # Its main thread may be waiting, in the device or the network, for the one that is lost.
        if not self._ended.wait(GRACE_S + (LINGER_S if self.index == 0 else 0)):
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(f"{ROOM}/left/{self.index}", "")
            self._exit()

    def _end_for(self, reason: str) -> None:
        """Interrupt the main thread, once, unless it is leaving by itself."""
        known = self._found.is_set()
        self.reason = reason
        self._found.set()
        if not known and not self.leaving:
            os.kill(os.getpid(), signal.SIGINT)

    def _exit(self) -> None:
        """End this process at once, with the reason as its last line; one thread does."""
        with self._exiting:
            print(f"spade-jax: {visible(self.reason)}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(LostProcess.exit_code)
