"""JSON of a checkpoint: only plain files of a sane size are opened."""

import os
from pathlib import Path

import pytest

from models import json_file
from models.config import read_config
from models.errors import ModelError
from models.tokenizer import load_tokenizer


def test_json_is_read(tmp_path: Path):
    (tmp_path / "x.json").write_text('{"a": ["\u00e9"]}', encoding="utf-8")
    assert json_file.read_json(tmp_path / "x.json") == {"a": ["\u00e9"]}


@pytest.mark.parametrize("text", [b"", b"{", b"\xff{}", b"[" * 100_000, b"1" * 5000])
def test_what_is_not_json_is_a_value_error(tmp_path: Path, text: bytes):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ValueError, match=r"."):
        json_file.read_json(tmp_path / "x.json")


def test_pipes_and_devices_are_not_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "config.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for name in ("config.json", "zero.json"):
        with pytest.raises(ValueError, match="not a plain file"):
            json_file.read_json(tmp_path / name)
    with pytest.raises(ModelError, match="not a plain file"):
        read_config(tmp_path)


def test_a_huge_file_is_not_read(tmp_path: Path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # sparse: it takes no room on the disk
    with pytest.raises(ModelError, match=f"it has {2**40} bytes"):
        load_tokenizer(tmp_path)
