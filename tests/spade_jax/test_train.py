"""What a checkpoint keeps of the environment pool, and that a resume takes it over."""

import asyncio
import json

import jax.numpy as jnp

from models.sharding import build_mesh
from spade_jax.config import Config
from spade_jax.curriculum import Curriculum
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner, TrainState
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.stage import Stage
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.telemetry.timing import Phases
from spade_jax.train import Run, _restore
from spade_jax.types import Document, Fault, Outcome

DYING = """
import os

class DyingEnv:
    def reset(self, seed):
        os._exit(1)
"""


def made_stage() -> Stage:
    stage = object.__new__(Stage)
    stage.corpus = Corpus([Document("d", "title", "text")], 0)
    stage.curriculum = Curriculum(Memory(Config().memory))
    stage.pool = Pool(Limits())
    return stage


def test_a_quarantine_outlives_the_run(tmp_path):
    config = Config()
    state = TrainState({"w": jnp.zeros(2)}, (), jnp.int32(0), jnp.int32(0))
    with Checkpoints(tmp_path / "checkpoints", 2, {}) as checkpoints:

        async def offend() -> Stage:
            stage = made_stage()
            async with stage.pool:
                for seed in range(2):
                    assert isinstance(await stage.pool.open(DYING, seed), Fault)
            return stage

        run = object.__new__(Run)
        run.config, run.stage, run.state = config, asyncio.run(offend()), state
        run.version, run.checkpoints, run.phases = 0, checkpoints, Phases()
        run.checkpoint(config.run.checkpoint_steps - 1)

        fresh = made_stage()
        learner = object.__new__(Learner)
        learner.abstract_state = lambda: state
        mesh = build_mesh(1, -1, 1, 1)
        folder = RunFolder(tmp_path)
        line = {"progress/step": 0, "progress/cycle": 0, "time/step_s": 1.0}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        _restore(config, fresh, learner, mesh, checkpoints, folder, resume=True)

    async def reopen() -> Fault:
        async with fresh.pool:
            fault = await fresh.pool.open(DYING, 3)
            stats = fresh.pool.stats()
            assert (stats.requests, stats.refused, stats.quarantined) == (0, 1, 1)
            return fault

    fault = asyncio.run(reopen())
    assert fault.outcome is Outcome.WORKER_DIED
    assert fault.detail.startswith("in quarantine")
