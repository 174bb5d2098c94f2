"""Tries, in children confined exactly as workers are, everything a worker must be refused. Standard
library only.

Each act would do no harm if it were allowed, and is one that could succeed: what is to be read is
there, what is to be changed belongs to everybody. What the filter answers by killing has a child of
its own. A wall that cannot be put up at all is taken out and the rest tried again, so that the
tier is told of what is left.
"""

import _thread
import contextlib
import ctypes
import errno
import fcntl
import json
import mmap
import os
import pwd
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from spade_jax.envs import confine, limits, seccomp
from spade_jax.envs.tier import Attempt, Layer, Sandbox

Act = Callable[[], object]
DONE = "done"
_REFUSALS = frozenset(
    {"EPERM", "EACCES", "EAGAIN", "ENOSYS", "ENOMEM", "EAFNOSUPPORT", "SIGSYS", "EOPNOTSUPP"}
)
_PATIENCE_S = 10.0
_SHOWN = 20  # names of modules in a message
_SAME_CURE = "see the documentation of the container runtime or the kernel"
_CURES = {
    ("landlock", errno.ENOSYS): "Landlock needs Linux 5.13 with CONFIG_SECURITY_LANDLOCK",
    ("landlock", errno.EOPNOTSUPP): "add landlock to lsm= on the kernel's command line",
    ("landlock", errno.EPERM): "use a container runtime whose profile allows the landlock calls",
    ("seccomp", errno.EINVAL): "seccomp needs a kernel with CONFIG_SECCOMP_FILTER",
    ("seccomp", errno.ENOSYS): "run on x86-64 or aarch64 Linux with a 64-bit Python",
}


def run(walls: confine.Walls) -> tuple[confine.Walls, Sandbox]:
    """The walls that can be put up here, and what they keep out.

    Raises:
        OSError: not even a child can be started and confined.
    """
    started = cpu_s()
    with _bait() as bait:
        while True:
            acts = _acts(walls, bait)
            try:
                found = ask(walls, lambda acts=acts: _report(acts))
                break
            except confine.LayerError as error:
                walls = walls.without(error)
        if not isinstance(found, dict):
            raise OSError(errno.EIO, f"the probe of the sandbox ended early: {found}")
        answers: dict[str, str] = found["answers"]
        for name, act in _alone().items():
            answers[name] = ask(walls, lambda act=act: answer(act))
    attempts = tuple(Attempt(name, answer in _REFUSALS, answer) for name, answer in answers.items())
    tier = "C"
    if all(attempt.refused for attempt in attempts):
        tier = "B" if walls.rules is None else "A"
    layers = tuple(_layers(walls, found))
    return walls, Sandbox(tier, layers, attempts, os.uname().release, cpu_s() - started)


def _acts(walls: confine.Walls, bait: str) -> dict[str, Act]:
    """What is answered with an errno."""
    parent = os.getpid()
    home = _home()
    acts: dict[str, Act] = {
        "read /etc/passwd": lambda: open("/etc/passwd").close(),
        "list a home folder": lambda: os.listdir(home),
        "list /": lambda: os.listdir("/"),
        "read /proc": lambda: open("/proc/self/maps").close(),
        "read the memory of its parent": lambda: open(f"/proc/{parent}/mem", "rb").close(),
        "open a TCP socket": lambda: socket.socket(socket.AF_INET).close(),
        "open a UDP socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
        "open a UNIX socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "open a netlink socket": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close(),
        "make a pair of sockets": socket.socketpair,
        "make a pipe": os.pipe,
        "fork": _fork,
        "start a thread": lambda: _thread.start_new_thread(time.sleep, (0,)),
        "signal its parent": lambda: os.kill(parent, 0),
        "have the kernel signal its parent": lambda: fcntl.fcntl(
            limits.CHANNEL, fcntl.F_SETOWN, parent
        ),
        "make a file in memory": lambda: os.memfd_create("probe"),
        "make shared memory": _shared_memory,
        "raise a resource limit": lambda: resource.setrlimit(
            resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        ),
        "use more memory than its limit": lambda: mmap.mmap(-1, walls.bounds[resource.RLIMIT_AS]),
        "choose its processors": lambda: os.sched_setaffinity(0, os.sched_getaffinity(0)),
        "allow dumps of its memory": lambda: _called(_libc.prctl(4, 1, 0, 0, 0)),
    }
    if bait:
        new = bait + ".new"
        acts |= {
            "read a file": lambda: open(bait).close(),
            "write to a file": lambda: open(bait, "a").close(),
            "make a file": lambda: open(new, "w").close(),
            "cut a file": lambda: os.truncate(bait, 0),
            "change the mode of a file": lambda: os.chmod(bait, 0o666),
            "change the times of a file": lambda: os.utime(bait),
            "link a file": lambda: os.link(bait, new),
            "rename a file": lambda: os.rename(bait, new),
            "make a folder": lambda: os.mkdir(new),
            "remove a file": lambda: os.unlink(bait),
        }
    return acts


def _alone() -> dict[str, Act]:
    """What kills the child, if only by success."""
    program = "/bin/true" if os.path.exists("/bin/true") else sys.executable
    acts: dict[str, Act] = {"start another program": lambda: os.execv(program, [program])}
    machine = os.uname().machine
    if machine not in seccomp.MACHINES:
        return acts
    number, parent = seccomp.numbers(machine), os.getpid()
    calls = {
        "be traced": ("ptrace", 0, 0, 0, 0),
        "read the parent through the kernel": ("process_vm_readv", parent, 0, 0, 0, 0, 0),
        "set up io_uring": ("io_uring_setup", 0, 0),
        "use bpf": ("bpf", 0, 0, 0),
        "handle page faults": ("userfaultfd", 0),
        "use the kernel's keys": ("keyctl", 0, -3, 0),
        "leave its namespaces": ("unshare", 0),
        "enter other namespaces": ("setns", -1, 0),
        "mount": ("mount", 0, 0, 0, 0, 0),
    }
    for name, (call, *arguments) in calls.items():
        full = [ctypes.c_long(argument) for argument in (number[call], *arguments)]
        acts[name] = lambda full=full: _called(_libc.syscall(*full))
    return acts


