"""`spade-jax checkpoints`: what it lists, what it finds damaged, and that it changes nothing."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
from bucket_stand_in import Store, bucket_store

from spade_jax.cli import main
from spade_jax.learner.checkpoint import FORMAT, Checkpoints, digest
from spade_jax.learner.manifest import FILES, SET_ASIDE
from spade_jax.learner.step import TrainState

METADATA = {"run.seed": 3, "model.embed": 8}


def fill(folder: str | Path, steps: int) -> None:
    state = TrainState({"w": jnp.ones((30, 50))}, (), jnp.int32(1), jnp.int32(0))  # type: ignore[arg-type]
    with Checkpoints(folder, 9, METADATA) as checkpoints:
        for step in range(steps):
            checkpoints.save(step, state, {"step": step})


def rows(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["step", "saved", "size", "format", "config", "state"]
    return [line.split(maxsplit=7) for line in lines]


def test_lists_and_verifies_every_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "checkpoints"
    fill(folder, 5)
    assert main(["checkpoints", str(tmp_path)]) == 0
    found = rows(capsys)
    assert [row[0] for row in found] == ["1", "2", "3", "4", "5"]
    for row in found:
        assert row[1].startswith("20") and row[4] == "MB" and row[5] == str(FORMAT)
        assert row[6] == digest(dict(reversed(METADATA.items()))) and row[7] == "whole"
    target = folder / "1" / "about.json"
    target.write_bytes(target.read_bytes().replace(b"8", b"9"))
    (folder / "2" / FILES).rename(folder / "2" / SET_ASIDE)
    (folder / "3" / FILES).unlink()
    (folder / "4" / FILES).write_text("[]")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["checkpoints", str(tmp_path)]) == 1
    assert [row[7] for row in rows(capsys)] == [
        "whole",
        "damaged: about.json does not match its checksum",
        "set aside",
        "not finished",
        "damaged: files.json is no list of files",
    ]
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_a_checkpoint_says_of_itself_is_shown_only_if_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    fill(tmp_path / "checkpoints", 1)
    about = tmp_path / "checkpoints" / "0" / "about.json"
    for said in (
        {"time": "now", "format": "3", "digest": "\x1b[31m"},
        {"time": -1, "format": None, "digest": ["a"]},
        [1],
    ):
        about.write_text(json.dumps(said))
        assert main(["checkpoints", str(tmp_path)]) == 1
        last = capsys.readouterr().out.splitlines()[1].split()
        assert (last[1], last[4], last[5]) == ("-", "-", "-")


def test_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text("{}")
    assert main(["checkpoints", str(tmp_path)]) == 0
    assert "no checkpoint yet" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with bucket_store(monkeypatch) as made:
        yield made


def test_a_run_in_a_bucket(store: Store, capsys: pytest.CaptureFixture[str]):
    fill("gs://bucket/runs/one/checkpoints", 2)
    assert main(["checkpoints", "gs://bucket/runs/one"]) == 0
    assert [row[7] for row in rows(capsys)] == ["whole", "whole"]
    del store.objects["bucket/runs/one/checkpoints/0/host.json"]
    assert main(["checkpoints", "gs://bucket/runs/one"]) == 1
    assert [row[7] for row in rows(capsys)] == ["damaged: host.json is missing", "whole"]
    assert main(["checkpoints", "gs://bucket/runs/two"]) == 2
    for part in ("runs/one", "checkpoints/1", "files.json", "/1/state", "about.json"):
        store.unreachable = part
        assert main(["checkpoints", "gs://bucket/runs/one"]) == 75
        assert "network is unreachable" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["", "checkpoints", "checkpoints/0", "other", "file://x", "~nobody_here"]
)
def test_what_is_no_run_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run" / "other").mkdir(parents=True)
    fill(tmp_path / "run" / "checkpoints", 1)
    run = name if not name or ":" in name or "~" in name else str(tmp_path / "run" / name)
    assert main(["checkpoints", run]) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("spade-jax: ") and "\n" not in message
    if name == "checkpoints":
        assert message.endswith(f"expected {tmp_path / 'run'}")


def test_odd_entries_hide_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "checkpoints"
    fill(folder, 4)
    (folder / "0" / "loose").symlink_to("nowhere")
    (folder / "0" / "around").symlink_to("/")
    (folder / "1" / "about.json").write_text("[" * 200_000)
    (folder / "2" / FILES).write_text(json.dumps({"\0": [1, 1], "\ud800": [1, 1]}))
    (folder / "7").write_text("a file")
    (folder / "01").mkdir()
    (folder / ("9" * 250)).mkdir()
    assert main(["checkpoints", str(tmp_path)]) == 1
    states = [(row[0], " ".join(row[7:])) for row in rows(capsys)]
    assert states[0] == ("1", "whole") and states[3] == ("4", "whole")
    assert "about.json has 200000 bytes" in states[1][1]
    assert "cannot be read" in states[2][1]
    assert len(states) == 4
