"""What a worker may use, and how processes are started, looked at and ended. Standard library only,
Linux only. How a worker is confined is in `confine`.
"""

import ctypes
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

# What a program may import. The zygote imports it once: workers get it for the price of a fork.
ALLOWED_IMPORTS = (
    "__future__", "abc", "array", "bisect", "cmath", "collections", "contextlib", "copy",
    "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib",
    "heapq", "itertools", "json", "math", "numbers", "numpy", "operator", "random", "re",
    "statistics", "string", "textwrap", "tool_task", "types", "typing", "unicodedata",
)  # fmt: skip

_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
}

CHANNEL = 10  # descriptor of a worker's only connection
CPU_S = 600  # processor seconds of one worker's life: stops a thread that spins between requests
_SWEEP_S = 2.0
_SWEEP_ROUNDS = 1000
_PROC = Path("/proc")
_PF_EXITING = 4
_KIB_IN_USE = re.compile(rb"^Vm(?:RSS|PTE):\s+(\d+) kB$", re.MULTILINE)
_ROOT = str(Path(__file__).resolve().parents[2])
# This package is looked for after the standard library: where it stands others may as well, with
# modules named like that library's.
_BOOT = (
    "import os, sys; path = sys.argv.pop(1); "
    "library = (os.path.dirname(os.__file__), 'lib-dynload'); "
    "at = max((i for i, p in enumerate(sys.path, 1) if p.endswith(library)), default=0); "
    "sys.path.insert(at, path); from {} import main; sys.path.remove(path); main()"
)

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36


@dataclass(frozen=True)
class Limits:
    """Limits on generated programs; the fields of `config.EnvsConfig` that the pool needs."""

    load_s: float = 2.0  # deadline for loading a program
    reset_s: float = 2.0  # deadline for construction and reset, and for solution
    step_s: float = 1.0  # deadline for one step
    episode_s: float = 20.0  # processor time of one episode
    trial_s: float = 60.0  # processor time of all plays of one admission, and of a hint's
    memory_bytes: int = 256 * 2**20  # address space a worker may add to its zygote's
    pool_memory_bytes: int = 2**31  # memory all workers together may add; the largest is ended
    max_workers: int = 16  # worker processes alive at once
    spare_workers: int = 2  # confined workers that each of the two zygotes keeps ready
    instances_per_worker: int = 32  # episodes one worker holds
    unsafe_sandbox: str = ""  # `tier.ACCEPT` runs programs on a host that cannot contain them


@dataclass
class Purse:
    """What many episodes of one program share: processor time, and memory of the trainer for what
    they show."""

    left_s: float = float("inf")
    left_bytes: float = float("inf")

    @property
    def empty(self) -> bool:
        """Whether more was taken out than was in it."""
        return self.left_s < 0 or self.left_bytes < 0


def environment(hash_seed: int = 0) -> dict[str, str]:
    """Environment of every process below the trainer. Nothing of the user's reaches a worker but
    where Python finds its own libraries.

    Hashes are fixed because set order must not change a transcript, and each zygote has its own
    seed for them so that replay in another shows what depends on it; one BLAS thread because a
    zygote must have no other thread when it forks.
    """
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return _ENVIRONMENT | kept | {"PYTHONHASHSEED": str(hash_seed)}


def command(module: str, *arguments: object) -> list[str]:
    """Command line that runs `module.main()` in a fresh interpreter, wherever this package is
    imported from.

    Not `-I`: it would ignore PYTHONHASHSEED.
    """
    return [sys.executable, "-s", "-P", "-c", _BOOT.format(module), _ROOT, *map(str, arguments)]


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends, so that none escapes `sweep`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def few_files(count: int) -> str:
    """Let `count` descriptors be open, and not many more, for this process and those it starts: a
    fork closes all of them one by one. Returns why that cannot be; "" if it can."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and count > hard:
        return (
            f"so many workers may need {count} open files, and {hard} are allowed; raise the hard "
            "limit (ulimit -Hn) or lower envs.max_workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    return ""


def sweep(keep: Container[int] = ()) -> bool:
    """Kill and reap every child that is not in `keep`, and whatever these leave behind in turn.

    Returns whether none is left: a chain of forks can be faster than this, and is given up on.
    """
    give_up = time.monotonic() + _SWEEP_S
    for _ in range(_SWEEP_ROUNDS):
        strays = [pid for pid in _children() if pid not in keep]
        if not strays:
            return True
        for pid in strays:
            os.kill(pid, signal.SIGKILL)
        for pid in strays:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > give_up:
                    return False
                time.sleep(0.001)
        if time.monotonic() > give_up:
            return False
    return False


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used: its clock, as `clock_getcpuclockid` numbers it."""
    try:
        return time.clock_gettime((~pid << 3) | 2)
    except OSError:  # it is gone
        return 0.0


def state(pid: int) -> str:
    """The kernel's letter for a process: R runs, S sleeps, D waits for the disk, Z is dead; "?" if
    it cannot be read."""
    return _stat(pid)[0]


def exiting(pid: int) -> bool:
    """Whether a process is on its way out or dead."""
    return bool(int(_stat(pid)[6]) & _PF_EXITING)


def missing() -> str:
    """What this host does not tell of its processes and the sandbox needs; "" if nothing."""
    parent = os.getpid()
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:  # as hard to look at as a worker
        try:
            die_with_parent(parent)
            _prctl(_PR_SET_DUMPABLE, 0)
            os.write(done, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.close(done)
    try:
        os.read(ready, 1)
        children = _PROC / f"self/task/{parent}/children"
        if not children.exists():
            return f"{children} is missing (a kernel without CONFIG_PROC_CHILDREN, or no /proc)"
        if state(pid) == "?":
            return f"{_PROC}/PID/stat of a worker is unreadable (/proc mounted with hidepid)"
        return ""
    finally:
        os.close(ready)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def address_space() -> int:
    """Bytes of address space this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident(pid: int) -> int:
    """Bytes of memory a process has in use, those it shares with its zygote included, and those of
    the kernel's tables of them: these alone can be larger than what they map."""
    try:
        status = (_PROC / f"{pid}/status").read_bytes()
    except OSError:  # it is gone
        return 0
    return sum(map(int, _KIB_IN_USE.findall(status))) << 10


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def _children() -> list[int]:
    return [int(pid) for pid in (_PROC / f"self/task/{os.getpid()}/children").read_text().split()]


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on."""
    try:
        return (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["?"] + ["0"] * 6
