"""THE LOOP: design, play, score, update, load, save. One step is one optimiser update on both roles
at once.

Setting up is below it, resuming in `resuming`, and when to save or stop in `stopping`. Every
process of a run runs all of it: what they share is in `Stage.share` and in the meshes. Evaluation
is deliberately not here yet.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from models import backends
from models.errors import ModelError
from models.execution import Execution
from models.sharding import build_mesh, host_meshes
from models.tokenizer import Tokenizer, load_tokenizer
from models.transformer import Params
from models.weights import load_weights
from spade_jax import designing, measures, processes, resuming, selfplay
from spade_jax.config import Config, to_dict
from spade_jax.curriculum import Curriculum
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import ConfigError, FinishedError
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner, TrainState
from spade_jax.learner.update import make_batches, update
from spade_jax.profiling import traced
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.diversity import embedder
from spade_jax.roles.endpoint import open_endpoint
from spade_jax.roles.memory import Memory
from spade_jax.roles.supply import open_supply
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.stats import EngineStats
from spade_jax.rollout.templates import choose
from spade_jax.stage import Stage
from spade_jax.stopping import Stopped, Watch
from spade_jax.telemetry.bucket import is_url, require_reachable
from spade_jax.telemetry.live import LiveView
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.telemetry.summary import closing, read_metrics, summary
from spade_jax.telemetry.timing import Phases
from spade_jax.types import Design, Episode, Group, Role

logger = logging.getLogger(__name__)


def train(config: Config, *, resume: bool | None = False) -> Path | None:
    """Run self-play to the last step and return the run folder, or its spool if it is in a bucket;
    None if the run was asked to stop before, or has come to its end already.

    Args:
        resume: go on with the run in the folder; None: if there is one that has not come to its
            end.
    """
    with processes.joined(), contextlib.suppress(Stopped), _unless_finished(resume):
        with start_run(config, resume=resume) as run:
            for step in run.remaining_steps():
                designs = run.design(step) if step % config.run.cycle_steps == 0 else []
                with run.phases("play"):
                    episodes = selfplay.play(run.stage, step)
                    scored = selfplay.score(run.stage, episodes, step, flush=run.is_last(step))
                with run.phases("update"):
                    update = run.update(scored.groups, scored.role_weights)
                run.save_episodes(step, episodes)
                run.log(step, measures.all_of(run.stage, designs, episodes, scored) | update)
                run.checkpoint(step)  # last: what is on disk is never behind the newest checkpoint
        return run.finish()
    return None


@contextlib.contextmanager
def _unless_finished(resume: bool | None) -> Iterator[None]:
    """A run that has come to its end is well, unless it was asked for to go on."""
    try:
        yield
    except FinishedError as error:
        if resume is not None:
            raise
        logger.info("%s", error)


@dataclass
class Run:
    """The handles and the moving state of one run."""

    config: Config
    stage: Stage
    learner: Learner
    state: TrainState
    # the frozen starting weights, for the KL or as the designer; None: unused, or those that the
    # state's adapters are added to
    reference: Params | None
    version: int  # updates behind `state`
    played_version: int  # the version that sampled the step's episodes
    first_step: int
    folder: RunFolder
    checkpoints: Checkpoints
    phases: Phases
    view: LiveView
    watch: Watch
    designed: EngineStats = field(default_factory=EngineStats)  # sampling of the step's designs
    # the last step that is done and not in a checkpoint, with the host's state after it
    unsaved: tuple[int, dict[str, Any]] | None = None

    def remaining_steps(self) -> Iterator[int]:
        """Steps not yet in a checkpoint, some of them under the profiler."""
        count = self.config.telemetry.profile_steps if processes.index() == 0 else 0
        steps = range(self.first_step, self.config.run.steps)
        return traced(steps, count, self.folder.path / "profile")

    def is_last(self, step: int) -> bool:
        """Whether pending designer groups must be flushed."""
        return step == self.config.run.steps - 1

    def design(self, step: int) -> list[Design]:
        """Write the next cycle's environments and put every attempt on disk."""
        self.view.status("designing environments")
        with self.phases("design"), self._designer_loaded():
            designs = selfplay.design(self.stage, step)
        self.designed = self.stage.engine_stats()
        for environment in self.stage.curriculum.environments:
            if environment.cycle == step // self.config.run.cycle_steps:
                self.folder.save_environment(environment)
        for design in designs:
            if not design.verdict.admitted:
                self.folder.save_rejected(design)
        self.view.status("playing")
        return designs

    @contextlib.contextmanager
    def _designer_loaded(self) -> Iterator[None]:
        """Sample with the designer's weights meanwhile: a frozen copy costs one more set of weights
        where `learner.reference_memory` puts it.
        """
        if self.config.designer.policy == "initial":
            start = self.state.params if self.reference is None else self.reference
            self.stage.engine.load(self.learner.on_device(start), 0)
        yield
        if self.config.designer.policy == "initial":
            self.stage.engine.load(self.learner.policy(self.state), self.version)

    def update(
        self, groups: Sequence[Group], role_weights: Mapping[Role, float]
    ) -> dict[str, float]:
        """Update on the groups; not when nothing is to be learnt, and the weights stay as they
        are.
        """
        self.played_version = self.version
        batches = make_batches(
            self.learner, groups, self.config.batch, role_weights, policy_version=self.version
        )
        if not batches:
            logger.warning("nothing to learn from in this step: the weights stay as they are")
            # Drops cached keys and values, which a resumed run would not have either.
            self.stage.engine.load(self.learner.policy(self.state), self.version)
            return {}
        self.stage.engine.release()  # the update donates these arrays
        self.state, metrics = update(self.learner, self.state, batches, self.reference)
        self.version = int(self.state.step)
        self.stage.engine.load(self.learner.policy(self.state), self.version)
        return metrics

    def save_episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        """Put the step's episodes on disk."""
        self.folder.save_episodes(step, episodes)

    def checkpoint(self, step: int) -> None:
        """Save everything that moves when that is due, and after the last step.

        Raises:
            Stopped: the run is to stop; then it is saved.
        """
        with self.phases("checkpoint"):
            self.checkpoints.check()
            host = {
                "version": self.version,
                "curriculum": self.stage.curriculum.state(),
                "pool": self.stage.pool.state(),
                "corpus": self.stage.corpus.state(),
                "sandbox": self.stage.pool.sandbox.label,
                "supply": None if self.stage.supply is None else self.stage.supply.state(),
            }
            self.unsaved = step, host  # copies: they may be saved when the next step has begun
            if self.watch.must_save(step) or self.is_last(step):
                self.save()
        if not self.is_last(step) and self.watch.agreed_to_stop():
            raise Stopped

    def save(self) -> None:
        """Begin to write what is not in a checkpoint, when the one before is written.

        The weights are still those after that step: nothing but an update, which comes to the end
        of its step, changes them.
        """
        if self.unsaved is None:
            return
        self._note_checkpoint()
        self.folder.push()  # before it: the newest checkpoint is never ahead of the rest
        step, host = self.unsaved
        self.checkpoints.save(step, self.state, host)
        self.watch.saved()
        self.unsaved = None

    def _note_checkpoint(self) -> None:
        if (newest := self.checkpoints.latest()) is not None:
            self.folder.note_checkpoint(newest)

    def stop(self) -> None:
        """Save where the run stands, and say so."""
        self.save()
        done = self.checkpoints.latest()
        where = (
            "before the first step" if done is None else f"after step {done + 1}, which is saved"
        )
        logger.info("asked to stop: %s; --resume does again what was begun of the next", where)

    def log(self, step: int, metrics: dict[str, int | float]) -> None:
        """Write one line of metrics and show it."""
        played = self.stage.engine_stats()
        line = {
            "progress/step": step,
            "progress/cycle": step // self.config.run.cycle_steps,
            "progress/policy_version": self.played_version,
            **metrics,
            **measures.services(self.config, self.designed + played, self.stage.pool_stats()),
            **measures.waiting(played),
            **self.phases.drain(),
        }
        if self.stage.is_unsafe():
            line["sandbox/unsafe"] = 1
        self.designed = EngineStats()
        self.folder.log(line)
        self.view.show(line)

    def finish(self) -> Path:
        """Write the summary and say where the run is and what changed."""
        self._note_checkpoint()
        moved = self._moved()
        if self.folder.writes:  # in a bucket, the other processes have no metrics to read
            lines = read_metrics(self.folder.path / "metrics.jsonl")
            self.folder.save_summary(summary(lines, moved))
            self.folder.push()
            logger.info("%s", closing(lines, moved, self.folder.name))
        return self.folder.path

    def _moved(self) -> float | None:
        """Relative distance from the starting weights; None when they are no longer there."""
        self.stage.engine.release()
        start, learner = None, self.learner
        try:
            start = load_weights(
                self.config.run.init_from, self.config.model, learner.mesh, learner.execution
            )
        except ModelError as error:
            logger.warning("how far the weights moved is not known: %s", error)
        if processes.agree(start is None) or start is None:
            return None
        return learner.distance(learner.policy(self.state), start)


