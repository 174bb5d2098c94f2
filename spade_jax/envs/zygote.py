"""A warm interpreter that forks workers on request. Standard library, and numpy if it is there.

It may have imported a package of public environments; nothing else is special about it then.
It has one thread and no secret, and parses nothing that a program wrote. A worker stays unreaped
until the supervisor asks, so the supervisor can signal it by number without ever hitting a
stranger.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys

from spade_jax.envs import limits, wire, worker
from spade_jax.envs.adapters import base


def main() -> None:
    """Serve `["fork", number]` (with a channel) and `["reap", pid]` until the supervisor ends."""
    descriptor, parent, memory_bytes = map(int, sys.argv[1:4])
    package, package_path = sys.argv[4], json.loads(sys.argv[5])
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    os.nice(5)  # workers make room for the trainer
    control = socket.socket(fileno=descriptor)
    sys.path[:0] = package_path  # first: a package there may want another numpy than ours
    for name in limits.ALLOWED_IMPORTS:
        with contextlib.suppress(ImportError):  # numpy is optional
            importlib.import_module(name)
    problem = _prepare(package) if package else ""
    gc.collect()
    gc.freeze()
    max_address_space = limits.address_space() + memory_bytes
    _tell(control, "ready")
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not message:
            return
        operation, argument = json.loads(message)
        if operation == "fork" and problem:
            _tell(control, "failed", argument, problem)
            os.close(descriptors[0])
        elif operation == "fork":
            _fork(control, argument, descriptors[0], max_address_space, workers)
        else:
            _tell(control, "reaped", argument, _reap(argument, workers))


def _prepare(package: str) -> str:
    """Import a package; returns why that cannot be done, which is then said to all who ask."""
    try:
        base.load(package)
    except BaseException as error:  # anything can go wrong in it
        return f"{package} cannot be imported: {type(error).__name__}: {error}"[:300]
    return ""


def _tell(control: socket.socket, *message: object) -> None:
    control.send(json.dumps(message).encode())


def _fork(
    control: socket.socket, number: int, channel: int, max_address_space: int, workers: set[int]
) -> None:
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _tell(control, "failed", number, str(error))
        os.close(channel)
        return
    if pid == 0:
        control.detach()  # `confine` closes it, and its number may be used again
        try:
            _live(channel, zygote, max_address_space)
        finally:
            os._exit(1)
    os.close(channel)
    workers.add(pid)
    _tell(control, "forked", number, pid)


def _live(channel: int, zygote: int, max_address_space: int) -> None:
    """The life of a worker. Its first frame says that it is confined; no program comes before."""
    try:
        limits.confine(channel, zygote, max_address_space)
    except OSError as error:
        os.write(limits.CHANNEL, wire.encode([worker.HELLO, "infrastructure", f"confine: {error}"]))
        return
    os.write(limits.CHANNEL, wire.encode([worker.HELLO, "ok", None]))
    worker.serve(limits.CHANNEL)


def _reap(pid: int, workers: set[int]) -> int:
    """End a worker with everything it started; returns its exit code, negative for a signal."""
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it has not yet made its session
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    workers.discard(pid)
    if not limits.sweep(keep=workers):
        sys.exit("a program forks faster than it can be ended; its zygote gives up")
    return os.waitstatus_to_exitcode(status)
