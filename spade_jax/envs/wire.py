"""Frames between trainer, supervisor and workers: four bytes of length, then strict JSON. Standard
library only.

Nothing is ever unpickled. What a frame means is for its two ends to say; that it is small, shallow,
finite JSON is checked here, on both sides: what one process can just parse must not be too deep for
the next one, whose stack is fuller.
"""

import json
import math
import struct
from collections.abc import Iterator
from typing import Any

MAX_FRAME_BYTES = 1 << 20
MAX_DEPTH = 3  # containers in one another; a list in a reply in its envelope
_HEADER = struct.Struct("<I")


class WireError(Exception):
    """Bytes that are not a valid frame."""


def encode(message: Any) -> bytes:
    """One frame. ASCII escapes keep lone surrogates, which UTF-8 cannot hold.

    Raises:
        ValueError, TypeError: the message holds NaN, infinity or something that is not JSON.
        WireError: the frame would be too large or too deep.
    """
    if not _shallow(message, MAX_DEPTH):
        raise WireError(f"a frame nested more than {MAX_DEPTH} deep")
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a frame of more than {MAX_FRAME_BYTES} bytes")
    return _HEADER.pack(len(body)) + body


class Decoder:
    """Cuts a stream into messages; an announced length is checked before anything is kept."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether an unfinished frame is waiting for more bytes."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes.

        Raises:
            WireError: a frame is too large, too deep or not strict JSON; the messages before it
            have been yielded.
        """
        buffer, start = self._buffer, 0
        buffer += data
        try:
            while len(buffer) - start >= _HEADER.size:
                (size,) = _HEADER.unpack_from(buffer, start)
                if size > MAX_FRAME_BYTES:
                    raise WireError(f"a frame announces {size} bytes; at most {MAX_FRAME_BYTES}")
                end = start + _HEADER.size + size
                if end > len(buffer):
                    break
                body = bytes(buffer[start + _HEADER.size : end])
                start = end
                yield _parse(body)
        finally:
            del buffer[:start]


def _refuse(constant: str) -> None:
    raise WireError(f"{constant} in a frame")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):  # 1e999 is valid JSON
        raise WireError(f"{text[:20]} in a frame is not finite")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _parse(body: bytes) -> Any:
    try:
        message = _DECODER.decode(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {type(error).__name__}") from error
    if not _shallow(message, MAX_DEPTH):
        raise WireError(f"a frame nested more than {MAX_DEPTH} deep")
    return message


def _shallow(value: Any, room: int) -> bool:
    """Whether at most `room` containers are in one another."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return True
    return room > 0 and all(_shallow(item, room - 1) for item in value)
