"""Checkpoints: bit-equal resume, a killed save, damage to any file, checkpoints of other runs."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import pack_groups, tree_allclose
from models import layout
from spade_jax.errors import CheckpointError
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import TrainState

METADATA = {"run": {"seed": 3}, "model": {"embed": 32, "tied_head": True}}
HOST = {
    "floats": [0.1, 1e-320, -0.0, 1 / 3],
    "text": "π\n",
    "nested": {"none": None, "flag": True},
    "big": 2**60,
}


def small_state(scale: float = 1.0) -> TrainState:
    weights = {
        "matrix": jnp.arange(2000, dtype=jnp.float32).reshape(40, 50) * scale,
        "half": jnp.full((7,), scale, jnp.bfloat16),
        "flag": jnp.array([True, False]),
    }
    return TrainState(weights, (jnp.int32(5),), jnp.int32(2), jnp.int32(0))  # type: ignore[arg-type]


def abstract(state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_round_trip_keeps_every_bit(tmp_path: Path) -> None:
    state = small_state(1 / 3)
    rng = random.Random(0)
    host = HOST | {"draws": [rng.gauss(0, 10 ** rng.randint(-30, 30)) for _ in range(500)]}
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        assert checkpoints.latest() is None and checkpoints.steps() == []
        checkpoints.save(4, state, host)
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        step, restored, found = checkpoints.restore(abstract(state))
    assert step == 4 and bits(restored) == bits(state)
    assert json.dumps(found) == json.dumps(host) and str(found["floats"][2]) == "-0.0"
    assert jax.tree.structure(restored) == jax.tree.structure(state)


def test_keeps_the_newest_and_restores_any(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 2, METADATA) as checkpoints:
        for step in (1, 2, 10):
            checkpoints.save(step, small_state(step), {"step": step})
        assert checkpoints.steps() == [2, 10] and checkpoints.latest() == 10
        step, restored, host = checkpoints.restore(abstract(small_state()), 2)
        assert (step, host) == (2, {"step": 2}) and bits(restored) == bits(small_state(2))
        with pytest.raises(CheckpointError, match="already exists"):
            checkpoints.save(10, small_state(), {})
        with pytest.raises(CheckpointError, match=r"no checkpoint 1 in .* \[2, 10\]"):
            checkpoints.restore(abstract(small_state()), 1)


def test_resume_equals_uninterrupted(learner, groups, params, tmp_path: Path) -> None:
    batches = [pack_groups(groups, version=version) for version in range(3)]
    fresh = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    unbroken = learner.init(fresh)
    for batch in batches:
        unbroken, expected = learner.step(unbroken, batch)

    state = learner.init(params)
    for batch in batches[:2]:
        state, _ = learner.step(state, batch)
    with Checkpoints(tmp_path, 1, METADATA) as checkpoints:
        checkpoints.save(int(state.step), state, {})
    del state
    with Checkpoints(tmp_path, 1, METADATA) as checkpoints:
        step, state, _ = checkpoints.restore(learner.abstract_state())
    assert step == 2
    state, metrics = learner.step(state, batches[2])
    assert metrics == expected
    assert bits(state) == bits(unbroken)


def test_restores_onto_another_mesh(learner, sharded_learner, params, tmp_path: Path) -> None:
    state = learner.init(params)
    with Checkpoints(tmp_path, 1, METADATA) as checkpoints:
        checkpoints.save(0, state, {})
        _, restored, _ = checkpoints.restore(sharded_learner.abstract_state())
    wanted = sharded_learner.abstract_state()
    assert all(
        jax.tree.leaves(jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, wanted))
    )
    assert tree_allclose(
        jax.tree.map(np.asarray, restored), jax.tree.map(np.asarray, state), rtol=0, atol=0
    )


def test_moves_between_layouts(learner, scanned_learner, groups, params, tmp_path: Path) -> None:
    """Trained unrolled, restored scanned and back with every bit, moments and counters included;
    and the next step is the same from either.
    """
    batches = [pack_groups(groups, version=version) for version in range(2)]
    state, _ = learner.step(learner.init(params), batches[0])
    before = bits(state)
    with Checkpoints(tmp_path, 3, METADATA) as checkpoints:
        checkpoints.save(0, state, {})
        _, stacked, _ = checkpoints.restore(scanned_learner.abstract_state())
        assert layout.is_stacked(stacked.params)
        assert jax.tree.structure(stacked) == jax.tree.structure(scanned_learner.abstract_state())
        checkpoints.save(1, stacked, {})
        _, again, _ = checkpoints.restore(scanned_learner.abstract_state(), 1)
        assert bits(again) == bits(stacked)
        _, back, _ = checkpoints.restore(learner.abstract_state(), 1)
        assert bits(back) == before
    names = [
        json.loads((tmp_path / step / "about" / "metadata").read_text())["arrays"]
        for step in ("0", "1")
    ]
    assert names[0] == names[1] and "params.blocks.1.moe.down.value" in names[0]

    state, expected = learner.step(back, batches[1])
    stacked, metrics = scanned_learner.step(stacked, batches[1])
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert tree_allclose(layout.per_layer(stacked), state, rtol=1e-5, atol=1e-5)


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import TrainState

class Bomb(dict):
    def items(self):  # called by json.dumps, in the middle of Orbax's writing
        os.kill(os.getpid(), signal.SIGKILL)

zero = jnp.int32(0)
state = lambda scale: TrainState({"matrix": jnp.full((300, 300), scale)}, (), zero, zero)
checkpoints = Checkpoints(sys.argv[1], 1, {})
checkpoints.save(1, state(1.0), {"step": 1})
checkpoints.save(2, state(2.0), Bomb(step=2))
"""


