import json
import struct

import pytest

from spade_jax.envs.wire import MAX_DEPTH, MAX_FRAME_BYTES, Decoder, WireError, encode


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
            found += decoder.feed(stream[start : start + size])
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
        b"[1e999]",
        b"",
        b"[1",
        b"[1] x",
        b"\xff",
        b"[" * 100_000,
        b"1" * 5000,
    ],
    ids=lambda body: repr(body[:8]),
)
def test_what_is_not_strict_json_is_refused(body: bytes):
    with pytest.raises(WireError):
        list(Decoder().feed(frame(body)))


def test_nesting_is_bounded_on_both_sides():
    value: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        value = [value]
    assert list(Decoder().feed(encode(value))) == [value]
    for depth in (MAX_DEPTH + 1, *range(900, 1001)):
        with pytest.raises(WireError):  # for some depths the parser gives up first
            list(Decoder().feed(frame(b"[" * depth + b"]" * depth)))
        with pytest.raises(WireError):
            list(Decoder().feed(frame(b'{"a":' * depth + b"1" + b"}" * depth)))
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
    assert list(Decoder().feed(encode(text))) == [text]
    with pytest.raises(WireError):
        encode(text + "x")


def test_messages_before_a_bad_frame_are_delivered():
    stream = Decoder().feed(encode([1]) + encode([2]) + frame(b"?") + encode([3]))
    assert [next(stream), next(stream)] == [[1], [2]]
    with pytest.raises(WireError):
        next(stream)


def test_floats_keep_every_bit():
    (value,) = Decoder().feed(encode([0.1, 1e-300, -0.0]))
    assert json.dumps(value) == "[0.1, 1e-300, -0.0]"
