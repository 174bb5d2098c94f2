"""Starts a process in namespaces of its own: pid, net, ipc and mount, and user where it has no
privilege otherwise. Standard library only, Linux only.

It is the first process of its pid namespace, so that its end is the end of all below it, and sees
no process but these. It has no network, not even with itself; all mounts are read-only, but for an
empty small one over /dev/shm; if it is root, it keeps only what giving its workers users of their
own takes. The host's files can still be looked at: that they cannot be opened is up to Landlock.

`subprocess` cannot make a child in a pid namespace, so the child is cloned here. Until it runs its
program it is a copy of this process, which must have one thread.
"""

import contextlib
import ctypes
import errno
import os
import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spade_jax.envs import seccomp, tier

OWN = "/dev/shm"  # the only place where files can be made, and they are seen by nobody else
# Where packages look for a place of theirs when they are imported.
_WRITABLE = {"TMPDIR": OWN, "XDG_CACHE_HOME": OWN, "XDG_CONFIG_HOME": OWN}
_NEW_USER = 0x10000000
_NEW = {"ipc": 0x08000000, "mount": 0x00020000, "net": 0x40000000, "pid": 0x20000000}
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_OF_THE_HOST = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus")  # in any namespace
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_KEPT_CAPABILITIES = frozenset({1, 2, 5, 6, 7})  # read what root may, signal, change user and group
_OWN_SIZE = b"size=1m,mode=1777"
_FIRST_PID, _MAX_PID = 300, 1 << 22
_NOBODY = _MAX_PID + 1
_CURES = {
    ("clone", errno.EPERM): (
        "run as root, or where unprivileged users may make namespaces: see `sysctl -a | grep "
        "userns`, and the security profile of a container"
    ),
    ("clone", errno.ENOSPC): "raise sysctl user.max_pid_namespaces and its neighbours",
    ("clone", errno.EINVAL): "namespaces need a kernel with CONFIG_USER_NS and CONFIG_PID_NS",
    ("proc", errno.EPERM): "give the container a /proc of which nothing is masked, or run as root",
    ("read", errno.EACCES): "install Python where every user can read it, such as /opt",
    ("read", errno.ENOENT): f"install Python elsewhere than in {OWN}",
    ("read-only", errno.ENOSYS): "read-only mounts need Linux 5.12",
    ("pids", errno.ENOENT): "namespaces need a kernel with CONFIG_CHECKPOINT_RESTORE",
}
_SAME_CURE = "see the security profile of the container, or AppArmor and SELinux on the host"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class ApartError(OSError):
    """A process cannot be started in namespaces."""

    def __init__(self, step: str, number: int, what: str) -> None:
        super().__init__(number, f"{what}: {os.strerror(number)}")
        self.step = step

    @property
    def layer(self) -> tier.Layer:
        """The layer that is missing, with the remedy."""
        name = errno.errorcode.get(self.errno or 0, str(self.errno))
        fix = _CURES.get((self.step, self.errno or 0), _SAME_CURE)
        return tier.Layer(tier.NAMESPACES, False, f"{self.strerror} ({name})", fix)


@dataclass(eq=False)
class Process:
    """A child of this process; as much of `subprocess.Popen` as its users need."""

    pid: int
    kind: str  # the namespaces it is in
    returncode: int | None = None

    def kill(self) -> None:
        """End it, unless it was reaped."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Reap it; all below it are gone then."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def start(
    command: Sequence[str], environment: Mapping[str, str], descriptor: int, needed: Sequence[str]
) -> Process:
    """Run a command in namespaces of its own, with `descriptor` open and standard input empty. It
    dies with this process.

    Args:
        needed: files that it must be able to read.

    Raises:
        ApartError: this host or user cannot.
    """
    try:
        return _start(command, environment, descriptor, needed, with_user=os.geteuid() != 0)
    except ApartError as error:
        if os.geteuid() != 0 or error.errno != errno.EPERM:
            raise
    return _start(command, environment, descriptor, needed, with_user=True)  # root of a container


def outer_pid(pidfd: int) -> int:
    """The number that a process has here, whatever it has in its own namespace; one that no process
    ever has if it is gone."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value) if int(value) > 0 else _NOBODY
    return _NOBODY


