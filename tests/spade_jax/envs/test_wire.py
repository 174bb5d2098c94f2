import json
import struct

import pytest

from spade_jax.envs.wire import MAX_DEPTH, MAX_FRAME_BYTES, Decoder, WireError, encode, loads


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def test_frame_is_little_endian_length_then_json():
    assert encode([1, "é", None, 0.5]) == b'\x15\x00\x00\x00[1,"\\u00e9",null,0.5]'


def test_messages_survive_any_cut_of_the_stream():
    messages = [[1, "ok", {"a": [True, None, -2.5]}], [2, "\ud800 lone", "☃"], []]
    stream = b"".join(map(encode, messages))
    for size in (1, 2, 5, len(stream)):
        decoder = Decoder()
        found = []
        for start in range(0, len(stream), size):
            found += map(loads, decoder.feed(stream[start : start + size]))
        assert found == messages
        assert not decoder.pending


@pytest.mark.parametrize("value", [float("nan"), float("inf"), b"bytes", {1, 2}, object()])
def test_what_is_not_finite_json_is_not_encoded(value: object):
    with pytest.raises((ValueError, TypeError)):
        encode([value])


@pytest.mark.parametrize(
    "body",
    [
        b"NaN",
        b"[-Infinity]",
        b"",
        b"[1",
        b"[1] x",
        b"[1] ",
        b" [1]",
        b"\xff",
        b"[" * 100_000,
        b"1" * 5000,
    ],
    ids=lambda body: repr(body[:8]),
)
def test_what_is_not_strict_json_is_refused(body: bytes):
    with pytest.raises(WireError):
        loads(body)


def test_nesting_is_bounded():
    value: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    (body,) = Decoder().feed(encode(value))
    assert loads(body) == value
    for depth in (MAX_DEPTH + 1, *range(900, 1001)):
        deep: object = ""
        for _ in range(depth):
            deep = (deep,)
        with pytest.raises(WireError, match="nested"):
            encode(deep)
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(WireError, match="nested"):
        encode(loop)


def test_length_is_checked_before_the_body_arrives():
    with pytest.raises(WireError, match=str(MAX_FRAME_BYTES + 1)):
        list(Decoder().feed(struct.pack("<I", MAX_FRAME_BYTES + 1)))
    decoder = Decoder()
    assert list(decoder.feed(struct.pack("<I", MAX_FRAME_BYTES))) == []
    assert decoder.pending


def test_largest_frame_passes_and_one_byte_more_does_not():
    text = "x" * (MAX_FRAME_BYTES - 2)
    assert [loads(body) for body in Decoder().feed(encode(text))] == [text]
    with pytest.raises(WireError):
        encode(text + "x")
    list(Decoder(100).feed(frame(b"x" * 100)))
    with pytest.raises(WireError, match="at most 100"):
        list(Decoder(100).feed(frame(b"x" * 101)))


def test_frames_before_a_bad_one_are_delivered():
    stream = Decoder().feed(encode([1]) + encode([2]) + struct.pack("<I", 2**31) + encode([3]))
    assert [next(stream), next(stream)] == [b"[1]", b"[2]"]
    with pytest.raises(WireError):
        next(stream)


def test_floats_keep_every_bit():
    (body,) = Decoder().feed(encode([0.1, 1e-300, -0.0]))
    assert json.dumps(loads(body)) == "[0.1, 1e-300, -0.0]"
