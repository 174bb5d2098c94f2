"""The handles that self-play works with, and how its work is shared by the processes of a run;
making them is `train`'s.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from spade_jax import processes
from spade_jax.config import Config
from spade_jax.curriculum import Curriculum
from spade_jax.envs import pool_stats, quarantine
from spade_jax.envs.pool import Pool
from spade_jax.envs.pool_stats import PoolStats
from spade_jax.envs.tier import UNSAFE
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.endpoint import Endpoint
from spade_jax.roles.supply import Supply
from spade_jax.rollout import stats
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import named_seed
from spade_jax.rollout.stats import EngineStats
from spade_jax.stopping import Stopped, Watch

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Stage:
    """The handles self-play works with; `runner` owns the event loop that the pool lives on."""

    config: Config
    engine: Engine
    pool: Pool
    chat: Chat
    corpus: Corpus
    curriculum: Curriculum
    runner: asyncio.Runner
    supply: Supply | None = None  # of programs that nobody is asked to write
    endpoint: Endpoint | None = None  # that is asked in the policy's place
    watch: Watch | None = None  # gives work up when the run is asked to stop

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines that ask the engine; their results in order.

        Raises:
            Stopped: the run is to stop.
        """
        work = self.engine.gather(coroutines)
        return self.runner.run(work if self.watch is None else self.watch.guarded(work))

    def share(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]]
    ) -> list[Result]:
        """The result of each item, in their order; every process works on some of them.

        Afterwards all pools refuse what any of them has put into quarantine.

        Raises:
            Stopped: in all processes, if one of them is to stop.
        """
        if processes.count() == 1:
            return list(work(items))
        before = self.pool.state()["offences"]
        try:
            mine = list(work(processes.dealt(items)))
        except Stopped:
            mine = None  # the others must not wait for it
        found = processes.exchange((mine, self.pool.state()["offences"]))
        parts = [part for part, _ in found if part is not None]
        if len(parts) < len(found):
            raise Stopped
        table = quarantine.joined(before, [offences for _, offences in found])
        self.pool.restore({"offences": table})
        return processes.collected(parts)

    def engine_stats(self) -> EngineStats:
        """What the samplers of all processes did since they were last asked."""
        return stats.joined(processes.exchange(self.engine.stats()))

    def pool_stats(self) -> PoolStats:
        """What the pools of all processes did since they were last asked."""
        return pool_stats.joined(processes.exchange(self.pool.stats()))

    def is_unsafe(self) -> bool:
        """Whether any process runs programs on a host that does not contain them."""
        return processes.agree(self.pool.sandbox.label == UNSAFE)

    async def close(self) -> None:
        """Let go of worker processes and connections."""
        await self.pool.close()
        if self.endpoint is not None:
            await self.endpoint.close()


def instance_seeds(config: Config, environment_id: str, step: int) -> list[int]:
    """The instances of an environment that are played in a step."""
    return [
        named_seed(config.run.seed, "instance", environment_id, step, index)
        for index in range(config.agent.seeds)
    ]
