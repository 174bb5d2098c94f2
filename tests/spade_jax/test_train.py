"""What a checkpoint keeps of the environment pool, that a resume takes it over, and what a run is
refused for before anything is computed.
"""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from models.sharding import build_mesh
from spade_jax.config import (
    Config,
    CorpusConfig,
    DiversityConfig,
    EngineConfig,
    LearnerConfig,
    RunConfig,
)
from spade_jax.curriculum import Curriculum
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import ConfigError, CorpusError, SpadeError
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner, TrainState
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.stage import Stage
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.telemetry.timing import Phases
from spade_jax.train import Run, _restore, start_run
from spade_jax.types import Document, Fault, Outcome

DYING = """
import os

class DyingEnv:
    def reset(self, seed):
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("folder", "told", "expected"),
    [("~/programs", "", "home/programs"), ("", "", "None"), ("~/programs", "/told", "/told")],
)
def test_where_compiled_programs_are_kept(tmp_path, folder, told, expected):
    code = (
        "import jax, sys; from spade_jax.train import keep_compiled; keep_compiled(sys.argv[1]); "
        "print(jax.config.jax_compilation_cache_dir)"
    )
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment = kept | {"HOME": str(tmp_path / "home")}
    if told:
        environment["JAX_COMPILATION_CACHE_DIR"] = told
    done = subprocess.run(
        [sys.executable, "-c", code, folder], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(expected)


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
        run.folder = RunFolder(tmp_path)
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


ASSETS = Path(__file__).parents[2] / "assets" / "tiny"


@pytest.mark.parametrize(
    ("corpus", "diversity", "error", "part"),
    [
        ({"path": "absent.jsonl"}, {}, CorpusError, r"absent\.jsonl cannot be read"),
        ({"path": "empty.jsonl"}, {}, CorpusError, r"no usable document \(no line\)"),
        ({"path": "other.jsonl", "sampling": "per_skill"}, {}, CorpusError, "for the skill 'Math"),
        ({"enabled": False}, {"embedding": "sentence"}, ConfigError, "sentence-transformers"),
    ],
)
def test_what_cannot_be_read_is_one_line_before_anything_starts(
    tmp_path, monkeypatch, corpus, diversity, error, part
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(Pool, "start", lambda self: pytest.fail("the pool was started"))
    (tmp_path / "empty.jsonl").touch()
    record = {"text": "words " * 99, "skill": "Optimization"}
    (tmp_path / "other.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "sentence_transformers.py").write_text("raise ImportError('No module')")
    config = Config(
        run=RunConfig(dir=str(tmp_path / "run"), init_from=str(ASSETS)),
        corpus=CorpusConfig(**corpus),
        diversity=DiversityConfig(**diversity),
    )
    with pytest.raises(error, match=part) as raised, start_run(config, resume=False):
        pass
    assert isinstance(raised.value, SpadeError) and "\n" not in str(raised.value)
    assert not list((tmp_path / "run").glob("*.json*"))


def test_replay_without_the_routers_choices_is_refused():
    learner = LearnerConfig(router_replay=True)
    with pytest.raises(ConfigError, match=r"engine\.routing=False does not keep them"):
        Config(learner=learner)
    Config(learner=learner, engine=EngineConfig(routing=True))
