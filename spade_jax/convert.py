"""`spade-jax convert`: public checkpoints to weights that `train` starts from, and back; a run's
newest checkpoint to either.

What is read and written is in `models.convert`; here is what the command line means by it, and
reading the parameters, and nothing else, from a run's checkpoint.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp

from models import convert as checkpoints
from models import stored, tensors
from models.config import TransformerConfig, from_dict
from spade_jax.errors import CheckpointError
from spade_jax.learner import lora
from spade_jax.learner.manifest import find_damage, whole_steps
from spade_jax.telemetry.sinks import RunFolder

logger = logging.getLogger(__name__)

Form = Literal["orbax", "hf"]


def convert(
    source: Path,
    target: Path,
    *,
    to: Form = "orbax",
    dtype: str | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Convert a checkpoint.

    Args:
        tokenizer: a folder to take the tokenizer from; None takes the source's.
    """
    try:
        config = _convert(source, target, to, dtype, tokenizer)
    except OSError as error:  # a folder without rights, a name too long, a disk gone
        raise CheckpointError(
            f"{source} cannot be converted to {target} ({error}); give it its rights, or name "
            "other folders"
        ) from error
    counts = [math.prod(tensor.shape) for tensor in tensors.all_tensors(config)]
    form = "Hugging Face" if to == "hf" else "Orbax"
    logger.info("%s: %s, %s parameters, %s", target, config.family, f"{sum(counts):,}", form)
    if to == "orbax":
        logger.info("train from it with --run.init-from %s", target)


def _convert(
    source: Path, target: Path, to: Form, dtype: str | None, tokenizer: Path | None
) -> TransformerConfig:
    checkpoints.check_paths(source, target)
    run = run_of(source)
    if run is not None or to == "hf":
        weights = checkpoints.StoredWeights(source) if run is None else RunWeights(run)
        write = checkpoints.export_checkpoint if to == "hf" else checkpoints.store
        home = tokenizer or (source if run is None else _home(run))
        write(weights, weights.config, home, target, dtype=dtype)
        return weights.config
    return checkpoints.import_checkpoint(source, target, dtype=dtype, tokenizer=tokenizer)


class RunWeights:
    """The parameters in the newest checkpoint of a run."""

    def __init__(self, run: RunFolder) -> None:
        folder = run.path / "checkpoints"
        steps = whole_steps(folder)
        if not steps:
            raise CheckpointError(f"{run.path} has no checkpoint yet; let the run save one")
        self._step = folder / str(max(steps))
        self.where = str(self._step)
        if (problem := find_damage(self._step)) is not None:
            raise CheckpointError(f"checkpoint {self._step} is damaged: {problem}")
        saved = run.saved_config() or {}
        self.config = from_dict(saved.get("model"), run.path / "config.json")
        try:
            with _checkpointer() as checkpointer:
                tree = checkpointer.metadata(self._step / "state").item_metadata.tree
            self._found = {name: np.dtype(leaf.dtype) for name, leaf in tree.items()}
        except Exception as error:  # Orbax raises bare Exception, among others
            raise self._unreadable(error) from error
        self._scale = _adapter_scale(saved.get("learner"), run.path / "config.json")
        logger.info("the newest checkpoint of %s is of step %d", run.path, max(steps) + 1)

    def dtypes(self, group: str) -> dict[str, np.dtype]:
        """Return the dtypes of a group."""
        try:
            return {
                tensor.name: self._found[_stored_name(group, tensor.name)]
                for tensor in tensors.group(self.config, group)
            }
        except KeyError as error:
            raise CheckpointError(
                f"checkpoint {self._step} lacks {error.args[0]}; it is of another model than its "
                "run's config.json"
            ) from error

    def read(self, group: str) -> dict[str, np.ndarray]:
        """Return a group in host memory, adapters merged."""
        how = ocp.RestoreArgs(restore_type=np.ndarray)
        return self._restore(group, lambda _: how)

    def read_onto(
        self, group: str, targets: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Return a group on the shardings and in the dtypes of `targets`, adapters merged."""
        if self._scale:  # merged on the host
            return {
                name: jax.device_put(array.astype(targets[name].dtype), targets[name].sharding)
                for name, array in self.read(group).items()
            }
        return self._restore(
            group,
            lambda name: ocp.ArrayRestoreArgs(
                sharding=targets[name].sharding, dtype=targets[name].dtype
            ),
        )

    def _restore(self, group: str, how_to: Callable[[str], ocp.RestoreArgs]) -> dict[str, Any]:
        self.dtypes(group)  # refuses a checkpoint that lacks some
        names = {
            tensor.name: _stored_name(group, tensor.name)
            for tensor in tensors.group(self.config, group)
        }
        pairs = {
            name: pair
            for name in names
            if (pair := tuple(f"adapters.{group}.{name}.{part}.value" for part in "ab"))[0]
            in self._found
        }
        adapters = [name for pair in pairs.values() for name in pair]
        wanted: dict[str, Any] = dict.fromkeys([*names.values(), *adapters], 0)
        how = {stored_name: how_to(name) for name, stored_name in names.items()}
        how |= {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in adapters}
        try:
            with _checkpointer() as checkpointer:
                found = checkpointer.restore(
                    self._step / "state",
                    args=ocp.args.PyTreeRestore(wanted, restore_args=how, partial_restore=True),
                )
        except Exception as error:  # Orbax raises bare Exception, among others
            raise self._unreadable(error) from error
        arrays = {name: found[path] for name, path in names.items()}
        for tensor in tensors.group(self.config, group):
            if arrays[tensor.name].shape != tensor.shape:
                raise CheckpointError(
                    f"checkpoint {self._step}: {names[tensor.name]} has shape "
                    f"{arrays[tensor.name].shape}, but the run's config asks for {tensor.shape}"
                )
        for name, (a, b) in pairs.items():
            inputs = lora.EVERY[tuple(name.split("."))].inputs
            added = self._scale * lora.product(found[a], found[b], inputs)
            arrays[name] = arrays[name] + added.astype(arrays[name].dtype)
        return arrays

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self._step} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
            "remove its folder to take the one before"
        )


def _adapter_scale(learner: Any, where: Path) -> float:
    """What the adapters of a run, if it has any, were multiplied by."""
    if not isinstance(learner, dict) or not learner.get("lora_rank"):
        return 0.0
    try:
        return float(learner["lora_alpha"]) / int(learner["lora_rank"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: learner.lora_alpha and learner.lora_rank cannot be read ({error}); restore "
            "the file"
        ) from error


def _stored_name(group: str, name: str) -> str:
    prefix = "params." if group == tensors.OUTER else f"params.{group}."
    return f"{prefix}{name}.value"


def _checkpointer() -> ocp.Checkpointer:
    logging.getLogger("absl").setLevel(logging.CRITICAL + 1)  # what is wrong is told by an error
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def run_of(source: Path) -> RunFolder | None:
    """Return the run in a folder that holds one."""
    if not (source / "checkpoints").is_dir() or stored.is_stored(source):
        return None
    return RunFolder(source.resolve())


def _home(run: RunFolder) -> Path:
    """Return the folder of a run's tokenizer: the run's, or else what it started from.

    The public config.json is in the latter.
    """
    start = ((run.saved_config() or {}).get("run") or {}).get("init_from")
    if isinstance(start, str) and os.path.isfile(Path(start) / stored.HF_CONFIG):
        return Path(start)
    return run.path
