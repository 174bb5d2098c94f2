"""A warm interpreter that forks workers on request. Standard library, and numpy if it is there.

It has one thread and no secret, and parses nothing that a program wrote. A worker stays unreaped
until the supervisor asks, so the supervisor can signal it by number without ever hitting a
stranger.
"""

import contextlib
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import sys

from spade_jax.envs import limits, wire, worker


def main() -> None:
    """Serve `["fork", number]` (with a channel and a page of memory) and `["reap", pid]` until the
    supervisor ends.
    """
    descriptor, parent, memory_bytes = map(int, sys.argv[1:])
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    os.nice(5)  # workers make room for the trainer
    control = socket.socket(fileno=descriptor)
    for name in limits.ALLOWED_IMPORTS:
        with contextlib.suppress(ImportError):  # numpy is optional
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    max_address_space = limits.address_space() + memory_bytes
    _tell(control, "ready")
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            return
        operation, argument = json.loads(message)
        if operation == "fork":
            _fork(control, argument, descriptors, max_address_space, workers)
        else:
            _tell(control, "reaped", argument, _reap(argument, workers))


def _tell(control: socket.socket, *message: object) -> None:
    control.send(json.dumps(message).encode())


def _fork(
    control: socket.socket,
    number: int,
    descriptors: list[int],
    max_address_space: int,
    workers: set[int],
) -> None:
    """Fork worker `number`, whose channel and page of progress are given; close both here."""
    zygote = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        _tell(control, "failed", number, str(error))
    else:
        if pid == 0:
            control.detach()  # `confine` closes it, and its number may be used again
            try:
                channel, page = descriptors
                progress = mmap.mmap(page, mmap.PAGESIZE)
                _live(channel, progress, zygote, max_address_space)
            finally:
                os._exit(1)
        workers.add(pid)
        _tell(control, "forked", number, pid)
    for descriptor in descriptors:
        os.close(descriptor)


def _live(channel: int, progress: mmap.mmap, zygote: int, max_address_space: int) -> None:
    """The life of a worker. Its first frame says that it is confined; no program comes before."""
    try:
        limits.confine(channel, zygote, max_address_space)
    except OSError as error:
        os.write(limits.CHANNEL, wire.encode([worker.HELLO, "infrastructure", f"confine: {error}"]))
        return
    os.write(limits.CHANNEL, wire.encode([worker.HELLO, "ok", None]))
    worker.serve(limits.CHANNEL, progress)


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
