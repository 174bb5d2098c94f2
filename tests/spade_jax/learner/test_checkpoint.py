"""Checkpoints: bit-equal resume, saves that go on beside the run or are killed, damage to any file,
checkpoints of other runs.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import pack_groups
from spade_jax import processes
from spade_jax.errors import CheckpointError, StorageError
from spade_jax.learner import manifest
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.manifest import commit, find_damage, whole_steps
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


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from spade_jax.learner import manifest
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import TrainState

def die(*_):
    while not os.path.exists(os.path.join(sys.argv[1], "2")):
        pass
    os.kill(os.getpid(), signal.SIGKILL)

zero = jnp.int32(0)
state = lambda scale: TrainState({"matrix": jnp.full((300, 300), scale)}, (), zero, zero)
checkpoints = Checkpoints(sys.argv[1], 1, {})
checkpoints.save(1, state(1.0), {"step": 1})
checkpoints.wait()
if sys.argv[2] == "at its start":
    checkpoints._finish = die
elif sys.argv[2] == "before its list":
    manifest.flush = die
else:
    manifest.remove = die  # of the older one, when all is written
checkpoints.save(2, state(2.0), {"step": 2})
checkpoints.wait()
"""


@pytest.mark.parametrize("when", ["at its start", "before its list", "with the older one there"])
def test_a_killed_save_leaves_a_checkpoint(tmp_path: Path, when: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    child = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), when], env=environment, capture_output=True
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
    assert any(path.name != "1" for path in tmp_path.iterdir())  # the second save had begun
    state = TrainState({"matrix": jnp.zeros((300, 300))}, (), jnp.int32(0), jnp.int32(0))  # type: ignore[arg-type]
    found = 2 if when == "with the older one there" else 1
    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        assert checkpoints.latest() == found
        step, restored, host = checkpoints.restore(abstract(state))
        assert (step, host) == (found, {"step": found})
        assert float(restored.params["matrix"].min()) == found
        checkpoints.save(3, restored, {"step": 3})
        assert checkpoints.steps() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ["3"]  # and no leftovers


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """Two good checkpoints, to be copied and damaged."""
    folder = tmp_path_factory.mktemp("written")
    with Checkpoints(folder, 2, METADATA) as checkpoints:
        checkpoints.save(1, small_state(0.1), HOST)
        checkpoints.save(2, small_state(0.2), HOST)
    return folder


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    else:
        place = len(content) // 2 or 0
        flipped = bytes([content[place] ^ 0x10]) if content else b"x"
        path.write_bytes(content[:place] + flipped + content[place + 1 :])


