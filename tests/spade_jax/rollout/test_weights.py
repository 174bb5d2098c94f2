import jax
import numpy as np
from jax.sharding import Mesh

from models import transformer
from models.config import TransformerConfig
from models.sharding import build_mesh, param_shardings
from spade_jax.rollout import weights

MODEL = TransformerConfig(
    vocab_size=16,
    num_layers=1,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=8,
    num_experts=4,
)


def parameters(mesh: Mesh) -> transformer.Params:
    def draw(leaf: jax.ShapeDtypeStruct, target: jax.sharding.Sharding) -> jax.Array:
        return jax.device_put(
            np.random.default_rng(0).normal(size=leaf.shape).astype(np.float32), target
        )

    return jax.tree.map(draw, transformer.abstract_params(MODEL), param_shardings(MODEL, mesh))


def test_arrays_that_lie_right_are_not_copied():
    mesh = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])
    params = parameters(mesh)
    moved = weights.to_sampler(MODEL, mesh, params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        assert after is before


def test_moves_between_meshes():
    learner = build_mesh(1, 4, 2, 1)
    sampler = build_mesh(1, 1, 1, 2, devices=jax.devices()[:2])
    params = parameters(learner)
    moved = weights.to_sampler(MODEL, sampler, params)
    expected = jax.tree.leaves(param_shardings(MODEL, sampler))
    for before, after, target in zip(
        jax.tree.leaves(params), jax.tree.leaves(moved), expected, strict=True
    ):
        assert after.sharding == target
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_cache_heads_are_split_where_they_divide():
    two = weights.cache_sharding(MODEL, build_mesh(1, 4, 1, 2))
    assert two.shard_shape((3, 5, 2, 4)) == (3, 5, 1, 4)
    eight = weights.cache_sharding(MODEL, build_mesh(1, 1, 1, 8))
    assert eight.shard_shape((3, 5, 2, 4)) == (3, 5, 2, 4)
