"""Frames between trainer, supervisor and workers: four bytes of length, then a fixed head, then
strict JSON. Standard library only.

Requests travel in batches: all that is waiting for one worker goes to it in one frame, and its
answers come back in as few. The heads are what the supervisor acts on; the JSON behind them passes
through it unread, from the one who wrote it to the one who judges it. Nothing is ever unpickled,
and an announced length is checked before anything is kept. What JSON means, and that a number in it
lies in its range, is for the reader to say.

    trainer    -> supervisor   ORDER  + [[operation, instance, ...], ...]
    supervisor -> worker       NUMBER + the same
    worker     -> supervisor   REPLY  + a processor clock per answer + [[status, value], ...]
    supervisor -> trainer      NOTICE + processor seconds per answer + the same, or a text
"""

import json
import struct
from collections.abc import Iterator
from typing import Any

MAX_FRAME_BYTES = 1 << 20
MAX_REPLY_BYTES = MAX_FRAME_BYTES - 64  # of a worker: the supervisor puts a longer head before it
MAX_DEPTH = 3  # containers in one another; a list in an answer in its list
ASK, SPAWN, KILL = range(3)  # kinds of order; a spawn's batch is the replica
ANSWERS, FAULT, IDLE, WORN, READY, MEMORY = range(6)  # kinds of notice
# Kind, worker, number of requests, limit in seconds of each, batch. The batch stands last because
# what the worker gets begins with it.
ORDER = struct.Struct("<BIHdI")
NUMBER = struct.Struct("<I")  # batch
REPLY = struct.Struct("<IH")  # batch, number of answers
NOTICE = struct.Struct("<BIIHd")  # kind, batch, worker, count or index, seconds since the order
PROGRESS = struct.Struct("<ddII")  # what a worker is at: since when, clock then, batch, index
_SIZE = struct.Struct("<I")


class WireError(Exception):
    """Bytes that are not a valid frame."""


def frame(head: bytes, body: bytes = b"", max_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """One frame.

    Raises:
        WireError: it would be too large.
    """
    size = len(head) + len(body)
    if size > max_bytes:
        raise WireError(f"a frame of more than {max_bytes} bytes")
    return _SIZE.pack(size) + head + body


def encode(message: Any) -> bytes:
    """One frame without a head."""
    return frame(dumps(message))


_encoder = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))
# What `_encoder.encode` makes anew at each call, which takes longer than what it then does.
_ascii = json.encoder.encode_basestring_ascii
_chunks = json.encoder.c_make_encoder(  # pyright: ignore[reportAttributeAccessIssue]
    None, _encoder.default, _ascii, None, ":", ",", False, False, False
)


def dumps(message: Any) -> bytes:
    """JSON of a message. ASCII escapes keep lone surrogates, which UTF-8 cannot hold.

    Raises:
        ValueError, TypeError: the message holds NaN, infinity or something that is not JSON.
        WireError: it is too deep: the reader's stack may be fuller than the writer's.
    """
    if not _shallow(message, MAX_DEPTH):
        raise WireError(f"a message nested more than {MAX_DEPTH} deep")
    return dumps_shallow(message)


def dumps_shallow(message: Any) -> bytes:
    """`dumps` of a message that is known not to be deep."""
    return "".join(_chunks(message, 0)).encode("ascii")


class Decoder:
    """Cuts a stream into frames; an announced length is checked before anything is kept."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    @property
    def pending(self) -> bool:
        """Whether an unfinished frame is waiting for more bytes."""
        return bool(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """What the frames that `data` completes hold.

        Raises:
            WireError: when it comes to a frame that is too large.
        """
        if not self._buffer and len(data) >= _SIZE.size:  # as a rule it is one whole frame
            (size,) = _SIZE.unpack_from(data)
            if size + _SIZE.size == len(data) and size <= self._max_bytes:
                return iter((data[_SIZE.size :],))
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        kept = self._buffer
        if kept:
            kept += data
        stream, start = kept or data, 0
        try:
            while len(stream) - start >= _SIZE.size:
                (size,) = _SIZE.unpack_from(stream, start)
                if size > self._max_bytes:
                    raise WireError(f"a frame announces {size} bytes; at most {self._max_bytes}")
                end = start + _SIZE.size + size
                if end > len(stream):
                    break
                body = bytes(stream[start + _SIZE.size : end])
                start = end
                yield body
        finally:
            if stream is kept:
                del kept[:start]
            else:
                kept += data[start:]


def _refuse(constant: str) -> None:
    raise WireError(f"{constant} in a frame")


_parse = json.JSONDecoder(parse_constant=_refuse).raw_decode


def loads(body: bytes) -> Any:
    """The value of strict JSON.

    Raises:
        WireError: it is not, or it is too deep to be read.
    """
    try:
        text = body.decode("utf-8")
        value, end = _parse(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON: {type(error).__name__}") from error
    if end != len(text):
        raise WireError("a frame is not JSON: something follows it")
    return value


def _shallow(value: Any, room: int) -> bool:
    """Whether at most `room` containers are in one another."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return True
    return room > 0 and all(_shallow(item, room - 1) for item in value)
