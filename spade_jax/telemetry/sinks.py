"""The run folder: what a run leaves on disk, and how it is cut back to a checkpoint on resume.

    config.json  revision.txt        the resolved configuration and the code it ran with
    metrics.jsonl                    one line a step
    episodes/step_00003.jsonl        the episodes of a step: tokens, text, rewards, outcome
    environments/002/<id>.py .json   admitted programs of a cycle, with verdict and hint
    rejected/002/<id>.py .json       refused designs with the reason; .txt: not a program
    checkpoints/                     Orbax's, and the lists of their files
    checkpointed.txt                 a checkpoint that there has been, by its step
    tokenizer.model (or .json, ...)  the tokenizer of the policy, as its checkpoint had it
    profile/                         what the profiler saw of a few steps, if asked for
    summary.md                       written at the end

It may be in a bucket, as `gs://...`: then `path` is its local spool, and `push` sends it there.

Program text is untrusted: it is written as it is, and every name comes from our ids. Whole files
appear at once (a temporary name, then a rename), so a kill leaves either the old file or the new
one. Metrics and episodes are brought to the disk before a checkpoint (`push`), so that even a lost
machine leaves none that is ahead of them; for all else this guards against a killed process only.
"""

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any

from spade_jax.errors import SpadeError, TransientError
from spade_jax.telemetry import metrics as metric_names
from spade_jax.telemetry.bucket import Bucket, is_url
from spade_jax.types import Design, Environment, Episode, to_json

