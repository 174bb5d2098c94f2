"""THE LOOP: design, play, score, update, load, save. One step is one optimiser update on both roles
at once.

Setting up and resuming are below it. Evaluation, several processes and asynchronous saving are
deliberately not here yet.
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
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from models import backends
from models.errors import ModelError
from models.execution import Execution
from models.sharding import build_mesh
from models.tokenizer import Tokenizer, load_tokenizer
from models.transformer import Params
from models.weights import load_weights
from spade_jax import designing, measures, selfplay
from spade_jax.config import Config, to_dict
from spade_jax.curriculum import Curriculum
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.tier import UNSAFE
from spade_jax.errors import CheckpointError, ConfigError
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
from spade_jax.telemetry.live import LiveView
from spade_jax.telemetry.sinks import RunFolder
from spade_jax.telemetry.summary import closing, read_metrics, summary
from spade_jax.telemetry.timing import Phases
from spade_jax.types import Design, Episode, Group, Role

logger = logging.getLogger(__name__)

FREE_FIELDS = (
    "run.dir",
    "run.spool_dir",
    "run.init_from",
    "run.steps",
    "run.checkpoint_steps",
    "run.keep_checkpoints",
    "run.compile_cache",
    "execution.layers",
    "execution.attention",
    "execution.remat",
    "execution.experts",
    "execution.transport",
    "batch.device_tokens",
    "learner.head_tokens",
    "learner.max_skipped",
    "learner.optimizer_memory",
    "learner.reference_memory",
    "endpoint.url",
    "endpoint.key_env",
    "endpoint.timeout_s",
    "endpoint.retries",
    "endpoint.backoff_s",
    "endpoint.concurrency",
    "envs.unsafe_sandbox",
    "corpus.cache_dir",
    "telemetry.live",
    "telemetry.profile_steps",
)
"""Settings that may differ on resume, and the section `warmstart`: no step depends on them.

