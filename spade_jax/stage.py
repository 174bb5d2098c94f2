"""The handles that self-play works with; making them is `train`'s."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from spade_jax.config import Config
from spade_jax.curriculum import Curriculum
from spade_jax.envs.pool import Pool
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.supply import Supply
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import named_seed
from spade_jax.stopping import Watch


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
    supply: Supply | None = None  # of programs that the designer does not write
    watch: Watch | None = None  # gives work up when the run is asked to stop

    def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines that ask the engine; their results in order.

        Raises:
            Stopped: the run is to stop.
        """
        work = self.engine.gather(coroutines)
        return self.runner.run(work if self.watch is None else self.watch.guarded(work))


def instance_seeds(config: Config, environment_id: str, step: int) -> list[int]:
    """The instances of an environment that are played in a step."""
    return [
        named_seed(config.run.seed, "instance", environment_id, step, index)
        for index in range(config.agent.seeds)
    ]
