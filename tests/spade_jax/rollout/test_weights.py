import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from models import layout, transformer
from models.config import TransformerConfig
from models.execution import PLAIN
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
    moved = weights.to_sampler(MODEL, mesh, PLAIN, params)
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True):
        assert after is before


def test_moves_between_meshes():
    learner = build_mesh(1, 4, 2, 1)
    sampler = build_mesh(1, 1, 1, 2, devices=jax.devices()[:2])
    params = parameters(learner)
    moved = weights.to_sampler(MODEL, sampler, PLAIN, params)
    expected = jax.tree.leaves(param_shardings(MODEL, sampler))
    for before, after, target in zip(
        jax.tree.leaves(params), jax.tree.leaves(moved), expected, strict=True
    ):
        assert after.sharding == target
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))


def test_the_copy_has_the_dtypes_that_the_forward_takes():
    """Products in bfloat16, rounded once; norms and the router as the learner has them."""
    mesh = build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])
    params, rounded = parameters(mesh), 0
    execution = dataclasses.replace(PLAIN, compute_dtype="bfloat16")
    moved = weights.to_sampler(MODEL, mesh, execution, params)
    shapes = weights.abstract_params(MODEL, execution)
    assert jax.tree.structure(moved) == jax.tree.structure(shapes)
    for path, leaf in nnx.to_flat_state(moved):
        before = dict(nnx.to_flat_state(params))[path][...]
        wanted = dict(nnx.to_flat_state(shapes))[path].dtype
        kept = path[-1] in ("scale", "router")
        assert leaf.dtype == wanted == (jnp.float32 if kept else jnp.bfloat16)
        np.testing.assert_array_equal(leaf[...], before.astype(wanted))
        rounded += not kept
    assert rounded == 7


def test_eight_bits_lie_as_the_weights_do():
    """Integers and scales on the devices of their part, in both layouts, as the programs expect."""
    learner = build_mesh(1, 4, 2, 1)
    sampler = build_mesh(1, 1, 2, 2, devices=jax.devices()[:4])
    for execution in (PLAIN, dataclasses.replace(PLAIN, layers="scanned")):
        params = parameters(learner)
        if execution.layers == "scanned":
            params = layout.stacked(params)
        moved = weights.to_sampler(MODEL, sampler, execution, params, "int8")
        shapes = weights.abstract_params(MODEL, execution, "int8")
        places = weights.shardings(MODEL, sampler, execution, "int8")
        assert jax.tree.structure(moved) == jax.tree.structure(shapes) == jax.tree.structure(places)
        for leaf, shape, place in zip(*map(jax.tree.leaves, (moved, shapes, places)), strict=True):
            assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
            assert leaf.sharding == place
        small = sum(leaf.nbytes for leaf in jax.tree.leaves(moved) if leaf.dtype == jnp.int8)
        down = (
            moved["blocks"]["moe"] if execution.layers == "scanned" else moved["blocks"][0]["moe"]
        )
        down, layers = down["down"].get_value(), ("layers",) * (execution.layers == "scanned")
        spec = (*(None for _ in layers), "expert", "tensor", "fsdp")
        assert down.values.sharding.spec == PartitionSpec(*spec)
        assert down.scale.sharding.spec == PartitionSpec(*spec[:-2], None, "fsdp")
        everything = sum(leaf.size for leaf in jax.tree.leaves(params["blocks"]))
        assert 0.85 * everything < small < everything