`run.steps` only moves the end, at which designer groups that still wait are trained on. Those of
`execution`, `batch.device_tokens` and `learner.head_tokens` change the order of sums and so the
last bits, as another device would. `run.init_from` is not among them where its weights are kept
frozen (`_needs_start`).
"""


def train(config: Config, *, resume: bool | None = False) -> Path:
    """Run self-play to the last step and return the run folder, or its spool if it is in a bucket.

    Args:
        resume: go on with the run in the folder; None: if there is one.
    """
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
    designed: EngineStats = field(default_factory=EngineStats)  # sampling of the step's designs

    def remaining_steps(self) -> Iterator[int]:
        """Steps not yet in a checkpoint, some of them under the profiler."""
        count = self.config.telemetry.profile_steps if jax.process_index() == 0 else 0
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
        self.designed = self.stage.engine.stats()
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
        """Save everything that moves, every `run.checkpoint_steps` and after the last step."""
        if (step + 1) % self.config.run.checkpoint_steps and not self.is_last(step):
            return
        with self.phases("checkpoint"):
            host = {
                "version": self.version,
                "curriculum": self.stage.curriculum.state(),
                "pool": self.stage.pool.state(),
                "corpus": self.stage.corpus.state(),
                "sandbox": self.stage.pool.sandbox.label,
                "supply": None if self.stage.supply is None else self.stage.supply.state(),
            }
            self.folder.push()  # before it: the newest checkpoint is never ahead of the rest
            self.checkpoints.save(step, self.state, host)

    def log(self, step: int, metrics: dict[str, int | float]) -> None:
        """Write one line of metrics and show it."""
        played = self.stage.engine.stats()
        line = {
            "progress/step": step,
            "progress/cycle": step // self.config.run.cycle_steps,
            "progress/policy_version": self.played_version,
            **metrics,
            **measures.services(self.config, self.designed + played, self.stage.pool.stats()),
            **measures.waiting(played),
            **self.phases.drain(),
        }
        if self.stage.pool.sandbox.label == UNSAFE:
            line["sandbox/unsafe"] = 1
        self.designed = EngineStats()
        self.folder.log(line)
        self.view.show(line)

    def finish(self) -> Path:
        """Write the summary and say where the run is and what changed."""
        moved = self._moved()
        lines = read_metrics(self.folder.path / "metrics.jsonl")
        self.folder.save_summary(summary(lines, moved))
        self.folder.push()
        logger.info("%s", closing(lines, moved, self.folder.name))
        return self.folder.path

    def _moved(self) -> float | None:
        """Relative distance from the starting weights; None when they are no longer there."""
        try:
            start = load_weights(
                self.config.run.init_from, self.config.model, execution=self.learner.execution
            )
        except ModelError as error:
            logger.warning("how far the weights moved is not known: %s", error)
            return None
        found = jax.device_get(self.learner.policy(self.state))
        difference = jax.tree.map(jnp.subtract, found, start)
        return float(optax.global_norm(difference) / optax.global_norm(start))


@contextlib.contextmanager
def start_run(config: Config, *, resume: bool | None) -> Iterator[Run]:
    """Open the run folder, build every part, restore the newest checkpoint if resuming, and close
    all on the way out.

    Raises:
        ConfigError: the folder holds a run and `resume` is off, or holds a run of another config.
        CheckpointError: the newest checkpoint cannot be used.
    """
    if not config.run.init_from:
        raise ConfigError(
            "run.init_from is empty: expected a folder with a tokenizer and weights, such as "
            "assets/tiny"
        )
    keep_compiled(config.run.compile_cache)
    process = jax.process_index()
    spool = Path(config.run.spool_dir, f"process_{process}")  # one each: they may share a disk
    folder = RunFolder(config.run.dir, spool=spool, writes=process == 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.locked())
        if resume is None:
            resume = folder.saved_config() is not None
        _check_folder(folder, config, resume=resume)
        runner = stack.enter_context(asyncio.Runner())
        mesh = build_mesh(**dataclasses.asdict(config.mesh))
        execution = backends.resolve(config.execution, config.model, mesh.devices.flat[0])
        home = folder.path if resume else Path(config.run.init_from)
        tokenizer = load_tokenizer(home)
        stage = make_stage(config, runner, mesh, execution, tokenizer)
        stack.callback(lambda: runner.run(stage.close()))
        learner = Learner(config.model, config.learner, mesh, execution=execution)
        checkpoints = stack.enter_context(
            Checkpoints(folder.checkpoints, config.run.keep_checkpoints, _binding(config))
        )
        state, version, first_step = _restore(
            config, stage, learner, mesh, checkpoints, folder, resume=resume
        )
        started = time.perf_counter()
        stage.engine.compile()
        logger.info(
            "compiled %d sampler programs in %.0f s",
            stage.engine.num_compiles,
            time.perf_counter() - started,
        )
        stage.engine.load(learner.policy(state), version)
        # The tokenizer goes along: the run must not depend on a folder that may be made again.
        for name, content in tokenizer.files.items():
            folder.save_file(name, content)
        folder.save_config(to_dict(config))
        folder.push()
        view = stack.enter_context(LiveView(config.run.steps, config.telemetry.live))
        yield Run(
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
        )


def keep_compiled(folder: str) -> None:
    """Let jax keep compiled programs in a folder, unless it was told one; empty: nowhere."""
    name = "jax_compilation_cache_dir"
    if folder and not jax.config.values[name]:
        jax.config.update(name, str(Path(folder).expanduser()))


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


def _check_folder(folder: RunFolder, config: Config, *, resume: bool) -> None:
    """Refuse a folder that is another run's; a start that fails later leaves it free."""
    saved = folder.saved_config()
    where = f"run.dir={folder.name!r}"
    if saved is None:
        if resume:
            raise ConfigError(f"--resume: {where} holds no run; leave --resume out to start one")
        if names := folder.foreign_files():
            raise ConfigError(
                f"{where} is not empty ({', '.join(names[:3])}); a run needs a folder of its own: "
                "choose another --run.dir"
            )
        return
    if not resume:
        raise ConfigError(
            f"{where} already holds a run; continue it with --resume or choose another --run.dir"
        )
    there, here = _binding_fields(saved), _binding_fields(to_dict(config))
    names = sorted(there.keys() | here.keys())
    different = [name for name in names if there.get(name) != here.get(name)]
    if different:
        name = different[0]
        raise ConfigError(
            f"{where} holds a run of another config: {name} is {there.get(name)!r} there and "
            f"{here.get(name)!r} here ({len(different)} differ); resume with the same options or "
            "choose another --run.dir"
        )


