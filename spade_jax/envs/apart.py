"""Whether a zygote's children are apart from the host, and under limits as a whole: what tier S is
worth more than A. Standard library only.

The acts are tried by children that are as free as a zygote lets them be: without filter, rules and
limits of their own, and with the zygote's user, so that nothing but the namespaces and the cgroup
can be what refuses them. What they aim at is real: the supervisor lays it out. The child that takes
more memory than the limit is killed by the kernel, which says so in its log.
"""

import contextlib
import ctypes
import dataclasses
import errno
import mmap
import os
import secrets
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spade_jax.envs import confine, probe
from spade_jax.envs.probe import Act
from spade_jax.envs.tier import Attempt, Layer, Sandbox

TRIAL_BYTES = 24 << 20  # limits on a zygote and its children while this is tried
TRIAL_PROCESSES = 8
_MARK = b"spade_jax.envs.supervisor"  # on the command line of one
_REFUSALS = frozenset({*errno.errorcode.values(), "SIGKILL"})
_IPC_RMID, _IPC_STAT = 0, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.shmat.restype = ctypes.c_void_p
_FAILED = ctypes.c_void_p(-1).value


class Bait:
    """What children could reach on the host if they were not apart from it; `told` says where."""

    def __init__(self) -> None:
        self._things = contextlib.ExitStack()
        self.told: dict[str, Any] = {"pid": os.getpid()}
        with contextlib.suppress(OSError):  # what this host does not have is not reached on it
            self.told["port"] = self._listen(socket.AF_INET, ("127.0.0.1", 0))[1]
        with contextlib.suppress(OSError):
            name = f"\0spade_jax-{secrets.token_hex(8)}"
            self.told["socket"] = self._listen(socket.AF_UNIX, name).decode()
        with contextlib.suppress(OSError):
            self.told["segment"] = self._share()
        with contextlib.suppress(OSError):
            number, path = tempfile.mkstemp()
            self._things.callback(os.unlink, path)
            os.fchmod(number, 0o666)
            os.close(number)
            self.told["file"] = path

    def close(self) -> None:
        """Take it all away."""
        self._things.close()

    def _listen(self, family: int, address: Any) -> Any:
        listener = self._things.enter_context(socket.socket(family))
        listener.bind(address)
        listener.listen()
        return listener.getsockname()

    def _share(self) -> int:
        """A segment of shared memory that lasts no longer than this process."""
        segment = _checked(_libc.shmget(0, mmap.PAGESIZE, 0o1666))
        try:
            place = _libc.shmat(segment, None, 0)
            if place == _FAILED:
                raise OSError(ctypes.get_errno(), "shmat")
            self._things.callback(_libc.shmdt, ctypes.c_void_p(place))
        finally:
            _libc.shmctl(segment, _IPC_RMID, None)  # it goes with whom it is attached to
        return segment


def run(
    walls: confine.Walls, sandbox: Sandbox, layers: Sequence[Layer], bait: dict[str, Any]
) -> Sandbox:
    """What contains the workers, with the two layers that this zygote was given or lacks: those
    that stand are tried.
    """
    bare = dataclasses.replace(walls, bounds={}, uids=range(0), rules=None, filter=None)
    acts = {"namespaces": _across(bait), "cgroup": _beyond()}
    started = probe.cpu_s()
    attempts: list[Attempt] = []
    found: list[Layer] = []
    for layer in layers:
        passed = []
        for name, act in acts[layer.name].items() if layer.present else ():
            try:
                answer = probe.ask(bare, lambda act=act: probe.answer(act))
            except OSError as error:  # no such child: nothing was tried, so nothing is proven
                answer = f"not tried: {error}"
            attempts.append(Attempt(name, answer in _REFUSALS, answer))
            if answer not in _REFUSALS:
                passed.append(name)
        if passed:
            detail = f"{layer.detail}; but a child could {', '.join(passed)}"
            layer = dataclasses.replace(layer, present=False, detail=detail)
        found.append(layer)
    best = sandbox.tier == "A" and all(layer.present for layer in found)
    return dataclasses.replace(
        sandbox,
        tier="S" if best else sandbox.tier,
        layers=(*sandbox.layers, *found),
        apart=tuple(attempts),
        probe_s=sandbox.probe_s + probe.cpu_s() - started,
    )


def _across(bait: dict[str, Any]) -> dict[str, Act]:
    """What namespaces refuse."""
    acts: dict[str, Act] = {
        "see a process of the host": _see_host,
        "signal a process of the host": lambda: _signal(bait["pid"]),
    }
    if "port" in bait:
        acts["reach a port of the host"] = lambda: _connect(
            socket.AF_INET, ("127.0.0.1", bait["port"])
        )
    if "socket" in bait:
        acts["reach a UNIX socket of the host"] = lambda: _connect(socket.AF_UNIX, bait["socket"])
    if "segment" in bait:
        about = ctypes.create_string_buffer(256)
        acts["find shared memory of the host"] = lambda: _checked(
            _libc.shmctl(bait["segment"], _IPC_STAT, about)
        )
    if "file" in bait:
        acts["write to a file of the host"] = lambda: open(bait["file"], "a").close()
    return acts


def _beyond() -> dict[str, Act]:
    """What a cgroup refuses."""
    return {
        "use more memory than all may": _take_memory,
        "start more processes than all may": _start_processes,
    }


def _see_host() -> None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended
            if _MARK in path.read_bytes():
                return
    raise OSError(errno.ESRCH, "none in sight")


def _signal(pid: int) -> None:
    if pid in (1, os.getpid()):  # here the number is another's: this is another namespace
        raise OSError(errno.ESRCH, "another process")
    os.kill(pid, 0)


def _connect(family: int, address: Any) -> None:
    with socket.socket(family) as connection:
        connection.settimeout(1.0)
        connection.connect(address)


def _take_memory() -> None:
    with mmap.mmap(-1, 2 * TRIAL_BYTES) as pages:
        for start in range(0, len(pages), mmap.PAGESIZE):
            pages[start] = 1


def _start_processes() -> None:
    started: list[int] = []
    try:
        for _ in range(2 * TRIAL_PROCESSES):
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            started.append(pid)
    finally:
        for pid in started:
            os.waitpid(pid, 0)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