@contextlib.contextmanager
def start_run(config: Config, *, resume: bool | None) -> Iterator[Run]:
    """Open the run folder, build every part, restore the newest checkpoint if resuming, and close
    all on the way out. A run that is asked to stop saves where it stands.

    Raises:
        ConfigError: the folder holds a run and `resume` is off, or holds a run of another config.
        CheckpointError: no checkpoint of the run can be used.
        Stopped: the run was asked to stop.
    """
    if not config.run.init_from:
        raise ConfigError(
            "run.init_from is empty: expected a folder with a tokenizer and weights, such as "
            "assets/tiny"
        )
    keep_compiled(config.run.compile_cache)
    process = processes.index()
    spool = Path(config.run.spool_dir, f"process_{process}")  # one each: they may share a disk
    folder = RunFolder(config.run.dir, spool=spool, writes=process == 0)
    watch = Watch(config.run.checkpoint_steps, config.run.checkpoint_minutes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(watch.listening(config.run.preemption_url))
        stack.enter_context(folder.locked())
        if resume is None:
            resume = processes.first(folder.saved_config() is not None)
        resuming.check_folder(folder, config, resume=resume)
        resuming.check_processes(folder, config)
        runner = stack.enter_context(asyncio.Runner())
        mesh = build_mesh(**dataclasses.asdict(config.mesh))
        execution = backends.resolve(config.execution, config.model, mesh.devices.flat[0])
        home = folder.path if resume else Path(config.run.init_from)
        tokenizer = load_tokenizer(home)
        sampler_mesh = host_meshes(config.model, mesh)[process]
        stage = make_stage(config, runner, sampler_mesh, execution, tokenizer)
        stage.watch = watch
        stack.callback(lambda: runner.run(stage.close()))
        processes.check_same("corpus", stage.corpus.state())  # of packages or a file on each host
        learner = Learner(config.model, config.learner, mesh, execution=execution)
        checkpoints = stack.enter_context(
            Checkpoints(
                folder.checkpoints,
                config.run.keep_checkpoints,
                resuming.binding(config),
                config.run.keep_every_steps,
            )
        )
        state, version, first_step = resuming.restore(
            config, stage, learner, mesh, checkpoints, folder, resume=resume
        )
        with watch.starting():
            _compile(stage.engine, learner)
        stage.engine.load(learner.policy(state), version)
        # The tokenizer goes along: the run must not depend on a folder that may be made again.
        for name, content in tokenizer.files.items():
            folder.save_file(name, content)
        folder.push()  # first: config.json makes the folder a run's, which then has all it needs
        folder.save_config(to_dict(config))
        folder.push()
        live = config.telemetry.live and process == 0
        view = stack.enter_context(LiveView(config.run.steps, live))
        run = Run(
            config,
            stage,
            learner,
            state,
            _reference(config, learner, mesh),
            version,
            version,
            first_step,
            folder,
            checkpoints,
            Phases(),
            view,
            watch,
        )
        try:
            yield run
        except Stopped:
            run.stop()
            raise


def _compile(engine: Engine, learner: Learner) -> None:
    started = time.perf_counter()
    engine.compile()
    seconds = time.perf_counter() - started
    learner.compile()
    logger.info("compiled %d sampler programs in %.0f s", engine.num_compiles, seconds)


def keep_compiled(folder: str) -> None:
    """Let jax keep compiled programs in a folder, unless it was told one; empty: nowhere.

    Raises:
        SpadeError: the folder is in a bucket that cannot be reached.
    """
    name = "jax_compilation_cache_dir"
    if folder and not is_url(folder):
        folder = str(Path(folder).expanduser())
    kept = jax.config.values[name] or folder
    if is_url(kept):
        require_reachable(kept)  # jax would warn of each program, and keep none
        # jax lets XLA cache what it tuned for GPUs beside it, and XLA can write to no bucket: the
        # first program would fail.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if kept:
        jax.config.update(name, kept)


def make_stage(
    config: Config,
    runner: asyncio.Runner,
    mesh: Mesh,
    execution: Execution,
    tokenizer: Tokenizer,
) -> Stage:
    """Build what self-play needs; the pool is started, and the caller closes it."""
    if tokenizer.vocab_size > config.model.vocab_size:  # a larger embedding has rows to spare
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the tokenizer has "
            f"{tokenizer.vocab_size} pieces; use the tokenizer of these weights, or for new ones "
            f"set --model.vocab-size {tokenizer.vocab_size}"
        )
    chat = Chat(tokenizer, choose(tokenizer, config.run.chat_template))
    for section in (config.designer, config.hint, config.agent):
        chat.with_thinking(section.thinking)  # refuses what the template cannot do
    designing.check(config, chat)
    logger.info("chat template %s, thinking %s", chat.template.name, chat.template.thinks)
    corpus = Corpus.load(config.corpus, config.run.seed, skills=config.designer.skills)
    embedder(config.diversity)  # refuses an encoder that is not there
    limits = Limits(**{f.name: getattr(config.envs, f.name) for f in dataclasses.fields(Limits)})
    supply = open_supply(config.designer, config.run.seed)
    endpoint = open_endpoint(config.designer, config.endpoint)
    pool = Pool(limits, ["rlve"] if config.designer.source == "rlve" else [])
    runner.run(pool.start())
    logger.info("%s", pool.sandbox.line())
    for text in pool.sandbox.warnings():
        logger.warning("sandbox=%s: %s", pool.sandbox.label, text)
    engine = Engine(
        config.model,
        config.engine,
        mesh,
        execution,
        tokenizer=tokenizer,
        deterministic=config.run.deterministic,
    )
    curriculum = Curriculum(Memory(config.memory))
    return Stage(config, engine, pool, chat, corpus, curriculum, runner, supply, endpoint)


def _reference(config: Config, learner: Learner, mesh: Mesh) -> Params | None:
    """The weights the run started from, which the KL is measured from and may be the designer."""
    if not resuming.needs_start(to_dict(config)) or config.learner.lora_rank:
        return None  # the weights that adapters are added to never move
    start = load_weights(config.run.init_from, config.model, mesh, learner.execution)
    return learner.frozen(start)