def _binding_fields(config: dict[str, Any]) -> dict[str, Any]:
    free = set(FREE_FIELDS)
    if _needs_start(config):
        free.remove("run.init_from")
    return {
        f"{section}.{name}": value
        for section, fields in config.items()
        for name, value in fields.items()
        if section != "warmstart" and f"{section}.{name}" not in free
    }


def _needs_start(config: dict[str, Any]) -> bool:
    """Whether the starting weights are needed after the start: for a KL, or as the designer."""
    initial = config.get("designer", {}).get("policy") == "initial"
    return initial or bool(config.get("learner", {}).get("kl_coef"))


def _binding(config: Config) -> dict[str, Any]:
    return _binding_fields(to_dict(config))


def _restore(
    config: Config,
    stage: Stage,
    learner: Learner,
    mesh: Mesh,
    checkpoints: Checkpoints,
    folder: RunFolder,
    *,
    resume: bool,
) -> tuple[TrainState, int, int]:
    """State, policy version and first step; a resume cuts the run folder to the checkpoint."""
    if not resume or checkpoints.latest() is None:
        if resume:
            _check_steps(folder, None)
            folder.cut(-1, -1)
        start = load_weights(config.run.init_from, config.model, mesh, learner.execution)
        return learner.init(start), 0, 0
    step, state, host = checkpoints.restore(learner.abstract_state())
    finished = step + 1 >= config.run.steps
    if finished and folder.has_summary():
        raise CheckpointError(
            f"{folder.name} is finished: its checkpoint is of step {step + 1} of "
            f"run.steps={config.run.steps}; raise --run.steps to go on"
        )
    _check_steps(folder, step)
    try:
        stage.curriculum.restore(host["curriculum"])
        stage.pool.restore(host["pool"])
        stage.corpus.restore(host["corpus"])
        if stage.supply is not None:
            stage.supply.restore(host["supply"])
        version = int(host["version"])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {step} in {folder.checkpoints} is damaged: its host state lacks or "
            f"misstates {error}; remove it to resume from an older one"
        ) from error
    folder.cut(step, step // config.run.cycle_steps)
    logger.info("resuming after step %d from %s", step + 1, folder.checkpoints)
    return state, version, step + 1


def _reference(config: Config, learner: Learner, mesh: Mesh) -> Params | None:
    """The weights the run started from, which the KL is measured from and may be the designer."""
    if not _needs_start(to_dict(config)) or config.learner.lora_rank:
        return None  # the weights that adapters are added to never move
    start = load_weights(config.run.init_from, config.model, mesh, learner.execution)
    return learner.frozen(start)


def _check_steps(folder: RunFolder, newest: int | None) -> None:
    """Refuse to go on from checkpoint `newest` where that would lose or lack logged steps."""
    logged = folder.logged_steps()
    if newest is None:
        saved = folder.saved_config() or {}
        unsaved = saved.get("run", {}).get("checkpoint_steps", 1)
        if len(logged) > unsaved:
            raise CheckpointError(
                f"{folder.name} has metrics of {len(logged)} steps but no checkpoint; put "
                f"{folder.checkpoints} back, or start again in another run.dir"
            )
    elif logged[: newest + 1] != list(range(newest + 1)):
        raise CheckpointError(
            f"{folder.name}/metrics.jsonl has whole lines of the steps {logged[:20]}, but the "
            f"checkpoint is of step {newest}; put the missing lines back, or start again in "
            "another run.dir"
        )
