"""The embedded corpus as a TFDS dataset in ArrayRecord files: prepared once, no TensorFlow.

Importing this module imports TFDS, so only `corpus` does, and only when the embedded corpus is
asked for. A dataset folder appears by one rename when it is complete; a lock lets one process
prepare while the others wait for the result.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import platform
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from google.protobuf.json_format import ParseError

from spade_jax.errors import CorpusError
from spade_jax.roles import docstrings


@dataclass
class DocstringConfig(tfds.core.BuilderConfig):
    """Which packages, in which versions."""

    packages: tuple[str, ...] = ()


class Docstrings(tfds.core.GeneratorBasedBuilder):
    """One example per public callable of the packages: its dotted name and cleaned docstring."""

    # To be raised when `docstrings` changes what it finds or keeps.
    VERSION = tfds.core.Version("1.0.0")
    # Nothing is downloaded, so TFDS need not look for checksums beside the code; the look-up would
    # import `importlib_resources`, which TFDS does not install.
    code_path: Any = None

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {"title": tfds.features.Text(), "text": tfds.features.Text()}
        )
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        config = self.builder_config
        assert isinstance(config, DocstringConfig)
        return {"train": self._generate_examples(config.packages)}

    def _generate_examples(self, packages: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
        for title, text in docstrings.extract(packages):
            yield title, {"title": title, "text": text}


def load(packages: Sequence[str], cache_dir: Path) -> list[tuple[str, str]]:
    """Return (title, text) of every docstring, sorted by title; prepare them first if need be."""
    for package in packages:
        docstrings.require_installed(package)
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _quiet():
            config = _config(packages)
            if not Docstrings(data_dir=str(cache_dir), config=config).data_path.exists():
                with open(cache_dir / "lock", "w") as lock:
                    # The system lets go of it when the process dies.
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    _prepare(Docstrings(data_dir=str(cache_dir), config=config))
            # A builder reads what is on disk when it is made, so this one is made last.
            builder: Any = Docstrings(data_dir=str(cache_dir), config=config)
            source = builder.as_data_source(split="train")
            return sorted((row["title"].decode(), row["text"].decode()) for row in source)
    except (OSError, RuntimeError, ValueError, ParseError) as error:
        # RuntimeError is how ArrayRecord reports files and disks, ParseError how TFDS reports its
        # own description of the dataset.
        raise CorpusError(
            f"the embedded corpus cannot be kept in corpus.cache_dir={cache_dir} ({error}); delete "
            "that folder if it is damaged, or name one that can be written and has 20 MB free"
        ) from error


def _prepare(builder: Docstrings) -> None:
    """Write the dataset unless another process has in the meantime; the caller holds the lock."""
    if builder.data_path.exists():
        return
    # What a killed preparation left.
    for leftover in builder.data_path.parent.glob("incomplete.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    builder.download_and_prepare(
        file_format="array_record",
        download_config=tfds.download.DownloadConfig(
            try_download_gcs=False, register_checksums=False
        ),
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what TFDS prints, logs and draws."""
    absl_logger = logging.getLogger("absl")
    level = absl_logger.level
    tfds.disable_progress_bar()
    absl_logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        absl_logger.setLevel(level)


def _config(packages: Sequence[str]) -> DocstringConfig:
    """Name the dataset by its packages and, in a digest, by what decides their docstrings."""
    versions = [f"python {'.'.join(platform.python_version_tuple()[:2])}"]
    versions += [f"{package} {_version(package)}" for package in packages]
    digest = hashlib.sha256(json.dumps(versions).encode()).hexdigest()[:12]
    return DocstringConfig(
        name=f"{'-'.join(packages)[:64]}-{digest}",
        description=", ".join(versions),
        packages=tuple(packages),
    )


def _version(package: str) -> str:
    """Return the installed version, or without one, a digest of the sources' times and sizes."""
    root = package.partition(".")[0]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        distributions = importlib.metadata.packages_distributions().get(root, [root])
        return "+".join(importlib.metadata.version(name) for name in sorted(set(distributions)))
    spec = importlib.util.find_spec(root)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).rglob("*.py"))
    stamps = [(str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files]
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:12]
