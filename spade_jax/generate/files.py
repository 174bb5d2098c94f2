"""Files of `spade-jax generate`: JSONL of prompts to read, JSONL of completions to write.

Every line of the prompts is checked before anything runs. Completions are written in the order of
the prompts, each as soon as those before it are there, so that a run that is cut short leaves what
it has. Other formats, compression and appending are not here.
"""

import io
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spade_jax.errors import SpadeError
from spade_jax.terminal import encodable

KINDS = ("text", "tokens", "messages")
MAX_LINE_BYTES = 64 * 2**20


class LineError(SpadeError):
    """A line of the prompts cannot be used."""

    def __init__(self, path: Path, number: int, problem: str) -> None:
        super().__init__(f"{str(path)!r} line {number}: {problem}")


def read_prompts(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield the number of each line, which of KINDS it holds, and that. Blank lines are left out.

    Raises:
        SpadeError: the file or a line cannot be read, or is not that.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise LineError(path, number, f"has more than {MAX_LINE_BYTES} bytes")
                if line.strip():
                    yield number, *_prompt(path, number, line)
    except (OSError, ValueError) as error:  # no such file, no rights, a name that cannot be
        reason = error.strerror if isinstance(error, OSError) else error
        raise SpadeError(f"prompts file {str(path)!r} cannot be read: {reason}") from error


def _prompt(path: Path, number: int, line: bytes) -> tuple[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise LineError(path, number, f"is not UTF-8 ({error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise LineError(path, number, f"is not JSON: {error}") from error
    found = [kind for kind in KINDS if kind in record] if isinstance(record, dict) else []
    if len(found) != 1:
        raise LineError(
            path,
            number,
            f"holds {' and '.join(found) or 'none'} of {', '.join(KINDS)}; expected an object "
            'with one of them, such as {"text": "Once upon a time"}',
        )
    (kind,) = found
    others = [name for name in record if name != kind]
    if others:
        raise LineError(
            path,
            number,
            f"holds {ascii(others)[1:-1][:120]} beside {kind}, which would have no effect; leave "
            "out what is not the prompt, and say how to sample on the command line",
        )
    problem = _CHECKS[kind](record[kind])
    if problem:
        raise LineError(path, number, problem)
    return kind, record[kind]


def _text(value: Any) -> str:
    if type(value) is not str or not encodable(value):
        return f"text is {ascii(value)[:60]}; expected a string of encodable text"
    return ""


def _tokens(value: Any) -> str:
    if type(value) is not list or not all(type(item) is int for item in value):
        return f"tokens is {ascii(value)[:60]}; expected a list of whole numbers"
    return ""


def _messages(value: Any) -> str:
    """What is wrong with a conversation: a system message or none, then both in turn."""
    form = 'expected a list of {"role", "content"}'
    if type(value) is not list or not all(isinstance(item, dict) for item in value):
        return f"messages is {ascii(value)[:60]}; {form}"
    for message in value:
        if set(message) != {"role", "content"} or _text(message["content"]):
            return f"message {ascii(message)[:60]} is malformed; {form} of strings"
    roles = [message["role"] for message in value]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    alternating = [("user", "assistant")[index % 2] for index in range(len(turns))]
    if turns != alternating or len(turns) % 2 == 0:
        return (
            f"the roles are {ascii(roles)[:120]}; expected user and assistant in turn, user first "
            "and last, after at most one system message"
        )
    return ""


_CHECKS = {"text": _text, "tokens": _tokens, "messages": _messages}


class Completions:
    """The file of completions, a line for each prompt; a context manager."""

    def __init__(self, path: Path, *, overwrite: bool, inputs: Sequence[Path]) -> None:
        """Open the file; what it held before is there until the first line is written.

        Raises:
            SpadeError: it is one of the inputs, exists without `overwrite`, or cannot be written.
        """
        self._path = path
        self._pending: dict[int, bytes] = {}
        self._next = 0
        try:
            self._made = not os.path.lexists(path)
            if not self._made and any(os.path.samefile(path, other) for other in inputs):
                raise SpadeError(f"--out {str(path)!r} is what is read; choose another file")
            self._file = path.open("ab" if overwrite else "xb", buffering=0)
        except FileExistsError as error:
            raise SpadeError(
                f"--out {str(path)!r} exists; choose another file, or replace it with --overwrite"
            ) from error
        except (OSError, ValueError) as error:
            raise self._unusable(error) from error

    def __enter__(self) -> "Completions":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._made and self._next == 0:
            self._path.unlink(missing_ok=True)

    @property
    def num_written(self) -> int:
        """Lines that are in the file."""
        return self._next

    def put(self, index: int, record: dict[str, Any]) -> None:
        """Take the completion of prompt `index`, and write what is next in order."""
        self._pending[index] = json.dumps(record, allow_nan=False).encode() + b"\n"
        while (line := self._pending.pop(self._next, None)) is not None:
            self._write(line)
            self._next += 1

    def _write(self, line: bytes) -> None:
        try:
            if self._next == 0 and stat.S_ISREG(os.fstat(self._file.fileno()).st_mode):
                self._file.truncate(0)
            while line:
                line = line[self._file.write(line) or 0 :]
        except (OSError, io.UnsupportedOperation) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: OSError | ValueError) -> SpadeError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        return SpadeError(f"--out {str(self._path)!r} cannot be written: {reason}")
