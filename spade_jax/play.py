"""`spade-jax play`: a person, or a list of actions, plays one environment in the terminal.

The program runs in a confined worker of the pool, as in training; this process reads its text and
nothing more. There is no turn limit, and nothing is trained or scored here. Between two turns this
process waits for its player outside the event loop, so that Ctrl-C ends it at once. Every line that
the environment wrote starts with a bar, so that it cannot pass for one of ours.
"""

import asyncio
import contextlib
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spade_jax.envs import adapters, api
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Instance, Pool
from spade_jax.envs.tier import ACCEPT
from spade_jax.errors import SpadeError
from spade_jax.terminal import encodable, say, typed, visible, visible_lines
from spade_jax.types import Fault, Outcome, Reply

DETAILS = """\
Type one action a line; Ctrl-D leaves. Actions can also be piped in. The program runs confined, as
in training; what it writes is shown behind a bar, with control characters escaped.

--actions FILE: one action a line, blank lines left out; FILE.json holds a list of strings, and
FILE.jsonl a string a line (for actions with line breaks) or a transcript, to be played again.
--transcript FILE: {"seed", "turn", "action", "observation", "reward", "terminated", "truncated",
"outcome", "sandbox"} for the reset (action null) and each turn; null is what did not happen.

Exit codes: 0 played, 1 the program or the sandbox broke the episode, 2 bad input, 130 interrupted.
"""

_PACKAGE = re.compile(r"[A-Za-z][\w-]*:.+")
_MAX_INPUT_BYTES = 16 * 2**20  # of a hint or actions file
_MAX_LINE_BYTES = 8 * api.MAX_ACTION_CHARS  # what is longer than an action is cut; not for ever
_MEANINGS = {
    Outcome.ENV_ERROR: "the program failed",
    Outcome.TIMEOUT: "the program missed its deadline and was killed",
    Outcome.PROTOCOL: "the program disturbed the connection to its worker",
    Outcome.SCHEMA: "the program answered with something that breaks the contract",
    Outcome.WORKER_DIED: "the program's process ended",
    Outcome.INFRASTRUCTURE: "the sandbox failed, not the program; try again",
}


@dataclass(frozen=True)
class Playable:
    """One environment to play."""

    name: str
    program: str
    path: Path | None = None  # of the program; None when it comes from a package
    packages: tuple[str, ...] = ()  # that its pool is made with


def play(
    target: str,
    *,
    seed: int = 0,
    hint: str | None = None,
    actions: Path | None = None,
    transcript: Path | None = None,
    unsafe_sandbox: str = "",
) -> int:
    """Play `target`, a program file or PACKAGE:ID, with actions from a file, a pipe or a person.

    Args:
        hint: a text or a file that holds one; "" asks for the one stored beside the program.
        unsafe_sandbox: `tier.ACCEPT` plays on a host that cannot contain the program.
    Returns:
        The exit code: 0 played, 1 the program or the sandbox broke the episode, 130 interrupted.
    Raises:
        SpadeError: something given cannot be used, or the sandbox cannot run.
    """
    if unsafe_sandbox not in ("", ACCEPT):
        raise SpadeError(f"--envs.unsafe-sandbox {unsafe_sandbox!r}: expected {ACCEPT}")
    playable = _find(target)
    hint_text = None if hint is None else _hint(hint, playable)
    script = None if actions is None else read_actions(actions)
    _keep_inputs(transcript, playable.path, actions, _hint_path(hint, playable))
    with contextlib.ExitStack() as stack:
        out = None if transcript is None else stack.enter_context(_opened(transcript))
        limits = Limits(max_workers=1, instances_per_worker=1, unsafe_sandbox=unsafe_sandbox)
        return _Session(playable, seed, script, out).run(limits, hint_text)