def test_a_killed_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], env=environment, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert any(path.name != "1" for path in tmp_path.iterdir())  # the second save had begun
    state = TrainState({"matrix": jnp.zeros((300, 300))}, (), jnp.int32(0), jnp.int32(0))  # type: ignore[arg-type]
    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        assert checkpoints.steps() == [1]
        step, restored, host = checkpoints.restore(abstract(state))
        assert (step, host) == (1, {"step": 1}) and float(restored.params["matrix"].min()) == 1.0
        checkpoints.save(2, restored, {"step": 2})
        assert checkpoints.steps() == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["2"]  # and no leftovers


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Two good checkpoints, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("written")
    with Checkpoints(folder, 2, METADATA) as checkpoints:
        checkpoints.save(1, small_state(0.1), HOST)
        checkpoints.save(2, small_state(0.2), HOST)
    return folder


def files_of(folder: Path) -> list[Path]:
    """The files that hold something of ours: not Orbax's markers and notes."""
    notes = {"commit_success.txt", "_CHECKPOINT_METADATA", "_sharding"}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in notes)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        middle = len(content) // 2
        flipped = bytes(byte ^ 0x15 for byte in content[middle : middle + 40])
        path.write_bytes(content[:middle] + flipped + content[middle + 40 :])


@pytest.mark.parametrize("how", ["removed", "emptied", "truncated", "garbled"])
def test_damage_is_one_clear_error_or_harmless(written: Path, tmp_path: Path, how: str) -> None:
    """Whichever file is hit, the checkpoint is refused, or restores to the very same bits."""
    refused = 0
    for index, _ in enumerate(files_of(written / "2")):
        folder = tmp_path / str(index)
        shutil.copytree(written, folder)
        target = files_of(folder / "2")[index]
        damage(target, how)
        with Checkpoints(folder, 2, METADATA) as checkpoints:
            try:
                _, restored, host = checkpoints.restore(abstract(small_state()))
            except CheckpointError as error:
                assert "damaged" in str(error) and "\n" not in str(error), target
                assert "resume from 1" in str(error)
                refused += 1
            else:
                assert bits(restored) == bits(small_state(0.2)), target
                assert json.dumps(host) == json.dumps(HOST), target
            _, older, _ = checkpoints.restore(abstract(small_state()), 1)
            assert bits(older) == bits(small_state(0.1))
    assert refused >= index  # all but the list of checksums itself, which may be absent


def test_an_empty_step_folder_is_refused(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "2")
    (tmp_path / "c" / "2").mkdir()
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        if checkpoints.latest() == 2:
            with pytest.raises(CheckpointError, match="damaged"):
                checkpoints.restore(abstract(small_state()))
        else:
            assert checkpoints.steps() == [1]


def test_wrong_run_model_or_format(written: Path, tmp_path: Path) -> None:
    other = {"run": {"seed": 4}, "model": {"embed": 32}}
    with (
        Checkpoints(written, 2, other) as checkpoints,
        pytest.raises(
            CheckpointError,
            match=r"another run: model.tied_head is True there and 'absent' here; "
            r"run.seed is 3 there and 4 here",
        ),
    ):
        checkpoints.restore(abstract(small_state()))
    with Checkpoints(written, 2, METADATA) as checkpoints:
        state = small_state()
        weights = {"matrix": state.params["matrix"][:20], "flag": state.params["flag"]}
        with pytest.raises(
            CheckpointError,
            match=r"another model: params.half is bfloat16\[7\] there and absent here; "
            r"params.matrix is float32\[40, 50\] there and float32\[20, 50\] here",
        ):
            checkpoints.restore(abstract(state._replace(params=weights)))  # type: ignore[arg-type]
    shutil.copytree(written, tmp_path / "c")
    about = tmp_path / "c" / "2" / "about" / "metadata"
    about.write_text(about.read_text().replace('"format": 2', '"format": 9'))
    (tmp_path / "c" / "2" / "files.json").unlink()  # else the edit itself is noticed
    with (
        Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints,
        pytest.raises(CheckpointError, match="format 9"),
    ):
        checkpoints.restore(abstract(small_state()))


def test_no_checkpoint_and_no_folder(tmp_path: Path) -> None:
    with (
        Checkpoints(tmp_path, 1, {}) as checkpoints,
        pytest.raises(CheckpointError, match="it holds none"),
    ):
        checkpoints.restore(abstract(small_state()))
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="cannot open the checkpoint folder"):
        Checkpoints(tmp_path / "file", 1, {})


def test_too_little_room_is_seen_before_orbax_meets_it(tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        with pytest.raises(CheckpointError, match=r"the disk has 10 left.*--resume"):
            checkpoints.save(0, small_state(), {})
        assert checkpoints.steps() == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch) -> None:
    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        checkpoints.save(1, small_state(), {})

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_text", full)
        monkeypatch.setattr("etils.epath.gpath.PosixGPath.write_text", full)
        with pytest.raises(
            CheckpointError, match=r"cannot write checkpoint 2 .* No space left on device"
        ):
            checkpoints.save(2, small_state(), {})
        monkeypatch.undo()
        assert checkpoints.steps() == [1]
