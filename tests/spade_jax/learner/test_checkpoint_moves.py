"""Checkpoints restored elsewhere: onto other meshes, into the other layout, into the memory of
the host.
"""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import pack_groups, tree_allclose
from models import layout, transformer
from models.execution import PLAIN
from models.sharding import build_mesh
from spade_jax.config import LearnerConfig
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner, TrainState

METADATA = {"run": {"seed": 3}}


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def filled(learner: Learner) -> TrainState:
    """A state of which no two arrays are alike, moments and counters included, as after updates."""
    rng = np.random.default_rng(7)

    def draw(leaf) -> jax.Array:
        value = rng.normal(size=leaf.shape) if leaf.shape else rng.integers(1, 1000)
        return jax.device_put(np.asarray(value).astype(leaf.dtype), leaf.sharding)

    state = jax.tree.map(draw, learner.abstract_state())
    assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(state))
    return state


def places(state: TrainState) -> list[jax.sharding.Sharding]:
    return [leaf.sharding for leaf in jax.tree.leaves(state)]


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def restores(checkpoints: Checkpoints, learner: Learner, step: int | None = None) -> TrainState:
    """Restore for a learner, to where it wants its state."""
    wanted = learner.abstract_state()
    _, restored, _ = checkpoints.restore(wanted, step)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    assert places(restored) == places(wanted)
    return restored


def test_restores_onto_another_mesh(learner, sharded_learner, tmp_path: Path) -> None:
    state = filled(learner)
    with Checkpoints(tmp_path, 1, METADATA) as checkpoints:
        checkpoints.save(0, state, {})
        restored = restores(checkpoints, sharded_learner)
    assert places(restored) != places(state) and bits(restored) == bits(state)


@pytest.mark.parametrize("saved", ["unrolled", "scanned"])
def test_moments_on_the_host_come_back_there(model, saved, tmp_path: Path) -> None:
    """From either layout into either: a resume does not fill the device with what was moved off."""
    mesh = build_mesh(1, 2, 1, 2, devices=jax.devices()[:4])
    learners = {
        layers: Learner(
            model,
            LearnerConfig(optimizer_memory="host"),
            mesh,
            dataclasses.replace(PLAIN, layers=layers),
        )
        for layers in ("unrolled", "scanned")
    }
    state = filled(learners[saved])
    with Checkpoints(tmp_path, 1, METADATA) as checkpoints:
        checkpoints.save(0, state, {})
        for layers, learner in learners.items():
            restored = restores(checkpoints, learner)
            moments = restored.opt_state[1][0]
            assert kinds((moments.mu, moments.nu)) == {"pinned_host"}
            assert kinds(restored.params) == {"device"}
            if layers == saved:
                assert bits(restored) == bits(state)
            else:
                assert bits(layout.per_layer(restored)) == bits(layout.per_layer(state))


@pytest.mark.slow
def test_goes_on_from_any_number_of_devices(model, groups, tmp_path: Path) -> None:
    """A dense model, trained on one device: the same weights on 1, 2 and 8, and the same next step
    up to the order of sums.
    """
    dense = dataclasses.replace(model, num_experts=1, experts_per_token=1)
    batches = [pack_groups(groups, version=version) for version in range(2)]

    def learner_on(*mesh: int) -> Learner:
        devices = jax.devices()[: math.prod(mesh)]
        return Learner(dense, LearnerConfig(lr=1e-2), build_mesh(*mesh, devices=devices))

    one = learner_on(1, 1, 1, 1)
    rng = np.random.default_rng(3)
    start = jax.tree.map(
        lambda leaf: jnp.array(rng.normal(0.1, 0.1, leaf.shape), jnp.float32),
        transformer.abstract_params(dense),
    )
    state, _ = one.step(one.init(start), batches[0])
    saved = bits(state)
    with Checkpoints(tmp_path, 1, METADATA) as checkpoints:
        checkpoints.save(0, state, {})
        state, expected = one.step(state, batches[1])
        for mesh in ((1, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 2)):
            learner = one if mesh == (1, 1, 1, 1) else learner_on(*mesh)
            _, restored, _ = checkpoints.restore(learner.abstract_state())
            assert bits(restored) == saved
            rows = 2 // learner.shards or 1
            batch = pack_groups(groups, version=1, rows=rows, shards=learner.shards)
            restored, metrics = learner.step(restored, batch)
            for name in ("loss/agent", "loss/designer", "optim/grad_norm"):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
            assert tree_allclose(
                jax.tree.map(np.asarray, restored.params),
                jax.tree.map(np.asarray, state.params),
                rtol=1e-4,
                atol=1e-4,
            )
            if learner is one:
                assert bits(restored) == bits(state)


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
        json.loads((tmp_path / step / "about.json").read_text())["arrays"] for step in ("0", "1")
    ]
    assert names[0] == names[1] and "params.blocks.1.moe.down.value" in names[0]

    state, expected = learner.step(back, batches[1])
    stacked, metrics = scanned_learner.step(stacked, batches[1])
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert tree_allclose(layout.per_layer(stacked), state, rtol=1e-5, atol=1e-5)