class _Session:
    """One play: the pool, the player, and what is told of it."""

    def __init__(
        self, playable: Playable, seed: int, script: list[str] | None, transcript: io.FileIO | None
    ) -> None:
        self._turn = 0
        self._playable = playable
        self._seed = seed
        self._script = script
        self._transcript = transcript
        self._sandbox = ""  # its tier, once it stands

    def run(self, limits: Limits, hint_text: str | None) -> int:
        with asyncio.Runner() as runner:
            pool = Pool(limits, packages=self._playable.packages)
            runner.run(pool.start())
            self._sandbox = pool.sandbox.label
            try:
                name = visible(self._playable.name)
                say(f"{name}, seed {self._seed}, sandbox={self._sandbox}")
                instance = runner.run(pool.open(self._playable.program, self._seed))
                if isinstance(instance, Fault):
                    return self._fault(None, instance)
                if hint_text is not None:
                    say(*(f"hint: {line}" for line in visible_lines(hint_text)))
                return self._rounds(lambda action: runner.run(instance.step(action)), instance)
            except KeyboardInterrupt:
                say(f"\ninterrupted after {self._played()}")
                return 130
            finally:
                runner.run(pool.close())

    def _rounds(self, step: Callable[[str], Reply | Fault], instance: Instance) -> int:
        self._show(None, Reply(instance.observation, 0.0, False, False))
        players = (
            typed("one action a line; Ctrl-D leaves", _MAX_LINE_BYTES)
            if self._script is None
            else _scripted(self._script)
        )
        for action in players:
            if len(action) > api.MAX_ACTION_CHARS:
                action = action[: api.MAX_ACTION_CHARS]
                say(f"(the action is cut to {api.MAX_ACTION_CHARS} characters)")
            reply = step(action)
            self._turn += 1
            if isinstance(reply, Fault):
                return self._fault(action, reply)
            self._show(action, reply)
            if reply.terminated or reply.truncated:
                self._tell_end(reply)
                return 0
        what = "input" if self._script is None else "actions"
        say(f"the {what} ended after {self._played()}; the episode did not")
        return 0

    def _played(self) -> str:
        return "1 turn" if self._turn == 1 else f"{self._turn} turns"

    def _show(self, action: str | None, reply: Reply) -> None:
        if action is not None:
            say(f"turn {self._turn}, reward {reply.reward:g}")
        say(*(f"| {line}" for line in visible_lines(reply.observation)))
        outcome = None
        if reply.terminated or reply.truncated:
            outcome = Outcome.FINISHED if reply.terminated else Outcome.ENV_TRUNCATED
        self._write(
            action,
            observation=reply.observation,
            reward=None if action is None else reply.reward,
            terminated=reply.terminated,
            truncated=reply.truncated,
            outcome=outcome,
        )

    def _tell_end(self, reply: Reply) -> None:
        if reply.terminated:
            won = "won" if api.is_win(reply) else "not won"
            text = f"{Outcome.FINISHED}: {won} with reward {reply.reward:g}"
        else:
            text = f"{Outcome.ENV_TRUNCATED}: the environment ended the episode without a result"
        say(f"{text} after {self._played()}")
        if self._script is not None and (unused := len(self._script) - self._turn):
            say(f"({unused} of the {len(self._script)} actions were not played)")

    def _fault(self, action: str | None, fault: Fault) -> int:
        where = "before the first turn" if action is None else f"in turn {self._turn}"
        meaning = _MEANINGS.get(fault.outcome, "the episode broke")
        say(f"{fault.outcome}: {meaning}, {where} ({visible(fault.detail)})")
        self._write(
            action,
            observation=None,
            reward=None,
            terminated=None,
            truncated=None,
            outcome=fault.outcome,
            detail=fault.detail,
        )
        return 1

    def _write(self, action: str | None, **answer: Any) -> None:
        if self._transcript is None:
            return
        turn = {"seed": self._seed, "turn": self._turn, "action": action}
        line = json.dumps(turn | answer | {"sandbox": self._sandbox})
        data = f"{line}\n".encode()
        try:
            while data:
                data = data[self._transcript.write(data) :]
        except OSError as error:
            raise _unusable("transcript", str(self._transcript.name), error) from error


def read_actions(path: Path) -> list[str]:
    """The actions of a file. `.json` holds a list of strings; `.jsonl` a string a line, or lines of
    a transcript; any other one action a line, blank lines left out.

    Raises:
        SpadeError: it cannot be read, or is not that.
    """
    text = _read("actions file", path, _MAX_INPUT_BYTES)
    if path.suffix == ".json":
        actions = _json(path, text, "")
        if type(actions) is not list:
            raise SpadeError(f"actions file {str(path)!r} is JSON, but not a list of strings")
    elif path.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        actions = [_json(path, line, f" line {number}") for number, line in lines]
        turns = [item for item in actions if type(item) is dict and "action" in item]
        if turns and len(turns) == len(actions):  # a transcript; its first line is the reset
            actions = [turn["action"] for turn in turns if turn["action"] is not None]
    else:
        actions = [line for line in text.replace("\r\n", "\n").split("\n") if line]
    for index, action in enumerate(actions, 1):
        if type(action) is not str or not encodable(action):
            raise SpadeError(
                f"actions file {str(path)!r}: action {index} is {ascii(action)[:60]}; "
                "expected a string of encodable text"
            )
    return actions


