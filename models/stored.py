"""Folders of converted weights: one Orbax checkpoint for each layer, one for what is around them.

    DST/config.json             our config
        hf_config.json          the public config.json, for the way back
        tokenizer.json ...      the tokenizer's files as they came
        files.json              size and CRC-32 of every file below
        weights/outer           Orbax: embedding, final_norm, head
        weights/blocks.0 ...    Orbax: the parameters of one layer

A layer is written, and read onto its devices, before the next one: no tensor of all layers ever
exists. Each parameter keeps the dtype it came with. A folder is made under another name and renamed
when all of it is on disk. Saving while training is `spade_jax.learner.checkpoint`.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
import orbax.checkpoint as ocp

from models import tensors
from models.config import CONFIG_FILE, TransformerConfig
from models.errors import ModelError
from models.json_file import read_json

WEIGHTS = "weights"
FILES = "files.json"
HF_CONFIG = "hf_config.json"
CHUNK_BYTES = 64 * 2**20  # of a stored array: what a reader of one shard decodes at least
REMOVE_SECONDS = 3  # how long a folder that is no longer wanted is removed again and again
IN_FLIGHT_GB = 1  # what Orbax may hold for writing at a time


def is_stored(folder: str | Path) -> bool:
    """Whether a folder holds converted weights."""
    return (Path(folder) / WEIGHTS).is_dir()


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `target` on success, and is removed otherwise.

    What a killed process left behind is removed first; a process that still writes is left alone.
    """
    partial = target.with_name(f".{target.name}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = _take(target)
    except OSError as error:
        raise ModelError(f"{target} cannot be made ({error}); name another folder") from error
    with lock:
        try:
            _remove(partial)
            partial.mkdir()
            yield partial
            if target.exists():
                raise FileExistsError(f"{target} has appeared in the meantime")
            partial.rename(target)
            sync(target.parent)
        except OSError as error:
            raise ModelError(
                f"{target} cannot be written ({error}); free some space or name another folder"
            ) from error
        finally:
            _remove(partial)
            Path(lock.name).unlink(missing_ok=True)


def _take(target: Path) -> BinaryIO:
    """Return the lock file of a folder, held by this process alone."""
    path = target.with_name(f".{target.name}.lock")
    while True:
        lock = path.open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who held it before may have removed it since: then the name is free for another one.
            if path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                return lock
        except BlockingIOError as error:
            lock.close()
            raise ModelError(
                f"{target} is being written by another process; wait for it"
            ) from error
        except FileNotFoundError:  # removed just now
            pass
        lock.close()


def _remove(folder: Path) -> None:
    """Remove a folder; after a failure Orbax's threads may still write there for a moment."""
    until = time.monotonic() + REMOVE_SECONDS
    while os.path.lexists(folder):
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > until:
            break
        time.sleep(0.05)


def write_group(folder: Path, name: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write one group of parameters, given by dotted names, as an Orbax checkpoint."""
    needed = sum(array.nbytes for array in arrays.values())
    if needed > shutil.disk_usage(folder).free:  # Orbax's threads would fill it before they fail
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / WEIGHTS / name))
    tree = _nested(arrays)
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), tree)
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(
                folder.resolve() / WEIGHTS / name,
                args=ocp.args.PyTreeSave(tree, save_args=save_args),
            )
    except Exception as error:  # Orbax raises bare Exception, among others
        raise ModelError(
            f"{folder / WEIGHTS / name} cannot be written ({_first_line(error)}); free some space "
            "or name another folder"
        ) from error


def finish(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the config and the checksums of all files, and bring it all to the disk."""
    for name, values in ((FILES, file_sums(folder)), (CONFIG_FILE, config)):
        (folder / name).write_text(json.dumps(values, indent=2) + "\n")
    flush(folder)


def file_sums(folder: Path) -> dict[str, list[int]]:
    """Return size and CRC-32 of every file below a folder, by its relative path."""
    return {
        path.relative_to(folder).as_posix(): [path.stat().st_size, file_crc(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def file_crc(path: Path) -> int:
    """Return the CRC-32 of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(2**22):
            total = zlib.crc32(block, total)
    return total


def flush(folder: Path) -> None:
    """Bring a folder to the disk, so that a name it is given later stands for all of it."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)


def check_files(folder: Path) -> None:
    """Refuse a folder one of whose files is not what was written: it would be other weights."""
    try:
        sums = read_json(folder / FILES)
        there = {
            path.relative_to(folder).as_posix()
            for path in (folder / WEIGHTS).rglob("*")
            if path.is_file()
        }
        if unknown := sorted(there - sums.keys()):
            raise ModelError(
                f"{FILES} of {folder} does not name {unknown[0]}; convert the checkpoint again"
            )
        for name, (size, checksum) in sums.items():
            path = folder / name
            if path.stat().st_size != size or file_crc(path) != checksum:
                raise ModelError(f"{path} is damaged; convert the checkpoint again")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder} is not a whole folder of converted weights ({_first_line(error)}); convert "
            "the checkpoint again"
        ) from error


def check_group(folder: Path, config: TransformerConfig, name: str) -> dict[str, np.dtype]:
    """Return the stored dtypes of a group, whose names and shapes must be those of the config."""
    try:
        with _checkpointer() as checkpointer:
            metadata = checkpointer.metadata(folder.resolve() / WEIGHTS / name)
        leaves = jax.tree_util.tree_leaves_with_path(metadata.item_metadata.tree)
        found = {_dotted(path): (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in leaves}
    except Exception as error:  # Orbax raises bare Exception, among others
        raise _unreadable(folder, name, error) from error
    shapes = {key: shape for key, (shape, _) in found.items()}
    expected = {tensor.name: tensor.shape for tensor in tensors.group(config, name)}
    if shapes != expected:
        differing = [
            f"{key} is {shapes.get(key, 'absent')} there and {expected.get(key, 'absent')} here"
            for key in sorted(shapes.keys() | expected.keys())
            if shapes.get(key) != expected.get(key)
        ]
        raise ModelError(
            f"{folder / WEIGHTS / name} is of another model than {CONFIG_FILE}: "
            f"{'; '.join(differing[:3])}; convert the checkpoint again"
        )
    return {key: dtype for key, (_, dtype) in found.items()}


def read_group(
    folder: Path, name: str, targets: Mapping[str, jax.ShapeDtypeStruct | None]
) -> dict[str, Any]:
    """Read a group onto the shardings and dtypes of `targets`; None gives a numpy array as stored.

    The names must be those of the group.
    """
    restore_args = {
        key: ocp.RestoreArgs(restore_type=np.ndarray)
        if target is None
        else ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype
        )
        for key, target in targets.items()
    }
    try:
        with _checkpointer() as checkpointer:
            tree = checkpointer.restore(
                folder.resolve() / WEIGHTS / name,
                args=ocp.args.PyTreeRestore(restore_args=_nested(restore_args)),
            )
    except Exception as error:  # Orbax raises bare Exception, among others
        raise _unreadable(folder, name, error) from error
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _checkpointer() -> ocp.Checkpointer:
    logging.getLogger("absl").setLevel(
        logging.CRITICAL + 1
    )  # it reports every phase; errors are raised
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(save_concurrent_gb=IN_FLIGHT_GB))


def _unreadable(folder: Path, name: str, error: Exception) -> ModelError:
    return ModelError(
        f"{folder / WEIGHTS / name} cannot be read ({_first_line(error)}); convert the checkpoint "
        "again"
    )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: BaseException) -> str:
    """What a library's long, many-line message is about."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
