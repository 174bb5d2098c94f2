"""One control group for all zygotes and workers of a pool, with limits of memory and of processes,
and in it one for each zygote. Standard library only, Linux only.

The kernel counts here what no watch over single processes sees in time, its tables included, and
ends the largest. Version 2 and the controllers of version 1 will do, wherever this process may make
a folder; where somebody has set a limit, the group is made below it. The folder of a run that was
killed is removed by the next to start: a living run holds a lock on its own.
"""

import contextlib
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spade_jax.envs import tier

CONTROLLERS = ("memory", "pids")
_PREFIX = "spade_jax-"
_LOCKS = 3  # tries to make a folder that a sweeper does not take for a dead one
_REMOVAL_S = 1.0  # for processes that are still on their way out
_CURE = "run as root, or as the user of a delegated group: `systemd-run --user --scope COMMAND`"
_CURES = {
    errno.EROFS: "give the container a writable /sys/fs/cgroup of its own",
    errno.EBUSY: "start it in a group below one whose cgroup.subtree_control has memory and pids",
    errno.ENOENT: "boot with the memory and pids controllers (cgroup_enable=memory)",
}


@dataclass(frozen=True)
class Place:
    """The group that this process is in, as a folder."""

    folder: Path
    top: Path  # where its hierarchy is mounted
    unified: bool  # version 2


def missing(error: OSError) -> tier.Layer:
    """The layer that cannot be, with the remedy."""
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    where = f": {error.filename}" if error.filename else ""
    cure = _CURES.get(error.errno or 0, _CURE)
    return tier.Layer(tier.CGROUP, False, f"{error.strerror} ({name}){where}", cure)


def places(mounts: str, groups: str) -> dict[str, Place]:
    """Where each controller is to be found, by /proc/self/mountinfo and /proc/self/cgroup.

    Raises:
        OSError: nowhere.
    """
    own: dict[str, str] = {}
    for line in groups.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            own[name] = path
    found: dict[str, Place] = {}
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        root, top = (_plain(text) for text in fields.split()[3:5])
        system, _, options = kind.split(" ", 2)
        if system == "cgroup2" and "" in own:
            names = [""]
        elif system == "cgroup":
            names = [name for name in options.split(",") if name in CONTROLLERS and name in own]
        else:
            continue
        for name in names:
            path = os.path.relpath(own[name], root)
            if not path.startswith(".."):  # else it is outside what is mounted here
                found.setdefault(name, Place(Path(top, path), Path(top), system == "cgroup2"))
    unified = found.pop("", None)
    for name in CONTROLLERS:
        if name not in found and unified is not None and name in _words(unified, "controllers"):
            found[name] = unified
        if name not in found:
            raise OSError(errno.ENOENT, f"no {name} controller")
    return found