logger = logging.getLogger(__name__)

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_TEMPORARY = ".tmp"
DEFAULT_SPOOL = "~/.cache/spade_jax/spool"
_LASTING = {
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
"""What is wrong with a path, and not with the disk at the moment."""
_REVISION = Path(__file__).resolve().parents[2] / ".revision"  # left by launch/tpu.sh


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a failure of the disk into one line that names the file and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space, then go on with --resume"
        else:
            remedy = "make it writable or choose another --run.dir"
        kind = SpadeError if error.errno in _LASTING else TransientError
        raise kind(f"cannot write {path}: {error.strerror or error}; {remedy}") from error


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is never seen half-written; its folder is made if missing."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with _writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)  # a full disk should get its space back
            raise


def _json_line(record: Any) -> bytes:
    # ASCII escapes carry any text an environment shows, lone surrogates included.
    return json.dumps(to_json(record), allow_nan=False).encode() + b"\n"


def _json_file(record: Any) -> bytes:
    return json.dumps(to_json(record), indent=2, allow_nan=False).encode() + b"\n"


class JsonlSink:
    """Appends one JSON object a line: `progress/step` first, then the other keys in order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the record; it has left this process when the call returns."""
        names = sorted(record, key=lambda name: (name != "progress/step", name))
        line = _json_line({name: record[name] for name in names})
        with _writing(self.path), self.path.open("ab") as file:
            file.write(line)


def truncate_after(path: Path, step: int) -> None:
    """Cut a JSONL file back to the records whose `progress/step` (or `step`) is at most `step`.

    A last line without its newline is what a kill in mid-write leaves: it is dropped. Kept lines
    stay as they are, byte for byte.
    """
    if not path.exists():
        return
    records = _records(path)
    kept = [line for line, record in records if _step_of(record) <= step]
    if b"".join(kept) != path.read_bytes():
        write_atomic(path, b"".join(kept))


def _step_of(record: Mapping[str, Any]) -> int:
    return record["progress/step"] if "progress/step" in record else record["step"]


def _records(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The whole lines of a JSONL file, each with what it says."""
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            whole = type(_step_of(record)) is int
        except (ValueError, TypeError, KeyError):
            whole = False
        if not whole:
            raise SpadeError(
                f"{path}, line {number}, is damaged ({line[:60]!r}); "
                "expected a JSON object with a step: mend or remove the line, then resume"
            )
        records.append((line, record))
    return records


def code_revision() -> str:
    """Return the git revision of the code, `-dirty` if changed since; `unknown` without git.

    Of code that was copied to a machine without its git, the copy says it.
    """
    if _REVISION.is_file():
        return _REVISION.read_text(errors="replace").strip()[:100]
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except OSError:  # no git on this machine
        return "unknown"
    return result.stdout.strip() if result.returncode == 0 else "unknown"


def _file_name(identifier: str) -> str:
    if not _ID.fullmatch(identifier):
        raise ValueError(
            f"{identifier!r} cannot name a file; expected letters, digits, '_', '-' and '.'"
        )
    return identifier


class RunFolder:
    """The run folder as drawn above. Opening it makes the folder and changes nothing in it.

    `path` is a local folder, and `name` what the user calls it: of a folder in a bucket, its URL.
    What the run has written since it was opened is only sure to be in the process that `writes`: in
    a bucket, each process has a spool of its own.
    """

    def __init__(
        self, path: str | Path, *, spool: str | Path = DEFAULT_SPOOL, writes: bool = True
    ) -> None:
        """Open a run folder.

        Args:
            spool: the local folder that holds the spools of run folders in buckets.
            writes: of several processes with one run folder, one writes; to the others this is
                False, and what they are told to write is left out.
        """
        self._bucket = None
        if is_url(path):
            home = Path(spool).expanduser().absolute()
            self.path = home / str(path).rstrip("/").replace("://", "/")
            self._bucket = Bucket(str(path), self.path)
        else:
            self.path = Path(path).expanduser().absolute()
        self.name = self._bucket.url if self._bucket else str(self.path)
        self.writes = writes
        self._metrics = JsonlSink(self.path / "metrics.jsonl")
        self._unsynced: set[Path] = set()
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        for name in ("checkpoints", "episodes", "environments", "rejected"):
            if (self.path / name).exists() and not (self.path / name).is_dir():
                raise SpadeError(f"{self.path / name} is not a folder; move it out of the way")
        for path in (self._metrics.path, self.path / "config.json"):
            if path.is_dir():
                raise SpadeError(f"{path} is a folder; a file is expected: move it out of the way")

    @property
    def checkpoints(self) -> PurePath:
        """Where Orbax writes the checkpoints: a local folder, or one in the bucket."""
        return self._bucket.checkpoints if self._bucket else self.path / "checkpoints"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs of this machine out while in the block. A run folder in a bucket is
        brought here first.

        Raises:
            TransientError: another run is in it.
        """
        if not self.writes and self._bucket is None:  # the process that writes has the lock
            yield
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise TransientError(
                f"{self.name} is in use by another run; wait for its end or choose another "
                "--run.dir"
            ) from error
        except OSError:  # some network file systems have no locks; the run need not fail for it
            logger.warning("%s cannot be locked: start no second run in it", self.path)
        try:
            if self._bucket:
                self._bucket.pull()
            yield
        finally:
            with suppress(OSError):  # already closed
                os.close(descriptor)

    def push(self) -> None:
        """Bring what is new to the bucket, if the run folder is in one, or else what a resume needs
        of it to the disk; return when it is there.
        """
        if self._bucket and self.writes:
            self._bucket.push()
        elif self.writes:
            for path in sorted(self._unsynced | {path.parent for path in self._unsynced}):
                with _writing(path):
                    _sync(path)
        self._unsynced = set()

    def logged_steps(self) -> list[Any]:
        """The steps that have a whole line of metrics, in the order of the lines."""
        if not self._metrics.path.exists():
            return []
        records = _records(self._metrics.path)
        needed = {"progress/step", "progress/cycle", "time/step_s"}
        return [record["progress/step"] for _, record in records if needed <= record.keys()]

    def saved_config(self) -> dict[str, Any] | None:
        """Return the configuration of the run in this folder, or None when there is none."""
        path = self.path / "config.json"
        if not path.exists():
            return None
        try:
            saved = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise SpadeError(
                f"{path} is damaged ({error}); expected JSON: choose another --run.dir"
            ) from error
        if not isinstance(saved, dict) or not all(isinstance(v, dict) for v in saved.values()):
            raise SpadeError(
                f"{path} is damaged: expected an object with one object a section, got "
                f"{str(saved)[:60]!r}; choose another --run.dir"
            )
        return saved

    def foreign_files(self) -> list[str]:
        """Names in the folder that no run put there, as far as a start that failed would."""
        if self._bucket:
            return self._bucket.listing()  # where there are no empty folders
        checkpoints = self.path / "checkpoints"
        started = [checkpoints] if checkpoints.is_dir() and not any(checkpoints.iterdir()) else []
        return sorted(path.name for path in self.path.iterdir() if path not in started)

    def save_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved configuration, and beside it the revision of the code."""
        self.save_file("revision.txt", f"{code_revision()}\n".encode())
        self.save_file("config.json", _json_file(config))

    def save_file(self, name: str, data: bytes) -> None:
        """Write one whole file; `name` is relative to the run folder."""
        if self.writes:
            write_atomic(self.path / name, data)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one step's metrics, after checking their names and values."""
        checked = metric_names.check(metrics)
        if self.writes:
            self._metrics.write(checked)
            self._unsynced.add(self._metrics.path)

    def save_episodes(self, step: int, episodes: Sequence[Episode]) -> None:
        """Write all episodes of a step, one a line."""
        data = b"".join(_json_line(episode) for episode in episodes)
        name = f"episodes/step_{step:05d}.jsonl"
        self.save_file(name, data)
        if self.writes:
            self._unsynced.add(self.path / name)

    def save_environment(self, environment: Environment) -> None:
        """Write an admitted program and, beside it, all that is known about it."""
        name = _file_name(environment.environment_id)
        path = f"environments/{environment.cycle:03d}/{name}"
        record = to_json(environment)
        program = record["source"].pop("program")
        self.save_file(f"{path}.py", _text(program))
        self.save_file(f"{path}.json", _json_file({"environment_id": name, **record}))

    def save_rejected(self, design: Design) -> None:
        """Write what a refused design proposed and, beside it, which gate refused it and why."""
        path = f"rejected/{design.cycle:03d}/{_file_name(design.design_id)}"
        record = to_json(design)
        for written_elsewhere in ("trajectory", "source", "completion"):
            del record[written_elsewhere]
        if design.source is None:
            self.save_file(f"{path}.txt", _text(design.completion))
        else:
            self.save_file(f"{path}.py", _text(design.source.program))
        self.save_file(f"{path}.json", _json_file(record))

    def note_checkpoint(self, step: int) -> None:
        """Remember that there is a checkpoint: without any, the run then lost them."""
        self.save_file("checkpointed.txt", f"{step}\n".encode())

    def had_checkpoint(self) -> bool:
        """Whether a checkpoint was there when a later save began, or the run ended."""
        return (self.path / "checkpointed.txt").exists()

    def has_summary(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "summary.md").exists()

    def save_summary(self, text: str) -> None:
        """Write the summary of the run, in Markdown."""
        self.save_file("summary.md", text.encode())

    def cut(self, step: int, cycle: int) -> None:
        """Drop all that is later than the last step and cycle to keep (-1 keeps none).

        Checkpoints are left alone. Running it again, also after a kill in its middle, gives the
        same folder.
        """
        if not self.writes:
            return
        if self._bucket:
            self._cut_bucket(self._bucket, step, cycle)
        with _writing(self.path):
            for temporary in self.path.glob(f"**/*{_TEMPORARY}"):
                if self.path / "checkpoints" not in temporary.parents:
                    temporary.unlink()
            (self.path / "summary.md").unlink(missing_ok=True)  # it told of the steps that go
            truncate_after(self._metrics.path, step)
            for file in self.path.glob("episodes/step_*.jsonl"):
                if _number(file.stem.removeprefix("step_")) > step:
                    file.unlink()
            for kind in ("environments", "rejected"):
                for folder in self.path.glob(f"{kind}/*"):
                    if _number(folder.name) > cycle:
                        shutil.rmtree(folder)

    def _cut_bucket(self, bucket: Bucket, step: int, cycle: int) -> None:
        """The same for what is in the bucket; of its metrics the next `push` sends what is kept."""
        bucket.remove("summary.md")
        for name in bucket.listing("episodes"):
            if _number(name.removeprefix("step_").removesuffix(".jsonl")) > step:
                bucket.remove(f"episodes/{name}")
        for kind in ("environments", "rejected"):
            for name in bucket.listing(kind):
                if _number(name) > cycle:
                    bucket.remove(f"{kind}/{name}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _text(text: str) -> bytes:
    # Bytes, so that no newline changes and the file still has the hash it is named after. A lone
    # surrogate has no bytes and is shown escaped.
    return text.encode("utf-8", "backslashreplace")


def _number(name: str) -> int:
    # What somebody else put here has no number of ours and stays.
    return int(name) if name.isdecimal() else -1
