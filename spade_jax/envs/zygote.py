"""A warm interpreter that forks workers on request. Standard library, and numpy if it is there.

It may have imported a package of public environments; nothing else is special about it then.
It has one thread and no secret, and parses nothing that a program wrote. Before it is ready it
builds the walls of its workers and has them probed. A worker stays unreaped until the supervisor
asks, and is known to it by a descriptor, as its number differs outside of a namespace.

What programs ordinarily import is loaded here, submodules that would be imported at first use
included: a worker that may not open files, or not those of the interpreter, then has it all the
same.
"""

import contextlib
import errno
import gc
import importlib
import json
import mmap
import os
import signal
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence

from spade_jax.envs import apart, confine, limits, probe, tier, wire, worker

_CHUNK = 1 << 16
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
    """Say "loaded", try what there is to try when the supervisor says `["try", what]`, say "ready",
    and serve `["fork", birth]` (with a channel and a page of memory) and `["reap", birth]` until
    the supervisor ends.
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
    _tell(control, "loaded")
    workers: dict[int, int] = {}  # number of the process, by birth
    waiting: list[tuple[int, list[int]]] = []  # asked for before it is ready
    ready = False
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _CHUNK, 2)
        if not message:
            return
        operation, argument = json.loads(message)
        if operation == "try":
            layers, bait, least = argument
            sandbox = apart.run(walls, sandbox, [tier.Layer(**layer) for layer in layers], bait)
            _tell(control, "ready", sandbox.dumps())
            ready, problem = True, problem or sandbox.shortfall(least)
            for birth, given in waiting:
                _fork(control, birth, given, walls, workers, problem)
        elif operation == "fork" and not ready:
            waiting.append((argument, descriptors))
        elif operation == "fork":
            _fork(control, argument, descriptors, walls, workers, problem)
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


def _tell(control: socket.socket, *message: object, descriptors: Sequence[int] = ()) -> None:
    socket.send_fds(control, [json.dumps(message).encode()], descriptors)


def _fork(
    control: socket.socket,
    birth: int,
    descriptors: list[int],
    walls: confine.Walls,
    workers: dict[int, int],
    problem: str,
) -> None:
    """Fork the worker whose channel and page of progress are given, unless there is a problem;
    close both here."""
    zygote = os.getpid()
    try:
        if problem:
            raise OSError(problem)
        pid = os.fork()
    except OSError as error:
        _tell(control, "failed", birth, str(error))
    else:
        if pid == 0:
            control.detach()  # `confine` closes it, and its number may be used again
            try:
                channel, page = descriptors
                progress = mmap.mmap(page, mmap.PAGESIZE)
                _live(channel, progress, zygote, walls)
            finally:
                os._exit(1)
        workers[birth] = pid
        with _opened(pid) as process:
            _tell(control, "forked", birth, pid, descriptors=process)
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def _opened(pid: int) -> Iterator[list[int]]:
    """A descriptor of a child, if the kernel has them; it has where it has what namespaces take."""
    try:
        process = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):  # an old kernel, a container's profile
            raise
        yield []
        return
    try:
        yield [process]
    finally:
        os.close(process)


def _live(channel: int, progress: mmap.mmap, zygote: int, walls: confine.Walls) -> None:
    """The life of a worker. Its first frame says that it is confined; no program comes before."""
    try:
        confine.confine(channel, zygote, walls)
    except OSError as error:
        os.write(limits.CHANNEL, wire.encode([worker.HELLO, "infrastructure", f"confine: {error}"]))
        return
    os.write(limits.CHANNEL, wire.encode([worker.HELLO, "ok", None]))
    worker.serve(limits.CHANNEL, progress)


def _reap(birth: int, workers: dict[int, int]) -> int:
    """End a worker with everything it started; returns its exit code, negative for a signal."""
    pid = workers[birth]
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):  # it has not yet made its session
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    del workers[birth]
    if not limits.sweep(keep=workers.values()):
        sys.exit("a program forks faster than it can be ended; its zygote gives up")
    return os.waitstatus_to_exitcode(status)
