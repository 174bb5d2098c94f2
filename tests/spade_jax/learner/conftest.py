"""One tiny model, compiled once for all learner tests, and trajectories that fit it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import make_trajectory
from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN
from models.sharding import build_mesh
from spade_jax.config import LearnerConfig
from spade_jax.learner.step import Learner
from spade_jax.types import Group, Role

MODEL = TransformerConfig(
    vocab_size=64,
    num_layers=2,
    embed=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp=16,
    num_experts=4,
    experts_per_token=2,
)


@pytest.fixture(scope="session")
def model() -> TransformerConfig:
    return MODEL


@pytest.fixture(scope="session")
def learner() -> Learner:
    """On one device."""
    mesh = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])
    return Learner(MODEL, LearnerConfig(lr=1e-2), mesh)


@pytest.fixture(scope="session")
def sharded_learner() -> Learner:
    """The same over eight devices, with every mesh axis but one in use."""
    return Learner(MODEL, LearnerConfig(lr=1e-2), build_mesh(2, 2, 1, 2))


@pytest.fixture(scope="session")
def scanned_learner() -> Learner:
    """On one device, with stacked layers and everything computed again in the backward pass."""
    mesh = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])
    execution = dataclasses.replace(PLAIN, layers="scanned", remat="full")
    return Learner(MODEL, LearnerConfig(lr=1e-2), mesh, execution=execution)


@pytest.fixture
def params():
    """Starting parameters, to be consumed; drawn by NumPy, which compiles nothing."""
    rng = np.random.default_rng(3)

    def draw(leaf) -> jax.Array:
        is_table = leaf.shape == (MODEL.vocab_size, MODEL.embed)
        std = 0.05 if is_table else 0.2
        value = rng.normal(0, std, leaf.shape) if leaf.ndim > 1 else rng.normal(1, 0.1, leaf.shape)
        return jnp.array(value, jnp.float32)

    return jax.tree.map(draw, transformer.abstract_params(MODEL))


@pytest.fixture(scope="session")
def groups() -> list[Group]:
    """Five trajectories of both roles: two temperatures, one stale, varied advantages."""
    rng = np.random.default_rng(0)

    def draw(length: int, prompt: int, **overrides):
        tokens = rng.integers(0, MODEL.vocab_size, length).astype(np.int32)
        logprobs = rng.normal(-4.0, 0.5, length).astype(np.float32)
        trajectory = make_trajectory(
            prompt,
            length - prompt,
            tokens=tokens,
            sampler_logprobs=logprobs,
            untruncated_logprobs=logprobs,
            **overrides,
        )
        trajectory.loss_mask[prompt + 2] = (
            False  # a token of the environment between two completions
        )
        return trajectory

    agent = (draw(10, 4), draw(20, 7, policy_version=-1), draw(15, 5))
    designer = (draw(30, 12, temperature=0.7), draw(12, 1, temperature=0.7))
    return [
        Group(Role.AGENT, "agent", agent, np.ones(3), np.array([1.4, -0.9, -0.5])),
        Group(Role.DESIGNER, "designer", designer, np.ones(2), np.array([-1.0, 1.0])),
    ]
