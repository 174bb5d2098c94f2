"""Who may write a folder of converted weights: one process at a time, and nobody by chance."""

import contextlib
import fcntl
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from models import stored
from models.errors import ModelError


def test_two_do_not_write_one_folder(tmp_path: Path):
    with (
        stored.new_folder(tmp_path / "target"),
        pytest.raises(ModelError, match="being written by another process"),
        stored.new_folder(tmp_path / "target"),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_lock_whose_name_is_gone_is_no_lock(tmp_path: Path, monkeypatch):
    """The holder removes its lock between our opening the file and our locking it."""
    path, flock, calls = tmp_path / ".target.lock", fcntl.flock, []

    def late(file, how):
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
        flock(file, how)

    monkeypatch.setattr(stored.fcntl, "flock", late)
    with stored.new_folder(tmp_path / "target"):
        assert len(calls) == 2 and path.exists()
        with pytest.raises(ModelError, match="being written by another process"):
            stored._take(tmp_path / "target")


@pytest.mark.parametrize("name", ["x" * 254, "file/x", "loop/x"])
def test_a_place_that_cannot_be_made_is_told(tmp_path: Path, name: str):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    with (
        pytest.raises(ModelError, match="cannot be made"),
        stored.new_folder(tmp_path / name),
    ):
        pass


def test_a_file_without_a_checksum_is_refused(tmp_path: Path):
    (tmp_path / "weights" / "outer").mkdir(parents=True)
    stored.finish(tmp_path, {})
    stored.check_files(tmp_path)
    (tmp_path / "weights" / "outer" / "more").touch()
    with pytest.raises(ModelError, match="does not name weights/outer/more"):
        stored.check_files(tmp_path)
    (tmp_path / stored.FILES).write_text("{}")
    with pytest.raises(ModelError, match="does not name"):
        stored.check_files(tmp_path)


def test_a_disk_that_fills_meanwhile_is_told(tmp_path: Path, monkeypatch):
    class Usage:
        free = 1000

    with (
        pytest.raises(ModelError, match=r"No space left on device.*; free some space"),
        stored.new_folder(tmp_path / "target") as folder,
    ):
        monkeypatch.setattr(stored.shutil, "disk_usage", lambda path: Usage)
        stored.write_group(folder, "outer", {"head": np.zeros(251, np.float32)})
    assert not list(tmp_path.iterdir())


def test_what_is_still_being_written_is_removed_as_well(tmp_path: Path):
    """As by the threads of a save that has failed."""
    started = threading.Event()

    def write_on(folder: Path) -> None:
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                (folder / str(time.monotonic_ns())).touch()
                started.set()

    with (
        pytest.raises(ModelError, match="cannot be written"),
        stored.new_folder(tmp_path / "target") as folder,
    ):
        (folder / "weights").mkdir()
        writer = threading.Thread(target=write_on, args=(folder / "weights",))
        writer.start()
        started.wait()
        raise OSError("full")
    writer.join()
    assert not list(tmp_path.iterdir())
