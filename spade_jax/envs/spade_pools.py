"""Folders of environments as the SPADE project releases them: read tolerantly, written with
everything a reader may want.

    numbered     games/game_000000.py ..., manifest.jsonl, checksums.sha256
    generations  games/gen_0000/game_00000_000_skill.py ..., manifest.json {summary, games}

The folders of tool programs are of the second kind, with `environments/RUN/FILE.py`. Whatever is
wrong with one file (a path out of the folder, a checksum, a name given twice, a text that is too
large, cannot be decoded or parsed, or builds on an unknown class) is reported for that file and the
others are read. Texts are never run here; whether one plays is for admission to see.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from spade_jax.envs import api, spade_texts
from spade_jax.errors import SpadeError
from spade_jax.types import Environment, EnvironmentSource, to_json

Layout = Literal["numbered", "generations"]
MAX_MANIFEST_BYTES = 256 * 2**20
_MAX_HINT_BYTES = 64 * 1024
_MANIFESTS = ("manifest.jsonl", "manifest.json")
_CHECKSUMS = "checksums.sha256"
_PATHS = ("path_in_dataset", "path", "file_path", "file_name", "filename")
_HINT_SUFFIX = "_hint.txt"
_LISTS = ("games", "environments", "entries")
_HEX = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class Problem:
    """Why a file of a pool was not taken, or taken with less than it should have."""

    path: str
    reason: str


@dataclass(frozen=True)
class Entry:
    """One environment of a pool, as a program for `Pool.open`."""

    path: str
    source: EnvironmentSource
    hint: str
    notes: dict[str, Any]  # what else the manifest says of it


@dataclass
class SpadePool:
    """What was read from a folder, in the manifest's order."""

    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class _Skip(Exception):
    """A file that is not taken, and why."""


def read_pool(folder: Path) -> SpadePool:
    """Read a folder of either layout.

    Raises:
        SpadeError: there is no such folder.
    """
    if not folder.is_dir():
        raise SpadeError(f"the environment pool {folder} is not a folder")
    return _Reader(folder).read()


def read_folder(folder: Path) -> SpadePool:
    """Read a pool if the folder has a manifest, else every Python file below it as a program of
    ours, such as the folder `environments` of a run, whose records give skill and hint.

    Raises:
        SpadeError: there is no such folder.
    """
    if any((folder / name).is_file() for name in _MANIFESTS):
        return read_pool(folder)
    if not folder.is_dir():
        raise SpadeError(f"{folder} is not a folder")
    pool, seen = SpadePool(), dict[str, str]()
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        try:
            program = _read(path, api.MAX_PROGRAM_BYTES)
            if problem := api.program_problem(program):
                raise _Skip(problem)
            row = _record(path.with_suffix(".json"))
            source = EnvironmentSource(
                program, _text(row, "skill"), _text(row, "difficulty"), _text(row, "document_id")
            )
            first = seen.setdefault(source.environment_id, name)
            if first != name:
                raise _Skip(f"the same program as {first}")
            pool.entries.append(Entry(name, source, _text(row, "hint"), {}))
        except _Skip as reason:
            pool.problems.append(Problem(name, str(reason)))
    return pool


