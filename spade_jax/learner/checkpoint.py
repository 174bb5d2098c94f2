"""Orbax checkpoints: the train state with its shardings, the host's state, and whose run they are.

A step's folder appears under its final name only when all of it is on disk, so a killed save leaves
the previous checkpoint as the newest; its leftovers are removed before the next save.
Every file's checksum is verified before Orbax reads it: a damaged chunk of an array would otherwise
restore as wrong weights, or fail inside Orbax in pages of traceback. Saves are synchronous, to a
file system that all processes share, or to a bucket (`gs://...`): there the store keeps a checksum
of each object and checks it on every read, so none is kept here, and Orbax marks a step as complete
with a file in it. When to save, and what the host dictionary holds, are the caller's.

    <folder>/<step>/state        arrays per layer, named by their path in an unrolled TrainState
                    host         JSON: the caller's dictionary
                    about        JSON: format version, the caller's metadata, each array's shape
                    files.json   size and CRC-32 of every file above; written last, so it is absent
                                 after a kill at that very moment, and then nothing is verified;
                                 not in a bucket
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint.checkpoint_managers import preservation_policy

from models import layout
from models.stored import file_crc, file_sums
from spade_jax.errors import CheckpointError
from spade_jax.learner.step import TrainState

FORMAT = 2
_FILES = "files.json"
_ABSENT = object()


class Checkpoints:
    """The checkpoints of one run, newest `keep` kept. Close it, or use it in a `with` block."""

    def __init__(self, folder: str | PurePath, keep: int, metadata: Mapping[str, Any]) -> None:
        """Open or create `folder`.

        Args:
            metadata: JSON-able description of the run, such as its config; a checkpoint with
                another one is refused.
        """
        self._in_bucket = "://" in str(folder)
        self._folder = (
            epath.Path(folder) if self._in_bucket else Path(folder).expanduser().resolve()
        )
        self._metadata = json.loads(json.dumps(metadata))
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every phase of every save
        options = ocp.CheckpointManagerOptions(
            preservation_policy=preservation_policy.LatestN(keep),
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            save_root_metadata=False,
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:  # Orbax raises bare Exception, among others
            raise CheckpointError(
                f"cannot open the checkpoint folder {self._folder}: {_first_line(error)}"
            ) from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release Orbax's resources."""
        self._manager.close()

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: TrainState, host: Mapping[str, Any]) -> None:
        """Write one checkpoint, and return when it is on disk.

        `host` must be JSON-able, with text as keys; its floats keep every bit.
        """
        arrays = _named(layout.stored(state))
        about = {"format": FORMAT, "metadata": self._metadata, "arrays": _describe(arrays)}
        if step in self.steps():
            raise CheckpointError(
                f"checkpoint {step} already exists in {self._folder}; remove it to write it again"
            )
        self._check_space(step, sum(array.nbytes for array in arrays.values()))
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    host=ocp.args.JsonSave(host),
                    about=ocp.args.JsonSave(about),
                ),
            )
            if jax.process_index() == 0 and not self._in_bucket:
                _write_checksums(Path(self._folder / str(step)))
        except Exception as error:  # Orbax raises bare Exception, among others
            full = os.strerror(errno.ENOSPC) in str(error)  # somewhere in Orbax's pages
            reason = os.strerror(errno.ENOSPC) if full else _first_line(error)
            writable = "see that this machine may write to the bucket"
            remedy = writable if self._in_bucket else "free some disk space"
            raise CheckpointError(
                f"cannot write checkpoint {step} in {self._folder}: {reason}; "
                f"{remedy}, then go on with --resume"
            ) from error

    def restore(
        self, abstract_state: TrainState, step: int | None = None
    ) -> tuple[int, TrainState, dict[str, Any]]:
        """Read a checkpoint (None: the newest) onto the shardings of `abstract_state`."""
        steps = self.steps()
        wanted = self.latest() if step is None else step
        if wanted is None or wanted not in steps:
            which = "no checkpoint" if wanted is None else f"no checkpoint {wanted}"
            raise CheckpointError(f"{which} in {self._folder}; it holds {steps or 'none'}")
        if not self._in_bucket:
            problem = find_damage(Path(self._folder / str(wanted)))
            if problem is not None:
                raise self._damaged(wanted, problem)
        about = self._read(wanted, about=ocp.args.JsonRestore())["about"]
        self._check_about(wanted, about)
        wanted_state = layout.per_layer(abstract_state)
        arrays = _named(wanted_state)
        _check_arrays(self._where(wanted), about["arrays"], _describe(arrays))
        found = self._read(
            wanted, state=ocp.args.StandardRestore(arrays), host=ocp.args.JsonRestore()
        )
        leaves = [found["state"].pop(name) for name in arrays]
        state = jax.tree.unflatten(jax.tree.structure(wanted_state), leaves)
        return wanted, layout.restored(state, abstract_state), found["host"]

    def _check_space(self, step: int, num_bytes: int) -> None:
        """Refuse before Orbax meets a full disk, of which its threads tell in pages."""
        if self._in_bucket:  # which does not fill up
            return
        free = shutil.disk_usage(self._folder).free
        if free < num_bytes:
            raise CheckpointError(
                f"cannot write checkpoint {step} in {self._folder}: it has {num_bytes} bytes and "
                f"the disk has {free} left; free some disk space, then go on with --resume"
            )

    def _where(self, step: int) -> str:
        return f"checkpoint {self._folder / str(step)}"

    def _read(self, step: int, **items: Any) -> Any:
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises bare Exception, among others
            raise self._damaged(step, _first_line(error)) from error

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        others = [other for other in self.steps() if other != step]
        advice = (
            f"remove it to resume from {max(others)}"
            if others
            else "start the run again in another run.dir"
        )
        return CheckpointError(f"{self._where(step)} is damaged: {reason}; {advice}")

    def _check_about(self, step: int, about: Any) -> None:
        """Refuse a checkpoint of another format or another run, naming up to five differences."""
        version = about.get("format") if isinstance(about, dict) else None
        if version != FORMAT:
            raise CheckpointError(
                f"{self._where(step)} has format {version}, this program reads format {FORMAT}; "
                "use the version of the program that wrote it"
            )
        theirs, ours = _flatten(about["metadata"]), _flatten(self._metadata)
        differences = [
            f"{name} is {theirs.get(name, 'absent')!r} there and {ours.get(name, 'absent')!r} here"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name, _ABSENT) != ours.get(name, _ABSENT)
        ]
        if differences:
            raise CheckpointError(
                f"{self._where(step)} is of another run: {_some(differences)}; "
                "restore those settings or choose another run.dir"
            )


