"""The far end of a worker's channel: loads one program and answers requests for its instances.
Standard library only.

Everything here shares an interpreter with the generated program and can be changed by it, so
nothing here is trusted: deadlines, numbering and the final word on every reply belong to the
supervisor and the pool. The checks made here only give an honest program's mistake its right name.
A program's `close()` is never called.
"""

import builtins
import gc
import re
import select
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any

from spade_jax.envs import tool_task, tool_use_base_env, wire

HELLO = 0  # begins the frame that a worker sends unasked, once it is confined
MODULE = "environment"  # the name a program is loaded under
# What a program may import of ours, by the names it knows.
PROGRAM_MODULES = {"tool_task": tool_task, "tool_use_base_env": tool_use_base_env}
_MAX_TEXT = 1 << 18  # longer observations are refused before they are encoded
_MAX_DETAIL = 200
_HELD_S = 0.001  # answers wait at most so long, and the request after them, to be sent together
_IDLE_MS = 2  # a worker that is not asked for anything for so long is a spare one
_REHEARSAL = """
import random, re

class RehearsalEnv:
    def reset(self, seed):
        self.target, self.total = random.Random(seed).randint(1, 9), 0
        return f"Name numbers that add up to {self.target}.", {}

    def step(self, action):
        found = re.search(r"-?[0-9]+", action)
        self.total += int(found.group()) if found else 0
        won = self.total == self.target
        return f"The sum is {self.total}.", float(won), won, False, {}

    def solution(self):
        return [str(self.target)]
"""
_SCALARS = frozenset({str, int, float, bool, type(None)})
_BUILTINS = builtins.__dict__
_SOUND: dict[str, Any] = {}  # as they are before the program, packages included
_ADDRESS = re.compile("0x[0-9a-f]+")  # differs between processes, as the text of an error may not


class Breach(Exception):
    """A result that breaks the contract of an environment."""


class Host:
    """One program and its instances."""

    def __init__(self) -> None:
        self._code: Any = None
        self._instances: dict[int, Any] = {}

    def load(self, program: str) -> None:
        """Compile the program and try its module body."""
        self._code = compile(program, f"<{MODULE}>", "exec")
        self._fresh_class()

    def _fresh_class(self) -> Any:
        """Run the module body anew; returns its last class whose name ends in Env.

        Each instance has its own module: what one leaves in a global or in its class must not
        reach another, whose play would then depend on who came first.
        """
        module = types.ModuleType(MODULE)
        sys.modules[MODULE] = module  # dataclasses look their module up
        exec(self._code, module.__dict__)
        found = None
        for value in list(module.__dict__.values()):
            if (
                isinstance(value, type)
                and value.__module__ == MODULE
                and value.__name__.endswith("Env")
            ):
                found = value
        if found is None:
            raise Breach("the program defines no class whose name ends in Env")
        return found

    def open(self, number: int, seed: int) -> Any:
        """Make instance `number` and reset it; returns the first observation."""
        instance = self._fresh_class()()
        result = instance.reset(seed)
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], dict):
                raise Breach(f"reset returned {_shape(result)}; expected (str, dict)")
            result = result[0]
        self._instances[number] = instance
        return _text(result)

    def step(self, number: int, action: str) -> list[Any]:
        """Returns [observation, reward, terminated, truncated]; the info dict stays here."""
        result = self._instances[number].step(action)
        if not isinstance(result, tuple) or len(result) != 5 or not isinstance(result[4], dict):
            raise Breach(f"step returned {_shape(result)}; expected (str, float, bool, bool, dict)")
        return [_text(result[0]), *result[1:4]]

    def solution(self, number: int) -> Any:
        """What the instance says wins from here."""
        return self._instances[number].solution()

    def close(self, number: int) -> None:
        """Forget an instance."""
        self._instances.pop(number, None)


def serve(channel: int, progress: Any) -> None:
    """Answer batches of requests `[operation, ...]`, each with `[status, value]`, until the channel
    closes.

    Answers leave together when the batch is done, and before that when some have waited or are
    many. `progress` is memory shared with the supervisor: it says which request is being worked on,
    since when, and the processor time of this process then, so that a request which never ends is
    known without a message per request.
    """
    sys.modules.update(PROGRAM_MODULES)
    _SOUND.update(_BUILTINS)
    host = Host()
    connection = socket.socket(fileno=channel)
    decoder = wire.Decoder()
    # Not for the sake of `recv`: asleep in that, this process is also woken by what it wrote being
    # read, and each of its steps would cost two switches to it instead of one.
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if not poll.poll(_IDLE_MS):
        _rehearse()
    while poll.poll() and (data := connection.recv(1 << 16)):
        for body in decoder.feed(data):
            (batch,) = wire.NUMBER.unpack_from(body)
            requests = wire.loads(body[wire.NUMBER.size :])
            try:
                _work(host, connection.sendall, progress, batch, requests)
            except Exception:  # the program has changed what this side needs, such as `all`
                if requests[1:]:  # no telling whose doing it is until they are asked one by one
                    wire.PROGRESS.pack_into(progress, 0, 0.0, 0.0, 0, 0)
                    raise
                _BUILTINS.clear()
                _BUILTINS.update(_SOUND)
                broken = b'[["env_error","%b: it broke its worker"]]' % requests[0][0].encode()
                connection.sendall(wire.frame(_head(batch, [time.process_time()]), broken))


