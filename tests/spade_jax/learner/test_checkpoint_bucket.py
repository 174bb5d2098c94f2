"""Checkpoints in a bucket, which is a stand-in: written, listed, restored and kept by Orbax."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from bucket_stand_in import Store, bucket_store

from spade_jax.errors import StorageError
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import TrainState

FOLDER = "gs://bucket/runs/one/checkpoints"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with bucket_store(monkeypatch) as made:
        yield made


def make_state(value: float) -> TrainState:
    return TrainState({"w": jnp.full((3, 5), value)}, (), jnp.int32(value), jnp.int32(0))


def test_comes_back_from_the_bucket_on_another_machine(store: Store):
    with Checkpoints(FOLDER, 2, {"run.seed": 3}) as checkpoints:
        for step in range(3):
            checkpoints.save(step, make_state(step), {"version": step})
        assert checkpoints.steps() == [1, 2]
    assert {name.split("/")[3] for name in store.objects} == {"checkpoints"}
    with Checkpoints(FOLDER, 2, {"run.seed": 3}) as checkpoints:
        step, state, host = checkpoints.restore(make_state(9))
    assert (step, host) == (2, {"version": 2})
    np.testing.assert_array_equal(state.params["w"], np.full((3, 5), 2.0))


def test_a_save_that_was_cut_off_is_not_a_checkpoint(store: Store):
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        checkpoints.save(0, make_state(0), {})
        checkpoints.save(1, make_state(1), {})
    (mark,) = [name for name in store.objects if name.endswith("/1/files.json")]
    del store.objects[mark]
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        assert checkpoints.latest() == 0
        checkpoints.save(1, make_state(5), {})
        assert checkpoints.restore(make_state(9))[0] == 1


def test_a_checkpoint_with_an_object_gone_gives_way_to_the_one_before(
    store: Store, caplog: pytest.LogCaptureFixture
):
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        checkpoints.save(0, make_state(0), {"step": 0})
        checkpoints.save(1, make_state(1), {"step": 1})
    gone = max(store.names(FOLDER.removeprefix("gs://") + "/1/state/"))
    del store.objects[gone]
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        assert checkpoints.latest() == 1
        step, state, host = checkpoints.restore(make_state(9))
        assert (step, host) == (0, {"step": 0}) and float(state.params["w"][0, 0]) == 0
        assert "checkpoints/1 is damaged" in caplog.text and "is missing" in caplog.text
        assert checkpoints.latest() == 0
        checkpoints.save(1, make_state(5), {})
        assert checkpoints.steps() == [0, 1]


def test_a_bucket_that_refuses_is_one_clear_line(store: Store):
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        store.deny = "may not write"
        with pytest.raises(StorageError, match=r"cannot write checkpoint 0 in gs://bucket.*may"):
            checkpoints.save(0, make_state(0), {})
            checkpoints.wait()
        assert checkpoints.latest() is None


@pytest.mark.parametrize(
    "part", ["checkpoints", "checkpoints/1", "1/files.json", "1/state", "1/about.json"]
)
def test_a_bucket_that_does_not_answer_is_not_a_damaged_checkpoint(store: Store, part: str):
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        checkpoints.save(0, make_state(0), {})
        checkpoints.save(1, make_state(1), {})
    before = dict(store.objects)
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        store.unreachable = part
        with pytest.raises(StorageError, match=r"cannot reach gs://.*network.*--resume"):
            checkpoints.restore(make_state(9))
        store.unreachable = ""
        assert store.objects == before  # none was set aside
        assert checkpoints.restore(make_state(9))[0] == 1


def test_a_read_that_breaks_off_is_not_a_damaged_checkpoint(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    with Checkpoints(FOLDER, 2, {}) as checkpoints:
        checkpoints.save(0, make_state(0), {})
        checkpoints.save(1, make_state(1), {})
        checkpoints.wait()
        before = dict(store.objects)

        def breaks_off(*_: object, **__: object) -> None:
            raise ValueError("UNAVAILABLE: Error reading")

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints._orbax, "restore", breaks_off)
            with pytest.raises(StorageError, match=r"checkpoints/1 cannot be read: .*UNAVAIL"):
                checkpoints.restore(make_state(9))
        assert store.objects == before
        assert checkpoints.restore(make_state(9))[0] == 1
