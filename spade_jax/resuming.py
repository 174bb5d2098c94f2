"""Going on with a run: what its folder must hold, what may have changed, and what is taken back.

The checkpoints themselves are `learner.checkpoint`; when they are written is the loop's.
"""

import logging
from typing import Any

from jax.sharding import Mesh

from models.tokenizer.base import FILES as TOKENIZER_FILES
from models.weights import load_weights
from spade_jax import processes
from spade_jax.config import Config, to_dict
from spade_jax.errors import CheckpointError, ConfigError, FinishedError
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner, TrainState
from spade_jax.stage import Stage
from spade_jax.telemetry.sinks import RunFolder

logger = logging.getLogger(__name__)

FREE_FIELDS = (
    "run.dir",
    "run.spool_dir",
    "run.init_from",
    "run.steps",
    "run.checkpoint_steps",
    "run.checkpoint_minutes",
    "run.keep_checkpoints",
    "run.keep_every_steps",
    "run.compile_cache",
    "run.preemption_url",
    "mesh.data",
    "mesh.fsdp",
    "mesh.expert",
    "mesh.tensor",
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
`mesh` and `execution`, `batch.device_tokens` and `learner.head_tokens` change the order of sums and
so the last bits, as another device would. `run.init_from` is not among them where its weights are
kept frozen (`needs_start`).
"""

_OF_ITS_MACHINE = {
    "run.spool_dir",
    "run.compile_cache",
    "run.preemption_url",
    "corpus.cache_dir",
    "telemetry.live",
}
"""Settings that may differ between the processes of a run."""

_BEGUN = {*TOKENIZER_FILES, "revision.txt", "config.json"}
"""What a start that is killed leaves before `config.json` makes its folder a run's."""


def check_folder(folder: RunFolder, config: Config, *, resume: bool) -> None:
    """Refuse a folder that is another run's; a start that fails later leaves it free."""
    saved = folder.saved_config()
    where = f"run.dir={folder.name!r}"
    if saved is None:
        if resume:
            raise ConfigError(f"--resume: {where} holds no run; leave --resume out to start one")
        names = [name for name in folder.foreign_files() if name.removesuffix(".tmp") not in _BEGUN]
        if names:
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


def check_processes(folder: RunFolder, config: Config) -> None:
    """Refuse processes that are not of one run, once all of them have looked at its folder."""
    fields = _fields(to_dict(config)).items()
    shared = {name: value for name, value in fields if name not in _OF_ITS_MACHINE}
    processes.check_same("config", shared)
    if folder.checkpoints == folder.path / "checkpoints":  # not in a bucket
        processes.check_shared(folder.path, f"run.dir={folder.name!r}")


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{name}": value
        for section, fields in config.items()
        for name, value in fields.items()
    }


def _binding_fields(config: dict[str, Any]) -> dict[str, Any]:
    free = set(FREE_FIELDS)
    if needs_start(config):
        free.remove("run.init_from")
    return {
        name: value
        for name, value in _fields(config).items()
        if not name.startswith("warmstart.") and name not in free
    }


def needs_start(config: dict[str, Any]) -> bool:
    """Whether the starting weights are needed after the start: for a KL, or as the designer."""
    initial = config.get("designer", {}).get("policy") == "initial"
    return initial or bool(config.get("learner", {}).get("kl_coef"))


def binding(config: Config) -> dict[str, Any]:
    """The settings that a checkpoint is bound to, by their dotted names."""
    return _binding_fields(to_dict(config))


def restore(
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
    if not resume or processes.first(checkpoints.latest()) is None:
        if resume:
            _check_steps(folder, None)
            folder.cut(-1, -1)
        start = load_weights(config.run.init_from, config.model, mesh, learner.execution)
        return learner.init(start), 0, 0
    step, state, host = checkpoints.restore(learner.abstract_state())
    finished = step + 1 >= config.run.steps
    if finished and processes.first(folder.has_summary()):
        raise FinishedError(
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


def _check_steps(folder: RunFolder, newest: int | None) -> None:
    """Refuse to go on from checkpoint `newest` where that would lose or lack logged steps."""
    logged = folder.logged_steps()
    if newest is None:
        if folder.had_checkpoint():
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
