"""A pool that the tests of one module share, and a look at the processes below one."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool


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


class Shared:
    """A pool and the loop it is bound to."""

    def __init__(self, runner: asyncio.Runner, pool: Pool) -> None:
        self.pool = pool
        self.run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.run


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    """A pool with short deadlines; that it leaves no process is part of each module's tests."""
    before = _descendants(os.getpid())
    with asyncio.Runner() as runner:
        pool = Pool(
            Limits(load_s=0.5, reset_s=0.5, step_s=0.3, max_workers=4, instances_per_worker=8)
        )
        runner.run(pool.start())
        try:
            yield Shared(runner, pool)
        finally:
            runner.run(pool.close())
    assert _descendants(os.getpid()) <= before
