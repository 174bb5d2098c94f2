import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from models.sharding import build_mesh, param_shardings
from spade_jax.rollout import spread, weights

DENSE = TransformerConfig(
    vocab_size=16,
    num_layers=2,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=8,
    num_experts=1,
    experts_per_token=1,
)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, experts_per_token=2, tied_head=False)
SCANNED = dataclasses.replace(PLAIN, layers="scanned", compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("model", "execution", "learner_sizes", "sampler_sizes"),
    [
        (DENSE, PLAIN, (1, 8, 1, 1), (1, 1, 1, 4)),
        (EXPERTS, SCANNED, (1, 4, 2, 1), (1, 1, 2, 2)),
        (EXPERTS, SCANNED, (2, 2, 1, 2), (1, 1, 4, 1)),
    ],
)
def test_each_host_gets_the_weights_in_the_layout_of_its_mesh(
    model: TransformerConfig,
    execution: Execution,
    learner_sizes: tuple[int, ...],
    sampler_sizes: tuple[int, ...],
):
    """Two hosts, whose devices lie apart in the learner's mesh and in their own are turned."""
    learner = build_mesh(*learner_sizes)
    hosts = [jax.devices()[start::2][::-1] for start in (0, 1)]
    samplers = [build_mesh(*sampler_sizes, devices=devices) for devices in hosts]

    def draw(leaf: jax.ShapeDtypeStruct, target: jax.sharding.Sharding) -> jax.Array:
        numbers = np.random.default_rng(leaf.size).normal(size=leaf.shape)
        return jax.device_put(numbers.astype(leaf.dtype), target)

    shapes = transformer.abstract_params(model, execution)
    params = jax.tree.map(draw, shapes, param_shardings(model, learner, execution))
    whole = jax.tree.map(jnp.asarray, jax.device_get(params))
    moves = weights.moves(model, execution, learner, samplers[0])
    moved = spread.spreader(learner, tuple(samplers), moves)(jax.tree.leaves(params))
    for mesh in samplers:
        # What the move within one mesh makes of the same numbers.
        expected = jax.tree.leaves(weights.to_sampler(model, mesh, execution, whole))
        for array, move, other in zip(moved, moves, expected, strict=True):
            target = NamedSharding(mesh, move.target)
            found = spread.collect(array, other.shape, target)
            assert found.dtype == other.dtype
            assert other.sharding.is_equivalent_to(target, other.ndim)
            assert jnp.array_equal(found, other)
