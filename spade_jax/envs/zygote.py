"""A warm interpreter that forks workers on request. Standard library, and numpy if it is there.

It may have imported a package of public environments; nothing else is special about it then.
It has one thread and no secret, and parses nothing that a program wrote. Before it is ready it
builds the walls of its workers and has them probed. A worker stays unreaped until the supervisor
asks, so the supervisor can signal it by number without ever hitting a stranger.

What programs ordinarily import is loaded here, submodules that would be imported at first use
included: a worker that may not open files, or not those of the interpreter, then has it all the
same.
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
import warnings

from spade_jax.envs import confine, limits, probe, wire, worker

_ALSO_LOADED = (
    "_strptime", "argparse", "ast", "base64", "binascii", "builtins", "calendar", "codecs",
    "collections.abc", "colorsys", "configparser", "contextvars", "copyreg", "csv", "errno",
    "filecmp", "fnmatch", "gc", "getpass", "gettext", "glob", "graphlib", "gzip", "html", "inspect",
    "io", "ipaddress", "keyword", "linecache", "locale", "logging", "marshal", "mmap",
    "multiprocessing", "multiprocessing.popen_fork", "multiprocessing.process",
    "multiprocessing.util", "optparse", "os", "pathlib", "pickle", "pkgutil", "platform", "pprint",
    "pwd", "queue", "reprlib", "resource", "sched", "secrets", "select", "selectors", "shlex",
    "shutil", "signal", "socket", "stat", "struct", "subprocess", "sys", "sysconfig", "tempfile",
    "threading", "time", "timeit", "token", "tokenize", "tomllib", "traceback", "urllib.parse",
    "uuid", "warnings", "weakref", "zipfile", "zlib", "zoneinfo",
    *(f"encodings.{name}" for name in (
        "ascii", "base64_codec", "charmap", "cp1252", "cp437", "hex_codec", "idna", "iso8859_1",
        "iso8859_15", "latin_1", "punycode", "raw_unicode_escape", "rot_13", "unicode_escape",
        "utf_16", "utf_16_be", "utf_16_le", "utf_32", "utf_32_be", "utf_32_le", "utf_7",
        "utf_8_sig", "zlib_codec",
    )),
    *(f"numpy.{name}" for name in (
        "char", "ctypeslib", "fft", "lib.stride_tricks", "linalg", "ma", "polynomial", "random",
        "rec", "strings", "typing",
    )),
)  # fmt: skip


def main() -> None:
    """Serve `["fork", number]` (with a channel and a page of memory) and `["reap", pid]` until the
    supervisor ends.
    """
    descriptor, parent, memory_bytes = map(int, sys.argv[1:4])
    weaken, package, package_path = sys.argv[4], sys.argv[5], json.loads(sys.argv[6])
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    os.nice(5)  # workers make room for the trainer
    control = socket.socket(fileno=descriptor)
    sys.path[:0] = package_path  # first: a package there may want another numpy than ours
    with warnings.catch_warnings(action="ignore"):  # what is on its way out still serves
        for name in (*limits.ALLOWED_IMPORTS, *_ALSO_LOADED):
            with contextlib.suppress(ImportError):  # numpy is optional
                importlib.import_module(name)
    problem = _load(package) if package else ""
    try:
        walls, sandbox = probe.run(confine.prepare(memory_bytes, weaken, package_path))
    except OSError as error:
        _tell(control, "unfit", str(error))
        return
    gc.collect()
    gc.freeze()
    _tell(control, "ready", sandbox.dumps())
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 2)
        if not message:
            return
        operation, argument = json.loads(message)
        if operation == "fork" and problem:
            _tell(control, "failed", argument, problem)
            for descriptor in descriptors:
                os.close(descriptor)
        elif operation == "fork":
            _fork(control, argument, descriptors, walls, workers)
        else:
            _tell(control, "reaped", argument, _reap(argument, workers))


def _load(package: str) -> str:
    """Import a package; returns why that cannot be done, which is then said to all who ask."""
    from spade_jax.envs.adapters import base  # not where plain programs run

    try:
        base.load(package)
    except BaseException as error:  # anything can go wrong in it
        return f"{package} cannot be imported: {type(error).__name__}: {error}"[:300]
    return ""


def _tell(control: socket.socket, *message: object) -> None:
    control.send(json.dumps(message).encode())


def _fork(
    control: socket.socket,
    number: int,
    descriptors: list[int],
    walls: confine.Walls,
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
                _live(channel, progress, zygote, walls)
            finally:
                os._exit(1)
        workers.add(pid)
        _tell(control, "forked", number, pid)
    for descriptor in descriptors:
        os.close(descriptor)


def _live(channel: int, progress: mmap.mmap, zygote: int, walls: confine.Walls) -> None:
    """The life of a worker. Its first frame says that it is confined; no program comes before."""
    try:
        confine.confine(channel, zygote, walls)
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