def _record(path: Path) -> dict[str, Any]:
    """What a run wrote beside a program; {} if there is nothing that can be read."""
    if not path.is_file():
        return {}
    try:
        record = json.loads(_read(path, api.MAX_PROGRAM_BYTES))
    except (_Skip, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    source = record.get("source")
    return record | (source if isinstance(source, dict) else {})


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._pool = SpadePool()
        self._places: dict[str, list[Path]] = {}  # by name, of files below the folder
        for path in sorted(self._folder.rglob("*.py")):
            self._places.setdefault(path.name, []).append(path)
        self._sums = self._checksums()
        self._seen: dict[Path, str] = {}
        self._programs: dict[str, str] = {}

    def read(self) -> SpadePool:
        for name, row in self._rows():
            try:
                self._pool.entries.append(self._entry(name, row))
            except _Skip as reason:
                self._report(name, str(reason))
        reported = {problem.path for problem in self._pool.problems}
        for path in [path for paths in self._places.values() for path in paths]:
            name = str(path.relative_to(self._folder))
            if Path(os.path.realpath(path)) not in self._seen and name not in reported:
                self._report(name, "not in the manifest; not taken")
        return self._pool

    def _report(self, path: str, reason: str) -> None:
        self._pool.problems.append(Problem(path, reason))

    # -- manifests

    def _rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What a row calls its file, and the row."""
        found = [name for name in _MANIFESTS if (self._folder / name).is_file()]
        if not found:
            self._report(_MANIFESTS[0], "there is no manifest; every Python file is tried")
            for path in [path for paths in self._places.values() for path in paths]:
                name = str(path.relative_to(self._folder))
                yield name, {"path": name}
            return
        for index, row in enumerate(self._manifest(found[0])):
            name = next((row[key] for key in _PATHS if isinstance(row.get(key), str)), "")
            if name:
                yield name, row
            else:
                self._report(f"{found[0]}:{index + 1}", f"an entry without any of {_PATHS}")

    def _manifest(self, name: str) -> Iterator[dict[str, Any]]:
        try:
            text = _read(self._folder / name, MAX_MANIFEST_BYTES)
        except _Skip as reason:
            self._report(name, str(reason))
            return
        for index, document in enumerate(text.split("\n") if name.endswith("l") else [text]):
            if not document.strip():
                continue
            try:
                value = json.loads(document)
            except (ValueError, RecursionError) as error:
                self._report(f"{name}:{index + 1}", f"not JSON: {error}"[:200])
                continue
            rows = [value] if name.endswith("l") else _listed(value)
            for row in rows:
                if isinstance(row, dict):
                    yield row
                else:
                    self._report(f"{name}:{index + 1}", "an entry that is not an object")

    def _checksums(self) -> dict[str, str]:
        """SHA-256 by path, of the file that lists them; both may be absent."""
        if not (self._folder / _CHECKSUMS).is_file():
            return {}
        try:
            lines = _read(self._folder / _CHECKSUMS, MAX_MANIFEST_BYTES).splitlines()
        except _Skip as reason:
            self._report(_CHECKSUMS, str(reason))
            return {}
        pairs = [line.split(maxsplit=1) for line in lines if line.strip()]
        return {
            pair[1].strip().lstrip("*").removeprefix("./"): pair[0]
            for pair in pairs
            if len(pair) == 2
        }

    # -- one file

    def _entry(self, name: str, row: dict[str, Any]) -> Entry:
        path = self._place(name)
        if path in self._seen:
            raise _Skip(f"named twice; first as {self._seen[path]}")
        self._seen[path] = name
        data = _read_bytes(path, api.MAX_PROGRAM_BYTES)
        relative = str(path.relative_to(self._folder))
        self._check_sum(data, row.get("sha256"), "the manifest")
        self._check_sum(data, self._sums.get(relative), _CHECKSUMS)
        try:
            program = spade_texts.adopt(_decode(data))
        except spade_texts.NotAdoptable as error:
            raise _Skip(str(error)) from error
        if problem := api.program_problem(program):
            raise _Skip(problem)
        source = EnvironmentSource(
            program=program,
            skill=_text(row, "skill"),
            difficulty=_text(row, "difficulty"),
            document_id=_text(row, "document_id"),
        )
        first = self._programs.setdefault(source.environment_id, relative)
        if first != relative:
            raise _Skip(f"the same program as {first}")
        known = {*_PATHS, "skill", "difficulty", "document_id", "hint", "sha256", "code"}
        notes = {key: value for key, value in row.items() if key not in known}
        return Entry(relative, source, self._hint(path, row), notes)

    def _place(self, name: str) -> Path:
        """The file that a manifest names: as a path, or by its name alone if that is unique."""
        try:
            path = (self._folder / name).resolve()
            if not path.is_file() and len(self._places.get(name, ())) == 1:
                path = self._places[name][0].resolve()
            present = path.is_file()
        except (OSError, ValueError, RuntimeError) as error:
            raise _Skip(f"not a usable path: {type(error).__name__}") from error
        if not path.is_relative_to(self._folder):
            raise _Skip("a path that leads out of the folder")
        if len(self._places.get(name, ())) > 1 and not present:
            raise _Skip(f"{len(self._places[name])} files have this name")
        if not present:
            raise _Skip("there is no such file")
        return path

    def _check_sum(self, data: bytes, expected: Any, where: str) -> None:
        if expected is None:
            return
        if not isinstance(expected, str) or not _HEX.fullmatch(expected):
            raise _Skip(f"{where} gives no SHA-256: {str(expected)[:80]!r}")
        if hashlib.sha256(data).hexdigest() != expected.lower():
            raise _Skip(f"its SHA-256 is not the one of {where}")

    def _hint(self, path: Path, row: dict[str, Any]) -> str:
        if hint := _text(row, "hint"):
            return hint
        beside = path.with_name(path.stem + _HINT_SUFFIX)
        missing = "the manifest promises a hint; there is none" if row.get("has_hint") else ""
        if beside.is_file():
            try:
                if not beside.resolve().is_relative_to(self._folder):
                    raise _Skip("a path that leads out of the folder")
                return _read(beside, _MAX_HINT_BYTES)
            except _Skip as reason:
                missing = str(reason)
        if missing:
            self._report(str(beside.relative_to(self._folder)), missing)
        return ""


def write_pool(
    folder: Path, environments: Sequence[Environment], layout: Layout = "generations"
) -> None:
    """Write environments as a folder that the reference and `read_pool` can read.

    Raises:
        SpadeError: the folder has something in it, or a program cannot be written out.
    """
    if folder.exists() and any(folder.iterdir()):
        raise SpadeError(f"the folder {folder} is not empty; name a new one for the pool")
    rows, sums = [], {}
    for index, environment in enumerate(environments):
        source = environment.source
        try:
            code = spade_texts.release(source.program)
        except spade_texts.NotAdoptable as error:
            raise SpadeError(f"environment {environment.environment_id}: {error}") from error
        path = _path(index, environment, layout)
        texts = {path: code, _hint_path(path): environment.hint}
        for name, text in texts.items():
            if text:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(text.encode())
                sums[name] = hashlib.sha256(text.encode()).hexdigest()
        rows.append(_row(index, path, code, environment, sums[path]))
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "n_games": len(rows),
        "n_with_skill": sum(bool(row["skill"]) for row in rows),
        "n_with_hint": sum(row["has_hint"] for row in rows),
        "steps_covered": sorted({row["step"] for row in rows}),
    }
    if layout == "generations":
        documents = {"manifest.json": _json({"summary": summary, "games": rows}, 1)}
    else:
        documents = {
            "manifest.jsonl": "".join(_json(row) for row in rows),
            "snapshot_summary.json": _json(summary, 1),
        }
    for name, text in documents.items():
        (folder / name).write_text(text)
        sums[name] = hashlib.sha256(text.encode()).hexdigest()
    lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    (folder / _CHECKSUMS).write_text("".join(lines))


def _path(index: int, environment: Environment, layout: Layout) -> str:
    if layout == "numbered":
        return f"games/game_{index:06d}.py"
    slug = re.sub(r"[^a-z0-9]+", "_", environment.source.skill.lower()).strip("_") or "none"
    generation = f"gen_{environment.cycle:04d}"
    return f"games/{generation}/game_{environment.cycle:05d}_{index:03d}_{slug}.py"


def _hint_path(path: str) -> str:
    return path.removesuffix(".py") + _HINT_SUFFIX


def _row(index: int, path: str, code: str, environment: Environment, digest: str) -> dict[str, Any]:
    source = environment.source
    return {
        "game_id": f"game_{index:06d}",
        "generation": environment.cycle,
        "step": environment.cycle,
        "filename": path.rpartition("/")[2],
        "path_in_dataset": path,
        "skill": source.skill,
        "difficulty": source.difficulty,
        "document_id": source.document_id,
        "has_hint": bool(environment.hint),
        "sha256": digest,
        "line_count": len(code.splitlines()),
        "byte_count": len(code.encode()),
        "environment_id": environment.environment_id,
        "design_id": environment.design_id,
        "verdict": to_json(environment.verdict),
    }


def _listed(value: Any) -> list[Any]:
    """The entries of a manifest that is one document."""
    if isinstance(value, list):
        return value
    for key in _LISTS:
        if isinstance(value, dict) and isinstance(value.get(key), list):
            return value[key]
    return []


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        if not path.is_file():
            raise _Skip("not a plain file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise _Skip(f"it cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise _Skip(f"more than {limit} bytes")
    return data


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Skip(f"not UTF-8 at byte {error.start}") from error


def _read(path: Path, limit: int) -> str:
    return _decode(_read_bytes(path, limit))


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=True) + "\n"
