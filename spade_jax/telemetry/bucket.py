"""A run folder in a bucket: what is written goes into a local spool, and from there to the bucket.

The bucket is the truth. Opening a run empties the spool and brings the files at the top of the run
folder (config, tokenizer, metrics); the folders in it (episodes, environments, a profile) go one
way, and leave the spool once they are in the bucket, so a long run does not fill the local disk.
Objects appear whole or not at all. The checkpoints are not touched: Orbax writes them to the bucket
itself. Nothing here keeps two machines out of one bucket folder: buckets have no locks.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from etils import epath

from spade_jax.errors import SpadeError, TransientError

_UPLOADS_AT_ONCE = 8
_CHECKPOINTS = "checkpoints"


def is_url(path: str | Path) -> bool:
    """Whether a run folder is in a bucket."""
    return "://" in str(path)


def require_reachable(url: str) -> None:
    """Refuse a folder in a bucket that cannot be read; one that is not there yet is none the less
    a good one.

    Raises:
        SpadeError: says why.
    """
    Bucket(url, Path()).listing()


class Bucket:
    """The folder of one run in a bucket, and the local folder that is its spool."""

    def __init__(self, url: str, spool: Path) -> None:
        self.url = url.rstrip("/")
        self.spool = spool
        self._root = epath.Path(self.url)
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of change of files at the top

    @property
    def checkpoints(self) -> epath.Path:
        """Where Orbax writes."""
        return self._root / _CHECKPOINTS

    def listing(self, folder: str = "") -> list[str]:
        """Names of the files and folders in a folder of the run; none when there is no such."""
        with self._reaching(folder):
            try:
                return sorted(path.name for path in (self._root / folder).iterdir() if path.name)
            except FileNotFoundError:
                return []

    def pull(self) -> None:
        """Make the spool what the bucket says: its files at the top, and nothing else."""
        for path in self.spool.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._sent = {}
        for name in self.listing():
            with self._reaching(name):
                if _is_folder(self._root / name):
                    continue
                (self.spool / name).write_bytes((self._root / name).read_bytes())
            self._sent[name] = _state(self.spool / name)

    def push(self) -> None:
        """Send what is new or has changed since the last time; return when it is in the bucket."""
        files = [path for path in sorted(self.spool.rglob("*")) if path.is_file()]
        changed = [path for path in files if self._sent.get(self._name(path)) != _state(path)]
        with ThreadPoolExecutor(_UPLOADS_AT_ONCE) as uploads:
            list(uploads.map(self._send, changed))

    def remove(self, name: str) -> None:
        """Remove a file or a whole folder from the bucket; one that is not there is no error."""
        with self._reaching(name):
            path = self._root / name
            if _is_folder(path):
                path.rmtree(missing_ok=True)
            else:
                path.unlink(missing_ok=True)

    def _send(self, path: Path) -> None:
        name, state = self._name(path), _state(path)
        with self._reaching(name):
            target = self._root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # In one piece: a stream that breaks off would leave an object cut short.
            target.write_bytes(path.read_bytes())
        if path.parent == self.spool:
            self._sent[name] = state
        else:
            path.unlink()

    def _name(self, path: Path) -> str:
        return path.relative_to(self.spool).as_posix()

    @contextmanager
    def _reaching(self, name: str) -> Iterator[None]:
        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except ImportError as error:
            raise SpadeError(
                f"{where} cannot be opened: {error}; install the extra `gcs` for gs:// "
                "(pip install -c requirements.txt -e '.[gcs]'), or s3fs for s3://"
            ) from error
        except FileNotFoundError:
            raise
        except Exception as error:  # every cloud's client has its own
            lines = str(error).strip().splitlines() or [""]
            raise TransientError(
                f"cannot reach {where}: {type(error).__name__}: {lines[0][:200]}; see that the "
                "bucket exists and this machine may write to it, then go on with --resume"
            ) from error


def _is_folder(path: epath.Path) -> bool:
    """Whether a folder is there; `is_dir` would take a bucket's silence for a no."""
    try:
        return path.stat().is_directory
    except FileNotFoundError:
        return False


def _state(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