def _json(path: Path, text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpadeError(f"actions file {str(path)!r}{where} is not JSON: {error}") from error


def _scripted(script: list[str]) -> Iterator[str]:
    for action in script:
        say(*(f"> {line}" for line in visible_lines(action)))
        yield action


def _find(target: str) -> Playable:
    path = Path(target)
    if _PACKAGE.fullmatch(target) and not os.path.exists(path):
        return _from_package(target)
    program = _read("program", path, api.MAX_PROGRAM_BYTES)
    if not program.strip():
        raise SpadeError(
            f"program {target!r} is empty; expected Python that defines a class whose name "
            "ends in Env"
        )
    return Playable(target, program, path)


def _from_package(target: str) -> Playable:
    """An environment of a package; whether it has one of that name shows when it is played."""
    try:
        package, identifier = adapters.parse(target)
        return Playable(target, adapters.program(package, identifier), packages=(package,))
    except ValueError as error:
        raise SpadeError(
            f"{target!r} is neither a file nor an environment of a package: {error}"
        ) from error


def _hint(hint: str, playable: Playable) -> str:
    """The hint's text: given, in a file that was given, or stored beside the program by a run."""
    if hint:
        path = _hint_path(hint, playable)
        if path is None:
            return hint
        text = _read("hint file", path, _MAX_INPUT_BYTES)
        return _recorded_hint(path, text) if path.suffix == ".json" else text.strip()
    advice = "give it as --hint TEXT or --hint FILE"
    beside = _hint_path("", playable)
    if beside is None:
        raise SpadeError(f"{playable.name} comes without a hint; {advice}")
    if not os.path.exists(beside):
        raise SpadeError(
            f"there is no hint for {playable.name!r}: {str(beside)!r}, where a run stores it, does "
            f"not exist; {advice}"
        )
    return _recorded_hint(beside, _read("hint file", beside, _MAX_INPUT_BYTES))


def _hint_path(hint: str | None, playable: Playable) -> Path | None:
    """The file that a hint is read from, if it is."""
    if hint:
        is_path = len(hint.split()) == 1 and (Path(hint).suffix or os.sep in hint)
        return Path(hint) if is_path else None
    return None if hint is None or playable.path is None else playable.path.with_suffix(".json")


def _recorded_hint(path: Path, text: str) -> str:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SpadeError(f"hint file {str(path)!r} is not JSON: {error}") from error
    hint = record.get("hint") if isinstance(record, dict) else None
    if type(hint) is not str or not hint.strip():
        raise SpadeError(
            f'hint file {str(path)!r} holds no hint; expected an object with a text under "hint", '
            "as in environments/ of a run folder; give one as --hint TEXT"
        )
    return hint


def _keep_inputs(transcript: Path | None, *inputs: Path | None) -> None:
    """Refuse to write the transcript over what is read."""
    if transcript is None or not os.path.exists(transcript):
        return
    if any(path is not None and os.path.samefile(transcript, path) for path in inputs):
        raise SpadeError(
            f"--transcript {str(transcript)!r} would overwrite what is played; choose another file"
        )


def _opened(transcript: Path) -> io.FileIO:
    try:
        return transcript.open("wb", buffering=0)  # a play that is cut short leaves what there was
    except (OSError, ValueError) as error:
        raise _unusable("transcript", transcript, error) from error


def _read(what: str, path: Path, max_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
        if len(data) > max_bytes:
            raise SpadeError(f"{what} {str(path)!r} has more than {max_bytes} bytes")
        return data.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise _unusable(what, path, error) from error


def _unusable(what: str, path: Path | str, error: OSError | ValueError) -> SpadeError:
    reason = error.strerror if isinstance(error, OSError) else error
    if isinstance(error, UnicodeDecodeError):
        reason = f"it is not UTF-8 text ({error.reason} at byte {error.start})"
    return SpadeError(f"{what} {str(path)!r} cannot be used: {reason}")