@pytest.mark.parametrize("how", ["removed", "emptied", "truncated", "a byte flipped"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    written: Path, tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever file is hit."""
    num_files = len(files_of(written / "2"))
    assert num_files >= 8
    for index in range(num_files):
        folder = tmp_path / str(index)
        shutil.copytree(written, folder)
        target = files_of(folder / "2")[index]
        before = target.read_bytes()
        damage(target, how)
        if target.exists() and target.read_bytes() == before:  # empty, and left so
            continue
        caplog.clear()
        with Checkpoints(folder, 2, METADATA) as checkpoints:
            counts = not (how == "removed" and target.name == "files.json")
            assert checkpoints.steps() == ([1, 2] if counts else [1]), target
            if counts:
                with pytest.raises(CheckpointError, match=r"checkpoint .*/2 is damaged") as raised:
                    checkpoints.restore(abstract(small_state()), 2)
                assert "\n" not in str(raised.value), target
            step, restored, host = checkpoints.restore(abstract(small_state()))
            assert step == 1 and bits(restored) == bits(small_state(0.1)), target
            assert json.dumps(host) == json.dumps(HOST), target
            assert counts == ("2 is damaged" in caplog.text and "step 2" in caplog.text), target
            assert checkpoints.steps() == [1]
            if index == 0:
                checkpoints.save(2, restored, HOST)  # it has been played again
                assert checkpoints.steps() == [1, 2]
                assert find_damage(folder / "2") is None


def test_when_all_are_damaged_none_is_touched(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    for step in ("1", "2"):
        damage(tmp_path / "c" / step / "host.json", "emptied")
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        with pytest.raises(
            CheckpointError, match=r"2 is damaged: host.json has 0 .* so are the 1 before it"
        ):
            checkpoints.restore(abstract(small_state()))
        assert checkpoints.steps() == [1, 2]


def test_what_orbax_cannot_read_gives_way_too(written: Path, tmp_path: Path, caplog) -> None:
    """Nothing of a file is wrong, but the list is of other files."""
    shutil.copytree(written, tmp_path / "c")
    shutil.rmtree(tmp_path / "c" / "2" / "state")
    (tmp_path / "c" / "2" / "files.json").unlink()
    commit(tmp_path / "c" / "2")
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        assert checkpoints.restore(abstract(small_state()))[0] == 1
    assert "2 is damaged" in caplog.text


def test_of_several_processes_none_goes_back_alone(written, tmp_path, monkeypatch, caplog) -> None:
    """The newest is damaged in the share of files that another process has verified."""
    shutil.copytree(written, tmp_path / "c")
    with (tmp_path / "c" / "2" / "host.json").open("a") as file:
        file.write(" ")  # still to be read, but not what was written
    monkeypatch.setattr(processes, "dealt", lambda names: [n for n in names if n != "host.json"])
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        assert checkpoints.restore(abstract(small_state()))[0] == 2  # not in this one's share
        said = iter(["host.json is damaged", None])
        monkeypatch.setattr(
            processes, "exchange", lambda found: [found, next(said) if found is None else found]
        )
        assert checkpoints.restore(abstract(small_state()))[0] == 1
    assert "2 is damaged: host.json is damaged" in caplog.text


def test_a_step_folder_without_its_list_does_not_count(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    (tmp_path / "c" / "3").mkdir()
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        assert checkpoints.steps() == [1, 2]


def test_older_ones_are_kept_by_their_steps(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, 2, METADATA, keep_every=3) as checkpoints:
        for step in range(8):
            checkpoints.save(step, small_state(step), {})
        assert checkpoints.steps() == [2, 5, 6, 7]  # after 3, 6, 7 and 8 steps


def test_a_save_goes_on_while_the_state_and_the_host_change(tmp_path: Path, monkeypatch) -> None:
    """What is written is what there was when the save began, although the update donates it."""
    update = jax.jit(lambda state: jax.tree.map(lambda x: x + x, state), donate_argnums=0)
    weights = {"matrix": jnp.arange(600_000, dtype=jnp.float32).reshape(600, 1000)}
    state = TrainState(weights, (), jnp.int32(1), jnp.int32(0))  # type: ignore[arg-type]
    expected, host = bits(state), {"records": [1]}
    target = abstract(state)
    go_on = threading.Event()
    monkeypatch.setattr(manifest, "commit", lambda folder: (go_on.wait(30), commit(folder)))
    with Checkpoints(tmp_path, 2, METADATA) as checkpoints:
        checkpoints.save(1, state, host)
        host["records"].append(2)
        for _ in range(3):
            state = update(state)
        jax.block_until_ready(state)
        checkpoints.check()  # nothing has gone wrong
        assert whole_steps(tmp_path) == []  # it is under way
        go_on.set()
        assert checkpoints.steps() == [1]
        _, restored, found = checkpoints.restore(target)
    assert bits(restored) == expected and found == {"records": [1]}


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
    about = tmp_path / "c" / "2" / "about.json"
    about.write_text(about.read_text().replace('"format": 3', '"format": 9'))
    commit(tmp_path / "c" / "2")  # else the edit itself is noticed
    with Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints:
        with pytest.raises(CheckpointError, match="format 9, this program reads format 3"):
            checkpoints.restore(abstract(small_state()))
        assert checkpoints.steps() == [1, 2]  # what is not damaged is not passed over
    about.unlink()
    commit(tmp_path / "c" / "2")
    with (
        Checkpoints(tmp_path / "c", 2, METADATA) as checkpoints,
        pytest.raises(CheckpointError, match="format unknown"),
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
        with pytest.raises(StorageError, match=r"the disk has 10 left.*--resume"):
            checkpoints.save(0, small_state(), {})
        assert checkpoints.steps() == []


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with (
        pytest.raises(
            StorageError, match=r"cannot write checkpoint 2 .* No space left on device"
        ) as raised,
        Checkpoints(tmp_path, 1, {}) as checkpoints,
    ):
        checkpoints.save(1, small_state(), {})
        checkpoints.wait()
        monkeypatch.setattr(Path, "write_text", full)
        checkpoints.save(2, small_state(), {})
        with pytest.raises(StorageError, match="cannot write checkpoint 2"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]
        checkpoints.save(2, small_state(), {})  # leaving the block tells of this one
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["1"]  # the disk has its space back
    assert find_damage(tmp_path / "1") is None


def test_a_failed_save_does_not_hide_what_ends_the_run(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(manifest, "commit", lambda folder: 1 / 0)
    with pytest.raises(KeyError), Checkpoints(tmp_path, 1, {}) as checkpoints:
        checkpoints.save(1, small_state(), {})
        raise KeyError
    assert "cannot write checkpoint 1" in caplog.text


LIMITED = """
import resource, signal, sys
import jax.numpy as jnp
from spade_jax.errors import CheckpointError
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import TrainState

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond it fails, as on a full disk
zero = jnp.int32(0)
rows = jnp.arange(3_000_000.0)
state = lambda scale: TrainState({"matrix": rows * scale}, (), zero, zero)
with Checkpoints(sys.argv[1], 1, {}) as checkpoints:
    checkpoints.save(1, state(1.0), {})
    checkpoints.wait()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
    checkpoints.save(2, state(2.0), {})
    try:
        checkpoints.wait()
    except CheckpointError as error:
        print(error)
    print(checkpoints.steps())
"""


def test_writes_that_fail_beneath_orbax_harm_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}
    child = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    told, steps = child.stdout.splitlines()
    assert "cannot write checkpoint 2" in told and "then go on with --resume" in told
    assert steps == "[1]" and "Traceback" not in child.stderr
    assert find_damage(tmp_path / "1") is None
    left = [path.stat().st_size for path in (tmp_path / "2").rglob("*") if path.is_file()]
    assert (
        sum(left) < 1_000_000
    )  # a thread of Orbax's may have come after; the next save removes it
