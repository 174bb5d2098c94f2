"""Orbax checkpoints: the train state with its shardings, the host's state, and whose run they are.

A save returns when its arrays are off the device and goes on in a thread, one at a time; what it
meets there is raised by the next call. A checkpoint counts once its list of files is there
(`manifest`), which is written last, when all the rest is on the disk, and only then are older
checkpoints removed: a save that is cut off leaves those before it, and its leftovers go with the
next save. Every file is verified before Orbax reads it, since a damaged chunk of an array would
otherwise restore as wrong weights; of a damaged checkpoint the one before is restored, said in the
log. They are on a file system that all processes share, or in a bucket (`gs://...`). When to save,
and what the host dictionary holds, are the caller's.

    <folder>/<step>/state        arrays per layer, named by their path in an unrolled TrainState
                    host.json    the caller's dictionary
                    about.json   format version, time, the caller's metadata and its digest, each
                                 array's shape
                    files.json   see `manifest`
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from models import layout
from spade_jax import processes
from spade_jax.errors import CheckpointError, StorageError
from spade_jax.learner import manifest
from spade_jax.learner.step import TrainState

logger = logging.getLogger(__name__)

FORMAT = 3
STATE, HOST, ABOUT = "state", "host.json", "about.json"
_ABSENT = object()


class DamagedCheckpointError(CheckpointError):
    """What is stored is not what was written."""


class Checkpoints:
    """The checkpoints of one run. Close it, or use it in a `with` block: both wait for the save
    under way.
    """

    def __init__(
        self, folder: str | PurePath, keep: int, metadata: Mapping[str, Any], keep_every: int = 0
    ) -> None:
        """Open or create `folder`.

        Args:
            keep: newest ones kept.
            metadata: JSON-able description of the run, such as its config; a checkpoint with
                another one is refused.
            keep_every: older ones kept too: those after every so many steps (0: none).
        """
        self._folder = manifest.open_folder(folder)
        self._keep, self._keep_every = keep, keep_every
        self._metadata = json.loads(json.dumps(metadata))
        # It reports every phase of every save, and pages of what is raised as an error.
        logging.getLogger("absl").setLevel(logging.CRITICAL + 1)
        _ignore_late_writes()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except Exception as error:  # every cloud's client has its own
            kind = StorageError if manifest.in_bucket(self._folder) else CheckpointError
            raise kind(
                f"cannot open the checkpoint folder {self._folder}: {_first_line(error)}"
            ) from error
        self._orbax = ocp.AsyncCheckpointer(
            ocp.StandardCheckpointHandler(),
            # A folder that cannot be written is then refused before the arrays' threads meet it.
            async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
            checkpoint_metadata_store=ocp.metadata.metadata_store(
                enable_write=True, blocking_write=True
            ),
        )
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError as unsaved:
            if error is None:
                raise
            logger.error("%s", unsaved)  # what ends the run already is not hidden by it

    def close(self) -> None:
        """Wait for the save under way and release Orbax's resources."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            with contextlib.suppress(Exception):  # it tells again of what `wait` has raised
                self._orbax.close()

    def steps(self) -> list[int]:
        """Complete checkpoints, oldest first; the save under way is waited for."""
        self.wait()
        return manifest.whole_steps(self._folder)

    def latest(self) -> int | None:
        """Newest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: TrainState, host: Mapping[str, Any]) -> None:
        """Begin one checkpoint; when this returns, `state` may be donated and `host` changed.

        `host` must be JSON-able, with text as keys; its floats keep every bit.

        Raises:
            StorageError: it cannot be begun, or the save before this one has failed.
        """
        if step in self.steps():
            raise CheckpointError(
                f"checkpoint {step} already exists in {self._folder}; remove it to write it again"
            )
        arrays = _named(layout.stored(state))
        about = {
            "format": FORMAT,
            "time": time.time(),
            "digest": digest(self._metadata),
            "metadata": self._metadata,
            "arrays": _describe(arrays),
        }
        texts = {HOST: json.dumps(host), ABOUT: json.dumps(about)}
        folder = self._folder / str(step)
        try:
            if jax.process_index() == 0:
                for left in manifest.step_folders(self._folder):
                    if not (left / manifest.FILES).exists():
                        manifest.remove(left)
            self._check_space(step, sum(array.nbytes for array in arrays.values()))
            self._orbax.save(folder / STATE, args=ocp.args.StandardSave(arrays))
        except CheckpointError:
            raise
        except Exception as error:  # Orbax raises bare Exception, among others
            raise self._unwritten(step, error) from error
        self._saving = self._thread.submit(self._finish, step, texts)

    def _finish(self, step: int, texts: Mapping[str, str]) -> None:
        """In the thread: wait for the arrays, write the rest, and let older checkpoints go."""
        folder = self._folder / str(step)
        try:
            self._orbax.wait_until_finished()
            if jax.process_index():
                return
            for name, text in texts.items():
                (folder / name).write_text(text)
            manifest.commit(folder)
            kept = manifest.whole_steps(self._folder)
            for old in kept[: -self._keep]:
                if not self._keep_every or (old + 1) % self._keep_every:
                    manifest.remove(self._folder / str(old))
        except Exception as error:  # Orbax raises bare Exception, among others
            raise self._unwritten(step, error) from error

    def wait(self) -> None:
        """Return when the save under way, if any, is on the disk.

        Raises:
            StorageError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def check(self) -> None:
        """Raise what the save under way met, if it has ended."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def restore(
        self, abstract_state: TrainState, step: int | None = None
    ) -> tuple[int, TrainState, dict[str, Any]]:
        """Read a checkpoint onto the shardings of `abstract_state`.

        Args:
            step: None takes the newest that is not damaged; damaged ones after it no longer count.

        Several processes take what process 0 finds, and each verifies a share of its files.
        """
        steps = processes.first(self.steps())
        if not steps or step not in (None, *steps):
            which = "no checkpoint" if step is None else f"no checkpoint {step}"
            raise CheckpointError(f"{which} in {self._folder}; it holds {steps or 'none'}")
        if step is not None:
            return self._restore(step, abstract_state)
        damaged: list[tuple[int, DamagedCheckpointError]] = []
        for tried in reversed(steps):
            try:
                found = self._restore(tried, abstract_state)
            except DamagedCheckpointError as error:
                damaged.append((tried, error))
                continue
            for newer, error in damaged:
                logger.warning("%s; the one before is used, of step %d", error, tried + 1)
                self._set_aside(newer)
            return found
        _, first = damaged[0]
        others = f", and so are the {len(damaged) - 1} before it" if damaged[1:] else ""
        raise CheckpointError(f"{first}{others}; start the run again in another run.dir")

    def _restore(
        self, step: int, abstract_state: TrainState
    ) -> tuple[int, TrainState, dict[str, Any]]:
        folder = self._folder / str(step)
        shares = processes.exchange(manifest.find_damage(folder, processes.dealt))
        problem = next((found for found in shares if found is not None), None)
        if problem is not None:
            raise DamagedCheckpointError(f"{self._where(step)} is damaged: {problem}")
        with manifest.reaching(folder):
            about = read_about(folder)
        self._check_about(step, about)
        wanted_state = layout.per_layer(abstract_state)
        arrays = _named(wanted_state)
        _check_arrays(self._where(step), about["arrays"], _describe(arrays))
        try:
            found = self._orbax.restore(folder / STATE, args=ocp.args.StandardRestore(arrays))
            host = json.loads((folder / HOST).read_text())
        except Exception as error:  # Orbax raises bare Exception, among others
            if manifest.in_bucket(folder):  # every object is there, and the store checks them
                raise StorageError(
                    f"{self._where(step)} cannot be read: {_first_line(error)}; when the bucket "
                    "answers, go on with --resume"
                ) from error
            # Of several processes the others may have read it: none goes back to another alone.
            kind = DamagedCheckpointError if processes.count() == 1 else CheckpointError
            raise kind(f"{self._where(step)} is damaged: {_first_line(error)}") from error
        leaves = [found.pop(name) for name in arrays]
        state = jax.tree.unflatten(jax.tree.structure(wanted_state), leaves)
        return step, layout.restored(state, abstract_state), host

    def _set_aside(self, step: int) -> None:
        if jax.process_index():
            return
        try:
            manifest.set_aside(self._folder / str(step))
        except Exception as error:  # every cloud's client has its own
            raise StorageError(
                f"{self._where(step)} is damaged and cannot be set aside: {_first_line(error)}; "
                "remove it, then go on with --resume"
            ) from error

    def _check_space(self, step: int, num_bytes: int) -> None:
        """Refuse before Orbax meets a full disk, of which its threads tell in pages."""
        if not isinstance(self._folder, Path):  # a bucket does not fill up
            return
        free = shutil.disk_usage(self._folder).free
        if free < num_bytes:
            raise StorageError(
                f"cannot write checkpoint {step} in {self._folder}: it has {num_bytes} bytes and "
                f"the disk has {free} left; free some disk space, then go on with --resume"
            )

    def _unwritten(self, step: int, error: Exception) -> StorageError:
        """What became of a save; on a full disk what it has written is in the way of all else."""
        if jax.process_index() == 0:
            with contextlib.suppress(Exception):  # it does not count, and the next save removes it
                self._clear_away(self._folder / str(step))
        full = os.strerror(errno.ENOSPC) in str(error)  # somewhere in Orbax's pages
        reason = os.strerror(errno.ENOSPC) if full else _first_line(error)
        writable = "see that this machine may write to the bucket"
        remedy = writable if manifest.in_bucket(self._folder) else "free some disk space"
        return StorageError(
            f"cannot write checkpoint {step} in {self._folder}: {reason}; "
            f"{remedy}, then go on with --resume"
        )

    def _clear_away(self, folder: manifest.Folder) -> None:
        """Remove a failed save, into which Orbax's threads may still write for a moment."""
        for _ in range(20):
            manifest.remove(folder)
            time.sleep(0.1)
            if not folder.exists():
                return

    def _where(self, step: int) -> str:
        return f"checkpoint {self._folder / str(step)}"

    def _check_about(self, step: int, about: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another format or another run, naming up to five differences."""
        if about.get("format") != FORMAT:
            raise CheckpointError(
                f"{self._where(step)} has format {about.get('format', 'unknown')}, this program "
                f"reads format {FORMAT}; use the version of the program that wrote it"
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


@functools.cache
def _ignore_late_writes() -> None:
    """Let writes that go on after the first that failed be silent: Orbax has closed the event loop
    they report to, and each would print a traceback over the one error that is raised.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        late = isinstance(unraisable.exc_value, RuntimeError)
        if not (late and str(unraisable.exc_value) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook


def digest(metadata: Mapping[str, Any]) -> str:
    """Short name of what a run is bound to: equal for equal settings."""
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_about(folder: manifest.Folder) -> dict[str, Any]:
    """What a checkpoint says about itself; nothing where another format said it elsewhere."""
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError, RecursionError) as error:
        if manifest.is_unanswered(folder, error):
            raise
        return {}
    return about if isinstance(about, dict) else {}


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