def _start(
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptor: int,
    needed: Sequence[str],
    *,
    with_user: bool,
) -> Process:
    flags = sum(_NEW.values()) | (_NEW_USER if with_user else 0)
    machine = os.uname().machine
    if machine not in seccomp.MACHINES:
        raise ApartError("clone", errno.ENOSYS, f"the number of clone on {machine} is not known")
    number = seccomp.numbers(machine)["clone"]
    parent_reads, child_says = os.pipe()
    child_waits, parent_lets = os.pipe()
    with os.fdopen(parent_reads, "rb") as heard, os.fdopen(parent_lets, "wb", 0) as let:
        pid = _libc.syscall(
            ctypes.c_long(number), ctypes.c_long(flags | signal.SIGCHLD), 0, 0, 0, 0
        )
        if pid == 0:
            try:
                os.close(parent_lets)
                _become(command, environment, descriptor, needed, child_waits, child_says)
            finally:
                os._exit(127)
        number = ctypes.get_errno()
        os.close(child_says)
        os.close(child_waits)
        if pid < 0:
            raise ApartError("clone", number, "clone")
        process = Process(pid, " ".join([*["user"] * with_user, *sorted(_NEW)]))
        try:
            if with_user:
                _map_users(pid)
            with contextlib.suppress(BrokenPipeError):  # it says why
                let.write(b"x")
            said = heard.read()  # to its end, which is that of the copy
            if said:
                step, code, what = said.decode().split(" ", 2)
                raise ApartError(step, int(code), what)
        except OSError as error:
            process.kill()
            process.wait()
            if isinstance(error, ApartError):
                raise
            raise ApartError("users", error.errno or 0, "map its users") from error
    return process


def _map_users(pid: int) -> None:
    """Every user that may be mapped has the same number inside."""
    folder = Path(f"/proc/{pid}")
    if os.geteuid() == 0:
        for name in ("uid_map", "gid_map"):
            lines = [line.split() for line in Path(f"/proc/self/{name}").read_text().splitlines()]
            text = "".join(f"{inside} {inside} {count}\n" for inside, _, count in lines)
            (folder / name).write_text(text)
    else:
        (folder / "setgroups").write_text("deny")
        (folder / "uid_map").write_text(f"{os.geteuid()} {os.geteuid()} 1")
        (folder / "gid_map").write_text(f"{os.getegid()} {os.getegid()} 1")


def _become(
    command: Sequence[str],
    environment: Mapping[str, str],
    descriptor: int,
    needed: Sequence[str],
    waits: int,
    says: int,
) -> None:
    """In the copy: furnish the namespaces and run the program; say what went wrong."""
    step = "start"
    try:
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if not os.read(waits, 1):  # the parent ended before that call
            return
        step = "private"
        _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
        step = "read-only"
        _protect("/")
        step = "proc"
        _mount("proc", "/proc", None, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        if os.path.isdir(OWN):
            step = "own"
            _mount("tmpfs", OWN, _OWN_SIZE, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        step = "pids"
        _far_pids()
        step = "proc"
        for place in filter(os.path.exists, _OF_THE_HOST):
            _mount(place, place, None, _MS_BIND)
            _protect(place)
        for capability in range(64):
            if capability not in _KEPT_CAPABILITIES:
                _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # the last ones do not exist
        step = "pidfd"
        os.close(os.pidfd_open(os.getpid()))
        step = "read"
        for path in needed:
            os.close(os.open(path, os.O_RDONLY))
        step = "exec"
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.set_inheritable(descriptor, True)
        os.execve(command[0], list(command), {**environment, **_WRITABLE})
    except OSError as error:
        what = f"{step} {error.filename}" if isinstance(error.filename, str) else step
        os.write(says, f"{step} {error.errno or 0} {what}".encode())


def _far_pids() -> None:
    """Have the processes numbered from anywhere: the same numbers in two namespaces would hide it
    from replay when a program goes by them, and give two workers the same user."""
    top = min(_MAX_PID, int(Path("/proc/sys/kernel/pid_max").read_text()))
    last = random.SystemRandom().randrange(_FIRST_PID, top // 4 * 3)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(last))


def _protect(place: str) -> None:
    """Make what is mounted there, and below it, read-only."""
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)  # to set, to clear, two unused
    _check(
        _libc.syscall(
            ctypes.c_long(_MOUNT_SETATTR),
            _AT_FDCWD,
            place.encode(),
            _AT_RECURSIVE,
            attributes,
            ctypes.c_size_t(ctypes.sizeof(attributes)),
        )
    )


def _mount(kind: str, place: str, data: bytes | None, flags: int) -> None:
    _check(_libc.mount(kind.encode(), place.encode(), kind.encode(), ctypes.c_ulong(flags), data))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
