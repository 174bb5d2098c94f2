"""A normal user who has control groups of his own, as a login under systemd may give them, and who
can read the interpreter. Only root can make one."""

import contextlib
import functools
import os
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from spade_jax.envs import cgroup

USER = 54321
_ROOT = Path(__file__).resolve().parents[1]
_DELEGATED = ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks")


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[list[str]]:
    """A command line that runs another one as that user, in groups that are the user's."""
    with _groups() as homes:
        lines = ["set -e", *(f"echo $$ > {home}/cgroup.procs" for home in homes), *_readable()]
        lines.append(
            f"exec setpriv --reuid {USER} --regid {USER} --clear-groups {shlex.join(arguments)}"
        )
        yield ["unshare", "--mount", "sh", "-c", "\n".join(lines)]


@functools.cache
def reason() -> str:
    """Why that cannot be here; "" if it can."""
    if os.geteuid() != 0:
        return "only root can make a user and give groups away"
    if not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        return "util-linux is not installed"
    kinds = ["--user", "--map-root-user", "--pid", "--net", "--ipc", "--mount-proc", "--fork"]
    done = subprocess.run(["unshare", *kinds, "true"], capture_output=True, text=True)
    if done.returncode:
        return f"no namespaces can be made: {done.stderr}"
    try:
        with _groups():
            return ""
    except OSError as error:
        return f"no control group can be made: {error}"


def best_tiers() -> set[str]:
    """What a pool is at here: S where all can be had that it takes."""
    return {"S", "A"} if reason() else {"S"}


@contextlib.contextmanager
def _groups() -> Iterator[list[Path]]:
    group = cgroup.create(1 << 40, 10_000)
    try:
        home = group.below(f"home-{secrets.token_hex(4)}")
        homes = sorted(set(home.folders.values()))
        for folder in (*group.folders.values(), *homes):
            for name in _DELEGATED:
                if (folder / name).exists():
                    os.chown(folder / name, USER, USER)
        yield homes
    finally:
        group.remove()


def _readable() -> Iterator[str]:
    """Lines that lay bare what the interpreter needs in a folder that only its owner enters."""
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix), _ROOT}
    closed = {_closed(path) for path in needed} - {None}
    for folder in closed:
        inside = sorted(path for path in needed if _closed(path) == folder)
        for number, path in enumerate(inside):
            yield f"mkdir /tmp/$$-{number}; mount --rbind {path} /tmp/$$-{number}"
        yield f"mount -t tmpfs -o mode=755 none {folder}"
        for number, path in enumerate(inside):
            yield f"mkdir -p {path}; mount --move /tmp/$$-{number} {path}; rmdir /tmp/$$-{number}"


def _closed(path: Path) -> Path | None:
    """The topmost folder on the way to a path that others may not enter."""
    found = [folder for folder in (path, *path.parents) if not folder.stat().st_mode & 1]
    return found[-1] if found else None
