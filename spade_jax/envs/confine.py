"""What a worker gives up before it sees a program, in the order that matters. Standard library
only, Linux only.

descriptors (the channel at its fixed number, the rest closed, standard streams to nowhere), a
session of its own, first in line for the kernel's out-of-memory killer, a user id of its own if
root and no capability, death with the parent, no dumps, a working folder that no longer exists,
resource limits, no new privileges, Landlock, and last the filter of system calls.

What the kernel refuses is recorded or raised, never passed over: `probe` tries what all this is
worth. A shared kernel remains, and so do clocks, and names and sizes of files where the user may
look. The limit of memory counts what is mapped, not the kernel's tables of it: one page in each of
65,000 far regions takes 360 MB more. The supervisor's watch sees these, and a cgroup's limit.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from spade_jax.envs import landlock, limits, namespaces, seccomp

_OPEN_FILES = 64
_STACK_BYTES = 4 << 20  # what nests too deep for it ends soon, and some does so in square time
_FIRST_UID = 2_100_000_000  # above the users of any directory service
_MOST_PIDS = 1 << 22
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_RLIMIT_MSGQUEUE = 12  # on both machines; `resource` knows it only in some builds
_CAPABILITY_HEADER = (ctypes.c_uint32 * 2)(0x20080522, 0)  # its third version, this process
_NO_CAPABILITY = (ctypes.c_uint32 * 6)()


class LayerError(OSError):
    """A layer that was thought to be there refuses to be put up."""

    def __init__(self, layer: str, error: OSError) -> None:
        super().__init__(error.errno, f"{layer}: {error.strerror}")
        self.layer = layer


@dataclass(frozen=True)
class Walls:
    """What a zygote prepares once for all its workers."""

    bounds: dict[int, int]  # resource limits, soft and hard, by the kernel's number
    uids: range  # of which each worker takes one; empty if the user cannot be changed
    rules: int | None  # descriptor of Landlock's rules
    landlock_abi: int  # that the rules are made for; 0 without
    filter: seccomp.Filter | None
    absent: dict[str, OSError] = field(default_factory=dict)  # layers that cannot be, and why

    def without(self, error: LayerError) -> "Walls":
        """The walls when a layer turned out to be impossible here."""
        absent = self.absent | {error.layer: error}
        if error.layer == "seccomp":
            return replace(self, filter=None, absent=absent)
        if self.rules is not None:
            os.close(self.rules)
        only_filter = None if self.filter is None else _filter(files=False)
        return replace(self, rules=None, landlock_abi=0, filter=only_filter, absent=absent)


def prepare(memory_bytes: int, weaken: str, also_readable: Sequence[str] = ()) -> Walls:
    """Build the walls of this zygote's workers, and leave for a folder that no longer exists.

    Args:
        memory_bytes: address space a worker may add to what is mapped now.
        weaken: layers to do without, for tests: of "landlock", "landlock>1" (as a kernel that knows
            only its first version) and "seccomp", with commas between them.
        also_readable: what a worker may read beside the interpreter's library.
    """
    weak = weaken.split(",")
    absent: dict[str, OSError] = {}
    rules, abi, call_filter = None, 0, None
    try:
        limit = 0 if "landlock" in weak else 1 if "landlock>1" in weak else landlock.ANY_ABI
        rules = landlock.ruleset([*landlock.library_paths(), *also_readable], limit)
        abi = min(landlock.abi(), limit)
    except OSError as error:
        absent["landlock"] = error
    try:
        if "seccomp" in weak:
            raise OSError(errno.ENOSYS, "turned off for a test")
        call_filter = _filter(files=rules is not None)
    except OSError as error:
        absent["seccomp"] = error
    with contextlib.suppress(OSError):  # no place to make one: / does as well
        os.chdir("/")
        empty = new_folder()
        os.chdir(empty)
        os.rmdir(empty)
    return Walls(_bounds(memory_bytes), _uids(), rules, abi, call_filter, absent)


def new_folder() -> str:
    """A new folder of this user's own, wherever one can be made.

    Raises:
        OSError: nowhere.
    """
    try:
        return tempfile.mkdtemp()
    except FileNotFoundError:  # in namespaces only this is left
        return tempfile.mkdtemp(dir=namespaces.OWN)


def confine(channel: int, parent: int, walls: Walls) -> dict[str, OSError]:
    """Give up, in a new worker, all that a program must not have; returns what was refused and can
    be done without. `channel` becomes `limits.CHANNEL`.

    Raises:
        LayerError: Landlock or the filter cannot be put up.
        OSError: something else cannot, without which there is no worker.
    """
    refused: dict[str, OSError] = {}
    rules = _keep_only(channel, walls.rules)
    os.setsid()
    _offer_to_oom_killer()
    _drop_user(walls.uids, refused)
    limits.die_with_parent(parent)  # a change of user would undo it
    _prctl(_PR_SET_DUMPABLE, 0)
    for limit, value in walls.bounds.items():
        try:
            resource.setrlimit(limit, (value, value))
        except OSError as error:
            refused[f"rlimit {limit}"] = error
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if rules is not None:
        try:
            landlock.restrict(rules)
        except OSError as error:
            raise LayerError("landlock", error) from error
        os.close(rules)
    if walls.filter is not None:
        try:
            walls.filter.install()
        except OSError as error:
            raise LayerError("seccomp", error) from error
    return refused


def _filter(*, files: bool) -> seccomp.Filter:
    return seccomp.build(os.uname().machine, files=files)


def _uids() -> range:
    """User ids that workers may be given."""
    if os.geteuid() != 0:
        return range(0)
    try:
        return spare_uids(Path("/proc/self/uid_map").read_text())
    except OSError:  # without /proc: what every container maps
        return spare_uids("0 0 65536")


def spare_uids(uid_map: str) -> range:
    """User ids as far above those of people as a user namespace has them, by its map."""
    top = max(
        int(inside) + int(count)
        for inside, _, count in (line.split() for line in uid_map.splitlines())
    )
    count = min(_MOST_PIDS, top // 4)
    first = min(_FIRST_UID, top - count - 2)  # the last two may be nobody and overflow
    return range(first, first + count)


def _bounds(memory_bytes: int) -> dict[int, int]:
    wanted = {
        resource.RLIMIT_AS: limits.address_space() + memory_bytes,
        resource.RLIMIT_CPU: limits.CPU_S,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_MEMLOCK: 0,
        _RLIMIT_MSGQUEUE: 0,
    }
    hard = {limit: resource.getrlimit(limit)[1] for limit in wanted}
    return {
        limit: value if hard[limit] == resource.RLIM_INFINITY else min(value, hard[limit])
        for limit, value in wanted.items()
    }


def _offer_to_oom_killer() -> None:
    """A favour to the trainer, not a wall."""
    try:
        file = os.open("/proc/self/oom_score_adj", os.O_WRONLY)  # not once dumps are off
    except OSError:
        return
    with contextlib.suppress(OSError):
        os.write(file, b"1000")
    os.close(file)


def _drop_user(uids: range, refused: dict[str, OSError]) -> None:
    if uids:
        uid = uids[os.getpid() % len(uids)]
        for name, change in (
            ("groups", lambda: os.setgroups([])),
            ("gid", lambda: os.setresgid(uid, uid, uid)),
            ("uid", lambda: os.setresuid(uid, uid, uid)),
        ):
            try:
                change()
            except OSError as error:
                refused[name] = error
    if _libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITY):  # whoever it is
        error = ctypes.get_errno()
        raise OSError(error, f"capset: {os.strerror(error)}")


def _keep_only(channel: int, rules: int | None) -> int | None:
    """Close all descriptors but the channel and the rules; returns the new one of the rules."""
    kept = [limits.CHANNEL]
    if rules is not None:
        rules = fcntl.fcntl(rules, fcntl.F_DUPFD_CLOEXEC, limits.CHANNEL + 1)
        kept.append(rules)
    if channel != limits.CHANNEL:  # dup3 refuses equal descriptors
        os.dup2(channel, limits.CHANNEL, inheritable=False)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    start = 3
    for descriptor in kept:
        os.closerange(start, descriptor)
        start = descriptor + 1
    os.closerange(start, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    return rules


_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")
