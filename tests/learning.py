"""A small task for whole learners: models, trajectories and starting weights that any process makes
alike, on any mesh.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from helpers import make_trajectory, pack_groups
from models import transformer
from models.config import TransformerConfig
from spade_jax.config import LearnerConfig
from spade_jax.learner.batch import Batch
from spade_jax.learner.step import Learner
from spade_jax.types import Group, Role

SIZES: dict[str, int] = {
    "vocab_size": 64,
    "num_layers": 2,
    "embed": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp": 16,
}
MODELS = {
    "dense": TransformerConfig(**SIZES, num_experts=1, experts_per_token=1),
    "moe": TransformerConfig(**SIZES, num_experts=4, experts_per_token=2),
}
CONFIG = LearnerConfig(lr=1e-4)


def draw_groups() -> list[Group]:
    """Eight trajectories of both roles, two of them stale."""
    rng = np.random.default_rng(0)

    def draw(length: int, prompt: int, **overrides: Any):
        tokens = rng.integers(0, SIZES["vocab_size"], length).astype(np.int32)
        logprobs = rng.normal(-4.0, 0.3, length).astype(np.float32)
        return make_trajectory(
            prompt, length - prompt, tokens=tokens, sampler_logprobs=logprobs, **overrides
        )

    agent = tuple(draw(10 + 3 * i, 4, policy_version=-(i // 3)) for i in range(5))
    designer = tuple(draw(20 + 4 * i, 8, temperature=0.7) for i in range(3))
    worth = np.array([1.4, -0.9, -0.5, 0.6, -0.6])
    return [
        Group(Role.AGENT, "agent", agent, np.ones(5), worth),
        Group(Role.DESIGNER, "designer", designer, np.ones(3), np.array([-1.0, 0.4, 0.6])),
    ]


def batch_for(learner: Learner) -> Batch:
    """The same trajectories, packed for the devices of a learner; off policy, so that ratios are
    not 1, clips bind and importance weights meet their cap.
    """
    batch = pack_groups(
        draw_groups(),
        32,
        max(1, 4 // learner.shards),
        weights=dict.fromkeys(Role, 1.0),
        learner=learner.config,
        shards=learner.shards,
        version=0,
    )
    # by the token alone, so that it is the same wherever the token is packed
    old = batch.rows.sampler_logprobs + 0.9 * np.sin(batch.rows.tokens).astype(np.float32)
    return dataclasses.replace(batch, rows=batch.rows._replace(old_logprobs=old))


def draw_params(model: TransformerConfig, places: Any = None) -> Any:
    """Starting weights, drawn by NumPy; on the devices of `places`, a sharding for each leaf."""
    rng = np.random.default_rng(3)

    def draw(leaf: Any) -> np.ndarray:
        is_table = leaf.shape == (model.vocab_size, model.embed)
        std = 0.05 if is_table else 0.2
        value = rng.normal(0, std, leaf.shape) if leaf.ndim > 1 else rng.normal(1, 0.1, leaf.shape)
        return value.astype(np.float32)

    drawn = jax.tree.map(draw, transformer.abstract_params(model))
    if places is None:
        return jax.tree.map(jax.numpy.asarray, drawn)
    return jax.tree.map(
        lambda value, place: jax.make_array_from_callback(value.shape, place, value.__getitem__),
        drawn,
        places,
    )


TOLD = ("loss/agent", "loss/designer", "optim/grad_norm", "loss/clip_frac", "loss/tis_clip_frac")


def three_updates(learner: Learner, params: Any) -> tuple[Any, list[list[float]]]:
    """The weights after three updates, and what each update reported, in the order of TOLD."""
    state, batch, told = learner.init(params), batch_for(learner), []
    for _ in range(3):
        state, metrics = learner.step(state, batch)
        told.append([metrics[name] for name in TOLD])
    return learner.policy(state), told
