"""The list of a checkpoint's files: it makes the checkpoint count, and tells damage from none.

    <root>/<step>/files.json   size and CRC-32 of every other file in the folder; written last

A step's folder without it is a save that is under way or was cut off, and is no checkpoint. It goes
first when a checkpoint is removed. Where checkpoints are in a bucket the store itself keeps a
checksum of each object and checks it on every read, so there the list has sizes alone. What the
files hold is `checkpoint`'s.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path, PurePath
from typing import Any

from etils import epath

from models.stored import file_crc, flush, sync
from spade_jax.errors import StorageError

FILES = "files.json"
SET_ASIDE = "files.json.damaged"
_AT_ONCE = 16  # files looked at: zlib and the store's client let other threads run

Folder = Path | epath.Path
"""A local folder, or one in a bucket."""


def open_folder(path: str | PurePath) -> Folder:
    """The folder that a path or a URL names; nothing is made."""
    return epath.Path(path) if "://" in str(path) else Path(path).expanduser().resolve()


def in_bucket(folder: Folder) -> bool:
    """Whether a folder is in a bucket."""
    return "://" in str(folder)


def is_folder(path: Folder) -> bool:
    """Whether a folder is there. A bucket's own `is_dir` takes silence for a no."""
    if isinstance(path, Path):
        return path.is_dir()
    try:
        return path.stat().is_directory
    except FileNotFoundError:
        return False


def is_unanswered(folder: Folder, error: Exception) -> bool:
    """Whether an error is a bucket's that did not answer, which says nothing of what it holds."""
    unread = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return unread and in_bucket(folder)


@contextmanager
def reaching(folder: Folder) -> Iterator[None]:
    """Make what a bucket's client raises when it does not answer one clear error.

    Raises:
        StorageError: says so.
    """
    try:
        yield
    except (FileNotFoundError, ImportError):  # an answer, and no client to ask
        raise
    except Exception as error:  # every cloud's client has its own
        if not in_bucket(folder):
            raise
        lines = str(error).strip().splitlines() or [""]
        raise StorageError(
            f"cannot reach {folder}: {type(error).__name__}: {lines[0][:200]}; when the bucket "
            "answers, go on with --resume"
        ) from error


def step_folders(root: Folder) -> list[Folder]:
    """The folders of steps, complete or not, oldest first."""
    try:
        found = [folder for folder in root.iterdir() if _is_step(folder.name) and is_folder(folder)]
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda folder: int(folder.name))


def whole_steps(root: Folder) -> list[int]:
    """The steps of which there is a checkpoint, oldest first."""
    with reaching(root):
        return [int(folder.name) for folder in step_folders(root) if (folder / FILES).exists()]


def commit(folder: Folder) -> None:
    """Make a folder a checkpoint. Its files are on the disk before the list that speaks of them."""
    text = json.dumps(dict(_each(_look, folder, _names(folder))))
    if not isinstance(folder, Path):
        (folder / FILES).write_text(text)  # objects appear whole
        return
    partial = folder / f"{FILES}.partial"
    partial.write_text(text)
    flush(folder)
    os.replace(partial, folder / FILES)
    for renamed_in in (folder, folder.parent):
        sync(renamed_in)


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 16 and str(int(name)) == name


def find_damage(
    folder: Folder, share: Callable[[Sequence[str]], Sequence[str]] = lambda names: names
) -> str | None:
    """Say which file is not what was written; None when all are, of those that `share` picks.

    Raises:
        StorageError: the bucket does not answer.
    """
    with reaching(folder):
        return _find_damage(folder, share)


def _find_damage(folder: Folder, share: Callable[[Sequence[str]], Sequence[str]]) -> str | None:
    try:
        files = json.loads((folder / FILES).read_bytes())
    except FileNotFoundError:
        return f"{FILES} is missing"
    except (OSError, ValueError, RecursionError) as error:
        if is_unanswered(folder, error):
            raise
        return f"{FILES} cannot be read"
    if not files or not isinstance(files, dict) or not all(starmap(_is_entry, files.items())):
        return f"{FILES} is no list of files"
    names = share(sorted(files))
    looked = _each(lambda folder, name: _differs(folder, name, *files[name]), folder, names)
    return next((problem for _, problem in looked if problem is not None), None)


def _is_entry(name: str, about: Any) -> bool:
    """Whether a file below the folder is named, with its size and perhaps a checksum."""
    inside = ".." not in PurePath(name).parts and not PurePath(name).is_absolute()
    return (
        inside
        and isinstance(about, list)
        and [type(each) for each in about]
        in (
            [int, int],
            [int, type(None)],
        )
    )


def num_bytes(folder: Folder) -> int:
    """What a folder takes."""

    def size(folder: Folder, name: str) -> int:
        path = folder / name
        return path.lstat().st_size if isinstance(path, Path) else _size(path)

    return sum(size for _, size in _each(size, folder, _names(folder)))


def set_aside(folder: Folder) -> None:
    """Let a damaged checkpoint no longer count; the next save removes it."""
    (folder / SET_ASIDE).write_bytes((folder / FILES).read_bytes())
    (folder / FILES).unlink()


def remove(folder: Folder) -> None:
    """Remove a checkpoint, or what a save left; half removed it does not count."""
    (folder / FILES).unlink(missing_ok=True)
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        folder.rmtree(missing_ok=True)


def _names(folder: Folder) -> list[str]:
    """The files below a folder but the list itself."""
    found = [path.relative_to(folder).as_posix() for path in _walk(folder)]
    return sorted(name for name in found if not name.startswith(FILES))


def _walk(folder: Folder) -> Iterator[Folder]:
    for path in folder.iterdir():
        # A link to a folder is no part of a checkpoint, and may lead anywhere.
        if is_folder(path) and not (isinstance(path, Path) and path.is_symlink()):
            yield from _walk(path)
        else:
            yield path


def _each(
    function: Callable[[Folder, str], Any], folder: Folder, names: Iterable[str]
) -> list[tuple[str, Any]]:
    names = list(names)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = threads.map(lambda name: function(folder, name), names)
        return list(zip(names, found, strict=True))


def _size(path: Folder) -> int:
    return path.stat().st_size if isinstance(path, Path) else path.stat().length


def _look(folder: Folder, name: str) -> tuple[int, int | None]:
    path = folder / name
    return _size(path), file_crc(path) if isinstance(path, Path) else None


def _differs(folder: Folder, name: str, size: int, checksum: int | None) -> str | None:
    path, name = folder / name, name[:200]
    try:
        found = _size(path)
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
        if isinstance(path, Path) and file_crc(path) != checksum:
            return f"{name} does not match its checksum"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        if is_unanswered(folder, error):
            raise
        return f"{name} cannot be read ({error.strerror or error})"
    except ValueError:  # no name that a file can have
        return f"{name!r} cannot be read"
    return None