def _rehearse() -> None:
    """Play a program of ours, whose answers go nowhere.

    Memory shared with the zygote is copied page by page as it is first touched, and that takes
    longer than the loading of a small program. A spare worker gets most of it over beforehand.
    """
    requests = [["load", _REHEARSAL], ["open", 0, 0], ["step", 0, "1"], ["solution", 0]]
    _work(Host(), len, bytearray(wire.PROGRESS.size), 0, wire.loads(wire.dumps(requests)))
    sys.modules.pop(MODULE, None)  # absent if there was no memory to load it
    gc.collect()  # no class of it is to be found; what the zygote froze is not looked at


def _work(
    host: Host,
    send: Callable[[bytes], object],
    progress: Any,
    batch: int,
    requests: list[list[Any]],
) -> None:
    answers: list[tuple[str, Any]] = []
    operations: list[str] = []
    clocks: list[float] = []
    clock = held_since = 0.0  # the supervisor has a clock of its own for the first request
    for index, (operation, *arguments) in enumerate(requests):
        now = time.monotonic()
        if not answers:
            held_since = now
        elif now - held_since > _HELD_S:
            _send(send, batch, answers, operations, clocks)
            answers, operations, clocks, held_since = [], [], [], now
        wire.PROGRESS.pack_into(progress, 0, now, clock, batch, index)  # the index last
        try:
            answer = "ok", getattr(host, operation)(*arguments)
        except Breach as error:
            answer = "schema", str(error)[:_MAX_DETAIL]
        except BaseException as error:  # SystemExit and the like are the program's errors too
            answer = "env_error", f"{operation}: {_describe(error)}"[:_MAX_DETAIL]
        answers.append(answer)
        operations.append(operation)
        clock = time.process_time()
        clocks.append(clock)
    _send(send, batch, answers, operations, clocks)


def _send(
    send: Callable[[bytes], object],
    batch: int,
    answers: list[tuple[str, Any]],
    operations: list[str],
    clocks: list[float],
) -> None:
    """Send answers in one frame, or one by one if they are not all small and plain."""
    # Not with other builtins: what one instance did to them would be in the answers of all.
    if _BUILTINS != _SOUND:
        raise RuntimeError("the builtins were changed")
    if all(map(_plain, answers)):
        try:
            body = wire.dumps_shallow(answers)
            frame = wire.frame(_head(batch, clocks), body, wire.MAX_REPLY_BYTES)
        except (ValueError, MemoryError, wire.WireError):
            pass
        else:
            send(frame)
            return
    for (status, value), operation, clock in zip(answers, operations, clocks, strict=True):
        head = _head(batch, [clock])
        try:
            frame = wire.frame(head, wire.dumps([(status, value)]), wire.MAX_REPLY_BYTES)
        except (TypeError, ValueError, RecursionError, MemoryError, wire.WireError) as error:
            detail = f"{operation} returned a value that is not small plain data: "
            detail += _describe(error)
            frame = wire.frame(head, wire.dumps([("schema", detail[:_MAX_DETAIL])]))
        send(frame)


def _head(batch: int, clocks: list[float]) -> bytes:
    return wire.REPLY.pack(batch, len(clocks)) + struct.pack(f"<{len(clocks)}d", *clocks)


def _plain(answer: tuple[str, Any]) -> bool:
    """Whether the value of an answer is a scalar, or a list of nothing else."""
    value = answer[1]
    return type(value) in _SCALARS or (
        type(value) is list and _SCALARS.issuperset(map(type, value))
    )


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return _ADDRESS.sub("0x...", f"{name}: {error}")
    except BaseException:  # the text of an error can be the program's code
        return name


def _shape(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(item).__name__ for item in value[:8]) + ")"
    return type(value).__name__


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Breach(f"the observation is {_shape(value)}; expected str")
    if len(value) > _MAX_TEXT:
        raise Breach(f"an observation of {len(value)} characters; at most {_MAX_TEXT} bytes")
    return value