def _report(acts: dict[str, Act]) -> dict[str, Any]:
    """What a child has to say of itself."""
    return {
        "answers": {name: answer(act) for name, act in acts.items()},
        "uid": os.getuid(),
        "imports": answer(lambda: open(os.__file__).close()),
    }


def answer(act: Act) -> str:
    """Try an act; returns the errno of its refusal by name, or `DONE`."""
    try:
        act()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    except ValueError:  # how `resource` says EPERM
        return "EPERM"
    except RuntimeError:  # how threads say EAGAIN
        return "EAGAIN"
    except MemoryError:
        return "ENOMEM"
    return DONE


def ask(walls: confine.Walls, work: Callable[[], Any]) -> Any:
    """The result of `work` in a confined child, or how the child ended."""
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            _child(theirs.detach(), parent, walls, work)
        finally:
            os._exit(1)
    with ours:
        theirs.close()
        said, ended = b"", False
        give_up = time.monotonic() + _PATIENCE_S
        while select.select([ours], [], [], max(0.0, give_up - time.monotonic()))[0]:
            if ended := not (data := ours.recv(1 << 16)):
                break
            said += data
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)  # does nothing to one that has ended
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not said and not ended:
        return "no answer"
    if not said:
        return {0: DONE, -signal.SIGSYS: "SIGSYS", -signal.SIGKILL: "SIGKILL"}.get(
            code, f"exit {code}"
        )
    kind, value = json.loads(said)
    if kind == "layer":
        raise confine.LayerError(value[0], OSError(value[1], os.strerror(value[1])))
    if kind == "error":
        raise OSError(*value)
    return value


def _child(channel: int, parent: int, walls: confine.Walls, work: Callable[[], Any]) -> None:
    try:
        refused = confine.confine(channel, parent, walls)
    except confine.LayerError as error:
        said = ["layer", [error.layer, error.errno]]
    except OSError as error:
        said = ["error", [error.errno, f"a worker cannot be confined: {error}"]]
    else:
        result = work()
        if isinstance(result, dict):
            result["refused"] = {name: error.errno for name, error in refused.items()}
        said = ["ok", result]
    os.write(limits.CHANNEL, json.dumps(said).encode())


@contextlib.contextmanager
def _bait() -> Iterator[str]:
    """A file that everybody may change, in such a folder; "" where none can be made."""
    try:
        folder = confine.new_folder()
    except OSError:
        yield ""
        return
    try:
        os.chmod(folder, 0o777)
        path = os.path.join(folder, "bait")
        with open(path, "w") as file:
            file.write("bait")
        os.chmod(path, 0o666)
        yield path
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _layers(walls: confine.Walls, found: dict[str, Any]) -> Iterator[Layer]:
    refused: dict[str, int] = found["refused"]
    if found["uid"] == 0:
        why = os.strerror(refused["uid"]) if "uid" in refused else "no other is mapped"
        yield Layer("uid", False, f"root cannot change its user id ({why})", "allow CAP_SETUID")
    elif not walls.uids:
        yield Layer("uid", False, f"not root: workers have user id {found['uid']} like the trainer")
    else:
        yield Layer("uid", True, "its own")
    lost = [name for name in refused if name.startswith("rlimit")]
    missing = ", ".join(f"{name} {os.strerror(refused[name])}" for name in lost)
    yield Layer("rlimits", not lost, missing or "set", "raise no limit of the pool" * bool(lost))
    for name, extent in (
        ("landlock", f"ABI {walls.landlock_abi}"),
        ("seccomp", os.uname().machine),
    ):
        error = walls.absent.get(name)
        if error is None:
            yield Layer(name, True, extent)
        else:
            cure = _CURES.get((name, error.errno or 0), _SAME_CURE)
            yield Layer(name, False, str(error.strerror), cure)
    if found["imports"] == DONE:
        yield Layer("imports", True, "all")
    elif walls.rules is None and walls.filter is not None:
        yield Layer("imports", False, _loaded("no file can be opened"), "get Landlock to work")
    else:
        why = f"workers cannot read {os.path.dirname(os.__file__)} ({found['imports']})"
        cure = (
            "install Python where every user can read it, such as /opt, or open the folders above"
        )
        yield Layer("imports", False, _loaded(why), cure)


def _loaded(why: str) -> str:
    unavailable = sorted(
        name
        for name in sys.stdlib_module_names - sys.modules.keys() - set(sys.builtin_module_names)
        if not name.startswith("_")
    )
    shown, more = unavailable[:_SHOWN], len(unavailable) - _SHOWN
    return (
        f"{why}: a program gets only what is loaded before it starts, so not {', '.join(shown)}"
        + (f" and {more} more" if more > 0 else "")
    )


def _home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a container's user that has no entry
        return "/root"


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _shared_memory() -> None:
    number = _called(_libc.shmget(0, 4096, 0o1600))
    _libc.shmctl(number, 0, None)


def _called(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def cpu_s() -> float:
    """Processor seconds of this process and of those that it has started and reaped."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
