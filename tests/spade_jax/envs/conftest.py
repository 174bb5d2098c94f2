"""A pool that the tests of one module share."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool

PATIENCE_S = 240.0  # on a busy machine; the longest work of a test takes seconds


class Shared:
    """A pool and the loop it is bound to."""

    def __init__(self, runner: asyncio.Runner, pool: Pool) -> None:
        self._runner = runner
        self.pool = pool

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which waits for ever if nothing of the pool becomes free."""
        return self._runner.run(asyncio.wait_for(work, PATIENCE_S))

    def tidy(self) -> None:
        """End the workers that a test which failed has left occupied: the next would wait for
        them."""

        async def end() -> None:
            for worker in list(self.pool._workers.values()):
                if worker.occupants:
                    self.pool._discard(worker)

        self._runner.run(end())


@pytest.fixture
def shared(shared_by_all: Shared) -> Iterator[Shared]:
    """The pool of this module, with no instance of another test in it."""
    yield shared_by_all
    shared_by_all.tidy()


@pytest.fixture(scope="module")
def shared_by_all(descendants: Callable[[int], set[int]]) -> Iterator[Shared]:
    """A pool with short deadlines; that it leaves no process is part of each module's tests."""
    before = descendants(os.getpid())
    with asyncio.Runner() as runner:
        pool = Pool(
            Limits(load_s=0.5, reset_s=0.5, step_s=0.3, max_workers=4, instances_per_worker=8)
        )
        runner.run(pool.start())
        try:
            yield Shared(runner, pool)
        finally:
            runner.run(pool.close())
    assert descendants(os.getpid()) <= before
