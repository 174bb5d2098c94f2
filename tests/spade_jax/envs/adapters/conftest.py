"""A pool whose packages are the stand-ins in `fakes`, found as an installed package would be."""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from spade_jax.envs import adapters
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Reply

FAKES = str(Path(__file__).with_name("fakes"))


@pytest.fixture(scope="session")
def fakes() -> str:
    """The folder with the stand-ins."""
    return FAKES


class Player:
    """A pool, the loop it is bound to, and short ways to play in it."""

    def __init__(self, runner: asyncio.Runner, pool: Pool) -> None:
        self.pool = pool
        self.run: Callable[[Coroutine[Any, Any, Any]], Any] = runner.run

    async def opened(self, package: str, name: str, seed: int = 1, **options: Any) -> Instance:
        """An instance, which must open."""
        instance = await self.pool.open(adapters.program(package, name, **options), seed)
        assert not isinstance(instance, Fault), instance
        return instance

    def play(
        self, package: str, name: str, actions: list[str], seed: int = 1, **options: Any
    ) -> tuple[str, list[Reply | Fault]]:
        """First observation and replies, to the last action."""

        async def episode() -> tuple[str, list[Reply | Fault]]:
            instance = await self.opened(package, name, seed, **options)
            replies = [await instance.step(action) for action in actions]
            await instance.close()
            return instance.observation, replies

        return self.run(episode())

    def solution(self, package: str, name: str, seed: int = 1, **options: Any) -> Any:
        """What the instance says wins."""

        async def ask() -> Any:
            instance = await self.opened(package, name, seed, **options)
            answer = await instance.solution()
            await instance.close()
            return answer

        return self.run(ask())


@pytest.fixture(scope="module")
def player(descendants: Callable[[int], set[int]]) -> Iterator[Player]:
    """Plays in a pool of all packages; that it leaves no process is part of each module's tests."""
    before = descendants(os.getpid())
    with asyncio.Runner() as runner:
        pool = Pool(Limits(max_workers=4), packages=list(adapters.PACKAGES), package_path=[FAKES])
        runner.run(pool.start())
        try:
            yield Player(runner, pool)
        finally:
            runner.run(pool.close())
    assert descendants(os.getpid()) <= before
