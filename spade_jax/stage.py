"""The handles that self-play works with; making them is `train`'s."""

import asyncio
from dataclasses import dataclass

from spade_jax.config import Config
from spade_jax.curriculum import Curriculum
from spade_jax.envs.pool import Pool
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.endpoint import Endpoint
from spade_jax.roles.supply import Supply
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import named_seed


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
