"""The far end of a worker's channel: loads one program and answers requests for its instances.
Standard library only.

Everything here shares an interpreter with the generated program and can be changed by it, so
nothing here is trusted: deadlines, numbering and the final word on every reply belong to the
supervisor and the pool. The checks made here only give an honest program's mistake its right name.
A program's `close()` is never called.
"""

import re
import socket
import struct
import sys
import time
import types
from typing import Any

from spade_jax.envs import wire

HELLO = 0  # number of the frame that a worker sends unasked, once it is confined
MODULE = "environment"  # the name a program is loaded under
_MAX_TEXT = 1 << 18  # longer observations are refused before they are encoded
_MAX_DETAIL = 200
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


def serve(channel: int) -> None:
    """Answer requests `[number, operation, ...]` with `[number, status, value, cpu_s]` until the
    channel closes; `cpu_s` is the processor time of this process when it had done the work.

    Each reply is written before the next request is begun: the first request without a reply is the
    guilty one.
    """
    host = Host()
    connection = socket.socket(fileno=channel)
    decoder = wire.Decoder()
    while data := connection.recv(1 << 16):
        for number, operation, *arguments in decoder.feed(data):
            try:
                frame = _answer(host, number, operation, arguments)
            except Exception:  # the program has changed what this side needs, such as isinstance
                body = b'[%d,"env_error","%b: it broke its worker",%r]'
                body %= (number, operation.encode(), time.process_time())
                frame = struct.pack("<I", len(body)) + body
            connection.sendall(frame)


def _answer(host: Host, number: int, operation: str, arguments: list[Any]) -> bytes:
    status = "ok"
    try:
        value = getattr(host, operation)(*arguments)
    except Breach as error:
        status, value = "schema", str(error)[:_MAX_DETAIL]
    except BaseException as error:  # SystemExit and the like are the program's errors too
        status, value = "env_error", f"{operation}: {_describe(error)}"[:_MAX_DETAIL]
    cpu_s = time.process_time()
    try:
        return wire.encode([number, status, value, cpu_s])
    except (TypeError, ValueError, RecursionError, MemoryError, wire.WireError) as error:
        detail = f"{operation} returned a value that is not small plain data: {_describe(error)}"
        return wire.encode([number, "schema", detail[:_MAX_DETAIL], cpu_s])


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
