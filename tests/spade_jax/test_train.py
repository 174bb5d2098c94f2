"""What a checkpoint keeps of the environment pool, that a resume takes it over, and what a run is
refused for before anything is computed.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from bucket_stand_in import bucket_store

from models.sharding import build_mesh
from spade_jax.config import (
    Config,
    CorpusConfig,
    DiversityConfig,
    EngineConfig,
    LearnerConfig,
    MeshConfig,
    RunConfig,
)
from spade_jax.curriculum import Curriculum
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import (
    CheckpointError,
    ConfigError,
    CorpusError,
    FinishedError,
    SpadeError,
)
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner, TrainState
from spade_jax.resuming import _check_steps, binding, check_folder, restore
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.stage import Stage
from spade_jax.stopping import Stopped, Watch
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.telemetry.timing import Phases
from spade_jax.train import Run, start_run, train
from spade_jax.types import Document, Fault, Outcome

ROOT = Path(__file__).parents[2]
DYING = """
import os

class DyingEnv:
    def reset(self, seed):
        os._exit(1)
"""


@pytest.mark.parametrize(("resume", "is_well"), [(None, True), (True, False)])
def test_a_finished_run_is_no_failure_of_any_process_where_one_was_asked_for(
    monkeypatch, resume, is_well
):
    """What leaves `joined` as an error ends the other processes with that."""
    failures = []

    @contextmanager
    def joined() -> Iterator[None]:
        try:
            yield
        except FinishedError as error:
            failures.append(error)

    def finished(config: Config, *, resume: bool | None) -> None:
        raise FinishedError("the run is finished")

    monkeypatch.setattr("spade_jax.processes.joined", joined)
    monkeypatch.setattr("spade_jax.train.start_run", finished)
    assert train(Config(), resume=resume) is None
    assert len(failures) == (0 if is_well else 1)


@pytest.mark.parametrize(
    ("folder", "told", "expected"),
    [("~/programs", "", "home/programs"), ("", "", "None"), ("~/programs", "/told", "/told")],
)
def test_where_compiled_programs_are_kept(tmp_path, folder, told, expected):
    code = (
        "import jax, sys; from spade_jax.train import keep_compiled; keep_compiled(sys.argv[1]); "
        "print(jax.config.jax_compilation_cache_dir)"
    )
    environment = {"HOME": str(tmp_path / "home")}
    if told:
        environment["JAX_COMPILATION_CACHE_DIR"] = told
    assert apart(code, folder, **environment).strip().endswith(expected)


def apart(code: str, *arguments: str, **environment: str) -> str:
    """What a program prints in a process whose jax was told of no folder for compiled programs."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMPILES = """
import jax, pytest
from bucket_stand_in import bucket_store
from jax._src import compiler
from spade_jax.train import keep_compiled

hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
with pytest.MonkeyPatch.context() as monkeypatch, bucket_store(monkeypatch) as store:
    keep_compiled("gs://bucket/compiled")
    for again in (False, True):
        jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
        assert any(name.startswith("bucket/compiled/jit") for name in store.objects)
        assert bool(hits) == again
        jax.clear_caches()
    options = compiler.get_compile_options(1, 1)
    build = options.executable_build_options
    print(f"XLA: {build.debug_options.xla_gpu_per_fusion_autotune_cache_dir!r}")
"""
UNREACHABLE = """
import jax
from etils.epath import backend
from spade_jax.errors import SpadeError
from spade_jax.train import keep_compiled

def no_gcsfs(name):
    raise ImportError("No module named 'gcsfs'")

backend.fsspec_backend._get_filesystem = no_gcsfs
try:
    keep_compiled("gs://bucket/compiled")
except SpadeError as error:
    print(error, jax.config.jax_compilation_cache_dir)
