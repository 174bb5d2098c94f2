"""benchmarks/kill.py sees every kind of difference between two runs, and a save under way."""

import json
import shutil
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.kill import _saving, differences
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import TrainState


def make_run(folder: Path, weight: float = 1.0, memory: str = "a") -> Path:
    state = TrainState({"w": jnp.full(3, weight)}, (), jnp.int32(1), jnp.int32(0))  # type: ignore[arg-type]
    with Checkpoints(folder / "checkpoints", 2, {}) as checkpoints:
        for step in range(2):
            checkpoints.save(step, state, {"memory": memory})
    for kind in ("episodes", "environments/000", "rejected/000"):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "file").write_text(kind)
    line = {"progress/step": 0, "loss/agent": 0.5, "time/step_s": time.monotonic()}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "alone")


def test_what_a_second_run_repeats_is_equal(alone: Path, tmp_path: Path):
    assert list(differences(alone, make_run(tmp_path / "run"))) == []


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"weight": 1.0000001}, "weights"),
        ({"memory": "b"}, "host"),
        ({"weight": -1.0, "memory": "b"}, "host|weights"),
    ],
)
def test_another_state_is_seen(alone: Path, tmp_path: Path, change, seen: str):
    found = list(differences(alone, make_run(tmp_path / "run", **change)))
    assert len(found) == len(seen.split("|"))
    assert all(part in text for part, text in zip(seen.split("|"), found, strict=True))


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("episodes/file", "episodes"),
        ("environments/000/file", "environments"),
        ("rejected/000/file", "rejected"),
        ("checkpoints/1/about.json", "the newest checkpoint"),
        ("checkpoints/1/files.json", "the newest checkpoint"),
    ],
)
def test_another_file_is_seen(alone: Path, tmp_path: Path, name: str, seen: str):
    run = shutil.copytree(alone, tmp_path / "run")
    path = run / name
    if name.endswith("files.json"):
        path.unlink()
    else:
        path.write_bytes(path.read_bytes().replace(b"0", b"1") + b"\n")
    assert list(differences(alone, run)) == [seen]


def test_another_figure_is_seen_and_another_time_is_not(alone: Path, tmp_path: Path):
    run = shutil.copytree(alone, tmp_path / "run")
    for name, differing in (("time/step_s", []), ("loss/agent", ["metrics"])):
        line = json.loads((run / "metrics.jsonl").read_text())
        (run / "metrics.jsonl").write_text(json.dumps(line | {name: 0.25}) + "\n")
        assert list(differences(alone, run)) == differing


def test_a_save_under_way_is_told_from_what_a_kill_left(tmp_path: Path):
    root = tmp_path / "checkpoints"
    (root / "3").mkdir(parents=True)
    assert _saving(tmp_path, 0.0)
    assert not _saving(tmp_path, time.time() + 1)
    (root / "3" / "files.json").touch()
    assert not _saving(tmp_path, 0.0)
