"""`spade-jax checkpoints RUN`: lists the checkpoints of a run and verifies every file of them.

It reads, and changes nothing; that a checkpoint fits the program and the config at hand is seen
when the run resumes.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from spade_jax.errors import CheckpointError, StorageError
from spade_jax.learner import manifest
from spade_jax.learner.checkpoint import FORMAT, read_about

DETAILS = f"""\
RUN is the folder of a run, or its URL in a bucket. For each checkpoint are shown
  step     it is of the state after so many steps
  saved    when, in UTC
  size     of all its files
  format   this program reads format {FORMAT}
  config   a digest of the settings that the run is bound to: equal for equal settings
  state    whole: every file is what was written, by its size and checksum (in a bucket, where the
           store itself checks what it reads, by its size)
           damaged: why; a resume passes it over and takes the one before
           set aside: a resume has found it damaged, and the next save removes it
           not finished: a save that is under way or was cut off; it does not count

Exit codes: 0 none is damaged, 1 one is, 2 there is no such run, 75 its bucket does not answer.
"""
HEADER = ("step", "saved", "size", "format", "config", "state")


@dataclass(frozen=True)
class Listed:
    """What is known of a checkpoint."""

    step: int  # steps done, from 1
    saved: float | None  # seconds since 1970; None: it does not say
    num_bytes: int
    format: int | None
    digest: str
    state: str
    damaged: bool

    def cells(self) -> tuple[str, ...]:
        """What the table shows."""
        saved = "-" if self.saved is None else _utc(self.saved)
        version = "-" if self.format is None else str(self.format)
        size = f"{self.num_bytes / 1e6:,.1f} MB"
        return str(self.step), saved, size, version, self.digest or "-", self.state


def checkpoints(run: str) -> int:
    """Print the table; returns the exit code.

    Raises:
        CheckpointError: there is no such folder.
    """
    try:
        root = manifest.open_folder(run)
        if not (run and manifest.is_folder(root) and _is_run(root)):
            inside = root.parent if root.name == "checkpoints" and _is_run(root.parent) else None
            raise CheckpointError(
                f"{run or repr(run)} is not the folder of a run; expected "
                + (f"{inside}" if inside else "one, or its URL")
            )
        found = list(listing(root / "checkpoints"))
    except CheckpointError:
        raise
    except KeyError as error:  # of an URL
        raise CheckpointError(
            f"{run} cannot be read: {error} is no kind of store that is known here; expected a "
            "folder or gs://BUCKET/PATH"
        ) from error
    except Exception as error:  # every cloud's client has its own
        lines = str(error).strip().splitlines() or [""]
        kind = (
            StorageError if "://" in run and not isinstance(error, ImportError) else CheckpointError
        )
        raise kind(
            f"the checkpoints of {run} cannot be listed: {type(error).__name__}: {lines[0][:200]}"
        ) from error
    if not found:
        print(f"{run} has no checkpoint yet")
        return 0
    rows = [HEADER, *(each.cells() for each in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())
    return int(any(each.damaged for each in found))


def _is_run(root: manifest.Folder) -> bool:
    return (root / "config.json").exists() or manifest.is_folder(root / "checkpoints")


def listing(root: manifest.Folder) -> Iterator[Listed]:
    """Look at every checkpoint in a folder, oldest first; those removed meanwhile are left out."""
    for folder in manifest.step_folders(root):
        try:
            with manifest.reaching(folder):
                state, damaged = _state(folder)
                size = manifest.num_bytes(folder)
        except (OSError, ValueError) as error:
            if not folder.exists():
                continue
            state, damaged, size = f"damaged: {error}"[:200], True, 0
        about = read_about(folder)
        yield Listed(
            int(folder.name) + 1,
            _number(about.get("time")),
            size,
            about["format"] if type(about.get("format")) is int else None,
            _digest(about.get("digest")),
            state,
            damaged,
        )


def _state(folder: manifest.Folder) -> tuple[str, bool]:
    if (folder / manifest.SET_ASIDE).exists():
        return "set aside", True
    if not (folder / manifest.FILES).exists():
        return "not finished", False
    problem = manifest.find_damage(folder)
    if problem is None:
        return "whole", False
    if not (folder / manifest.FILES).exists():  # removed while it was read: the run goes on
        return "not finished", False
    return f"damaged: {problem}", True


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def _number(value: Any) -> float | None:
    plausible = isinstance(value, int | float) and 0 <= value < 2**40
    return float(value) if plausible else None


def _digest(value: Any) -> str:
    return value if isinstance(value, str) and value.isalnum() and len(value) <= 64 else ""