"""


def test_compiled_programs_are_kept_in_a_bucket():
    """By jax, in the bucket, and not by XLA beside them: it has no file system for that."""
    assert "XLA: ''" in apart(COMPILES)


@pytest.mark.parametrize("told", [{}, {"JAX_COMPILATION_CACHE_DIR": "gs://bucket/compiled"}])
def test_a_bucket_for_compiled_programs_that_cannot_be_reached_is_refused(told):
    (line,) = apart(UNREACHABLE, **told).splitlines()
    assert line.startswith("gs://bucket/compiled cannot be opened: No module named 'gcsfs'; ")
    assert "install the extra `gcs`" in line


def test_one_process_of_several_sums_up_a_run_in_a_bucket(tmp_path, monkeypatch):
    """The others have nothing of what the run wrote: each has a spool of its own."""
    monkeypatch.setattr(Run, "_moved", lambda self: 0.25)
    with bucket_store(monkeypatch) as store, contextlib.ExitStack() as opened:
        runs = []
        for process in range(2):
            run = object.__new__(Run)
            run.checkpoints = SimpleNamespace(latest=lambda: None)
            spool = tmp_path / str(process)
            run.folder = RunFolder("gs://bucket/run", spool=spool, writes=process == 0)
            opened.enter_context(run.folder.locked())
            runs.append(run)
        for run in runs:
            run.folder.log({"progress/step": 0, "progress/cycle": 0, "time/step_s": 1.0})
            assert run.finish() == run.folder.path
        assert store.writes == ["bucket/run/metrics.jsonl", "bucket/run/summary.md"]
        assert b"the weights moved by 2.50e-01" in store.objects["bucket/run/summary.md"][0]


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
        run.folder, run.watch = RunFolder(tmp_path), Watch(1, 0)
        run.checkpoint(config.run.checkpoint_steps - 1)

        fresh = made_stage()
        learner = object.__new__(Learner)
        learner.abstract_state = lambda: state
        mesh = build_mesh(1, -1, 1, 1)
        folder = RunFolder(tmp_path)
        line = {"progress/step": 0, "progress/cycle": 0, "time/step_s": 1.0}
        (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        restore(config, fresh, learner, mesh, checkpoints, folder, resume=True)

    async def reopen() -> Fault:
        async with fresh.pool:
            fault = await fresh.pool.open(DYING, 3)
            stats = fresh.pool.stats()
            assert (stats.requests, stats.refused, stats.quarantined) == (0, 1, 1)
            return fault

    fault = asyncio.run(reopen())
    assert fault.outcome is Outcome.WORKER_DIED
    assert fault.detail.startswith("in quarantine")


@pytest.fixture
def saving_run(tmp_path) -> Iterator[Run]:
    """A run of five steps that saves every third, its parts empty."""
    run = object.__new__(Run)
    run.config = Config(run=RunConfig(steps=5, cycle_steps=5, checkpoint_steps=3))
    run.stage, run.folder, run.phases = made_stage(), RunFolder(tmp_path), Phases()
    run.watch = Watch(3, 0)
    run.stage.pool.sandbox = SimpleNamespace(label="full")
    with Checkpoints(tmp_path / "checkpoints", 9, {}) as run.checkpoints:
        yield run


def after(run: Run, step: int) -> None:
    """What the loop does at the end of a step."""
    run.version = step + 1
    run.state = TrainState({"w": jnp.full(2, step + 1.0)}, (), jnp.int32(step + 1), jnp.int32(0))
    run.checkpoint(step)


def test_saves_when_due_and_after_the_last_step(saving_run, tmp_path):
    for step in range(5):
        after(saving_run, step)
    assert saving_run.checkpoints.steps() == [2, 4]
    assert (tmp_path / "checkpointed.txt").read_text() == "2\n"  # the one before the last save


@pytest.mark.parametrize("moment", ["in a step", "in a play", "in the play after a save"])
def test_what_is_saved_at_a_stop_is_the_last_whole_step(saving_run, moment, caplog):
    run = saving_run
    whole = 3 if moment == "in the play after a save" else 2
    for step in range(whole - 1):
        after(run, step)
    if moment == "in a step":
        run.watch._asked = True
        with pytest.raises(Stopped):
            after(run, whole - 1)
    else:
        after(run, whole - 1)
        run.stage.corpus._positions["all"] = 7  # of the step that is begun, and given up
    run.stop()
    assert run.checkpoints.steps() == [whole - 1]
    _, state, host = run.checkpoints.restore(run.state)
    assert int(state.step) == host["version"] == whole and host["corpus"]["positions"] == {}
    with caplog.at_level("INFO"):
        run.stop()  # has nothing more to save
    assert f"asked to stop: after step {whole}, which is saved" in caplog.text


def test_a_run_that_is_asked_to_stop_in_its_last_step_ends(saving_run):
    saving_run.watch._asked = True
    after(saving_run, 4)
    assert saving_run.checkpoints.steps() == [4]


def test_a_save_that_failed_ends_the_run_at_the_next_step(saving_run, monkeypatch):
    def full(folder: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("spade_jax.learner.manifest.commit", full)
    after(saving_run, 2)
    saving_run.checkpoints._saving.exception()  # has come to its end
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint 2 .*No space left"):
        after(saving_run, 3)


def test_lost_checkpoints_are_noticed(tmp_path):
    folder = RunFolder(tmp_path)
    line = {"progress/step": 0, "progress/cycle": 0, "time/step_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    _check_steps(folder, None)  # none was whole yet
    folder.note_checkpoint(0)
    with pytest.raises(CheckpointError, match="metrics of 1 steps but no checkpoint"):
        _check_steps(folder, None)


def test_a_start_that_was_killed_leaves_its_folder_free(tmp_path):
    """At any point up to the rename that brings config.json."""
    for name in ("tokenizer.model", "revision.txt", "config.json.tmp"):
        (tmp_path / name).write_text("half")
        check_folder(RunFolder(tmp_path), Config(), resume=False)
    (tmp_path / "notes.txt").write_text("a user's")
    with pytest.raises(ConfigError, match=r"is not empty \(notes\.txt\)"):
        check_folder(RunFolder(tmp_path), Config(), resume=False)


def test_the_shape_of_the_mesh_may_change_and_the_seed_may_not():
    config = Config()
    other = dataclasses.replace(config, mesh=MeshConfig(data=2, fsdp=2, expert=1, tensor=2))
    assert binding(config) == binding(other)
    reseeded = dataclasses.replace(config, run=RunConfig(seed=1, checkpoint_minutes=5))
    differing = {
        name for name, value in binding(config).items() if binding(reseeded)[name] != value
    }
    assert differing == {"run.seed"}


ASSETS = ROOT / "assets" / "tiny"


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
