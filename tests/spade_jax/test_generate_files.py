"""The files of `spade-jax generate`: in order, whole, and none left where none was made."""

import json
from pathlib import Path

import pytest

from spade_jax.errors import SpadeError
from spade_jax.generate.files import Completions, read_prompts


def test_completions_are_written_in_order_as_soon_as_they_can_be(tmp_path):
    path = tmp_path / "out"
    with Completions(path, overwrite=False, inputs=[]) as out:
        out.put(2, {"n": 2})
        assert path.read_text() == ""
        out.put(0, {"n": 0})
        assert path.read_text() == '{"n": 0}\n' and out.num_written == 1
        out.put(1, {"n": 1})
        assert out.num_written == 3
    assert [json.loads(line)["n"] for line in path.read_text().splitlines()] == [0, 1, 2]
    with Completions(path, overwrite=True, inputs=[]) as out:
        out.put(0, {"n": 9})
    assert path.read_text() == '{"n": 9}\n'
    other = tmp_path / "other"
    with pytest.raises(SpadeError), Completions(other, overwrite=False, inputs=[]):
        raise SpadeError("the weights cannot be read")
    assert not other.exists()
    with (
        pytest.raises(SpadeError, match="cannot be written: No space left"),
        Completions(Path("/dev/full"), overwrite=True, inputs=[]) as out,
    ):
        out.put(0, {})


def test_a_byte_order_mark_is_no_text(tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n')
    assert list(read_prompts(path)) == [(1, "text", "a")]
