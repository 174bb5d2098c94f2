"""A pool that the tests of one module share."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool


class Shared:
    """A pool and the loop it is bound to."""

    def __init__(self, runner: asyncio.Runner, pool: Pool) -> None:
        self.pool = pool
        self.run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.run


@pytest.fixture(scope="module")
def shared(descendants: Callable[[int], set[int]]) -> Iterator[Shared]:
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