def _plain(text: str) -> str:
    """A field of mountinfo without its escapes."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _words(place: Place, name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return (place.folder / f"cgroup.{name}").read_text().split()
    return []


def _parent(place: Place, controllers: list[str]) -> Path:
    """The nearest folder in which a group can have these controllers, at or above this one.

    Raises:
        OSError: there is none without leaving a limit that somebody set.
    """
    if not place.unified:
        return place.folder
    try:
        if not set(controllers) <= set(_words(place, "subtree_control")):
            text = " ".join(f"+{name}" for name in controllers)
            (place.folder / "cgroup.subtree_control").write_text(text)
        return place.folder
    except OSError as error:  # it has processes: this one
        folder, reason = place.folder, error
    while folder != place.top:
        if any(
            _read(folder / name) not in ("max", "") for name in ("memory.max", "pids.max")
        ):  # nothing of ours grows outside of it
            break
        folder = folder.parent
        above = Place(folder, place.top, unified=True)
        if set(controllers) <= set(_words(above, "subtree_control")):
            return folder
    raise reason


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


@dataclass(eq=False)
class Group:
    """A group in every hierarchy that it takes: one folder for all its controllers, or several."""

    folders: Mapping[str, Path]  # by controller
    locks: list[int] = field(default_factory=list)

    def limit(self, memory_bytes: int | None, processes: int | None) -> None:
        """Set the limits of all that is in the group; None lifts one."""
        most = "max" if processes is None else str(processes)
        (self.folders["pids"] / "pids.max").write_text(most)
        folder = self.folders["memory"]
        if (folder / "memory.max").exists():
            (folder / "memory.max").write_text("max" if memory_bytes is None else str(memory_bytes))
            names = ["memory.swap.max"]
            text = "0"
        else:
            text = "-1" if memory_bytes is None else str(memory_bytes)
            names = ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
            if memory_bytes is None:  # the second is never below the first
                names.reverse()
        for name in names:
            if (folder / name).exists():  # no swap, no such file
                (folder / name).write_text(text)

    def below(self, name: str) -> "Group":
        """A new group in this one."""
        folders = {controller: folder / name for controller, folder in self.folders.items()}
        _make(folders)
        return Group(folders)

    def join(self, pid: int) -> None:
        """Put a process into the group; what it starts is born there.

        Raises:
            OSError: it cannot be, or is not there afterwards.
        """
        for folder in set(self.folders.values()):
            (folder / "cgroup.procs").write_text(str(pid))
            if str(pid) not in (folder / "cgroup.procs").read_text().split():
                raise OSError(errno.ESRCH, f"process {pid} is not in it", str(folder))

    def remove(self) -> None:
        """Remove the group and those in it, once their processes are gone."""
        give_up = time.monotonic() + _REMOVAL_S
        for folder in set(self.folders.values()):
            while not _removed(folder) and time.monotonic() < give_up:
                time.sleep(0.002)
        for lock in self.locks:
            os.close(lock)
        self.locks.clear()


def create(memory_bytes: int, processes: int) -> Group:
    """A new group with limits, where this process may make one; sweeps away those of dead runs.

    Raises:
        OSError: it cannot be made.
    """
    found = places(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    parents: dict[str, Path] = {}
    for name, place in found.items():
        together = [other for other in found if found[other] == place]
        parents[name] = _parent(place, together)
    for parent in set(parents.values()):
        sweep(parent)
    for _ in range(_LOCKS):
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        folders = {controller: parent / name for controller, parent in parents.items()}
        _make(folders)
        group = Group(folders)
        try:
            group.locks.extend(_locked(folder) for folder in set(folders.values()))
            _pass_down(found, group)
            group.limit(memory_bytes, processes)
        except (FileNotFoundError, BlockingIOError):  # a sweeper was faster
            group.remove()
            continue
        except OSError:
            group.remove()
            raise
        return group
    raise OSError(errno.EAGAIN, "the new group is removed again and again")


def sweep(parent: Path) -> None:
    """Remove the groups of runs that are no more."""
    with contextlib.suppress(OSError):
        for folder in list(parent.glob(f"{_PREFIX}*")):
            with contextlib.suppress(OSError):  # it is another's, or lives, or has processes yet
                lock = _locked(folder)
                try:
                    _removed(folder)
                finally:
                    os.close(lock)


def _make(folders: Mapping[str, Path]) -> None:
    made: list[Path] = []
    for folder in set(folders.values()):
        try:
            folder.mkdir(mode=0o755)
        except OSError as error:
            for other in made:
                _removed(other)
            raise OSError(error.errno, error.strerror, str(folder.parent)) from error
        made.append(folder)


def _locked(folder: Path) -> int:
    """A descriptor of a folder that nobody else has locked, and that stands."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_ino != folder.stat().st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    except OSError:
        os.close(lock)
        raise
    return lock


def _pass_down(found: Mapping[str, Place], group: Group) -> None:
    """Have the limits of a group hold for those in it."""
    for folder in set(group.folders.values()):
        names = [name for name in group.folders if group.folders[name] == folder]
        if found[names[0]].unified:
            text = " ".join(f"+{name}" for name in names)
            (folder / "cgroup.subtree_control").write_text(text)
        elif _read(folder / "memory.use_hierarchy") == "0":
            (folder / "memory.use_hierarchy").write_text("1")


def _removed(folder: Path) -> bool:
    """Try to remove a folder and those in it; returns whether it is gone."""
    with contextlib.suppress(OSError):
        for inner in _folders(folder):
            inner.rmdir()
        folder.rmdir()
    return not folder.exists()


def _folders(folder: Path) -> Iterator[Path]:
    return (path for path in list(folder.iterdir()) if path.is_dir())