def _named(tree: TrainState) -> dict[str, Any]:
    """Flatten to dotted names, such as `params.embedding.value`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves share a name"
    return named


def _describe(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"shape": list(array.shape), "dtype": str(array.dtype)}
        for name, array in arrays.items()
    }


def _write_checksums(folder: Path) -> None:
    """List every file of a finished checkpoint."""
    partial = folder / f"{_FILES}.partial"
    partial.write_text(json.dumps(file_sums(folder)))
    os.replace(partial, folder / _FILES)


def find_damage(folder: Path) -> str | None:
    """Say which file is not what was written; None when all are, or no list was written."""
    try:
        files = json.loads((folder / _FILES).read_text())
        for name, (size, checksum) in files.items():
            found = (folder / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes instead of {size}"
            if file_crc(folder / name) != checksum:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        missing = Path(error.filename).relative_to(folder).as_posix()
        return None if missing == _FILES else f"{missing} is missing"
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"{_FILES} cannot be used ({_first_line(error)})"
    return None


def _check_arrays(where: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose arrays are not those of the model and optimiser at hand."""

    def say(entry: Any) -> str:
        return f"{entry['dtype']}{entry['shape']}" if entry else "absent"

    differences = [
        f"{name} is {say(theirs.get(name))} there and {say(ours.get(name))} here"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]
    if differences:
        raise CheckpointError(
            f"{where} is of another model: {_some(differences)}; "
            "restore the model and learner settings it was made with"
        )


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dictionaries as dotted keys."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {
        key: leaf
        for part in value
        for key, leaf in _flatten(value[part], f"{name}.{part}" if name else part).items()
    }


def _some(differences: list[str], most: int = 5) -> str:
    more = f" and {len(differences) - most} more" if len(differences) > most else ""
    return "; ".join(differences[:most]) + more


def _first_line(error: BaseException) -> str:
    """What a library's long, many-line message is about."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
