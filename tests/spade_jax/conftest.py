"""A look at the processes below one."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest


def _parents(zombies: bool = True) -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if zombies or state != "Z":
            found[int(path.parent.name)] = int(parent)
    return found


def _descendants(pid: int) -> set[int]:
    parents = _parents()
    found, waiting = set(), {pid}
    while waiting:
        waiting = {child for child, parent in parents.items() if parent in waiting}
        found |= waiting
    return found


@pytest.fixture(scope="session")
def descendants() -> Callable[[int], set[int]]:
    """A function: all processes below one, zombies included."""
    return _descendants


@pytest.fixture(scope="session")
def seen_pid() -> Callable[[int], int]:
    """A function: the number that a process below this one has here, of what it calls itself."""

    def find(own: int) -> int:
        found = []
        for pid in _descendants(os.getpid()):
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:  # it ended meanwhile
                continue
            found += [
                pid
                for line in lines
                if line.split()[:1] == ["NSpid:"] and int(line.split()[-1]) == own
            ]
        (pid,) = found
        return pid

    return find


@pytest.fixture(scope="session")
def all_gone() -> Callable[..., bool]:
    """A function: wait up to ten seconds until none of the processes runs; whether so."""

    def wait(pids: set[int], within_s: float = 10.0) -> bool:
        give_up = time.monotonic() + within_s
        while pids & _parents(zombies=False).keys():
            if time.monotonic() > give_up:
                return False
            time.sleep(0.02)
        return True

    return wait
