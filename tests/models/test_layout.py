"""Unrolled and scanned parameters: the same numbers, names, shapes and shardings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models import layout, transformer
from models.config import TransformerConfig
from models.execution import PLAIN
from models.sharding import build_mesh, param_shardings
from models.transformer import abstract_params, init_params

SCANNED = dataclasses.replace(PLAIN, layers="scanned")
# Eleven layers: their names sort 0, 1, 10, 2 as text.
DEEP = TransformerConfig(
    vocab_size=8,
    num_layers=11,
    embed=4,
    num_heads=2,
    num_kv_heads=2,
    head_dim=2,
    mlp=4,
    num_experts=2,
    experts_per_token=1,
    tied_head=False,
    qkv_bias=True,
)


def random_params(config: TransformerConfig, execution=PLAIN):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), jnp.float32),
        abstract_params(config, execution),
    )


def same(one, other) -> bool:
    return jax.tree.structure(one) == jax.tree.structure(other) and jax.tree.all(
        jax.tree.map(np.array_equal, one, other)
    )


def test_there_and_back_is_the_same_bits():
    params = random_params(DEEP)
    stack = layout.stacked(params)
    assert layout.is_stacked(stack) and not layout.is_stacked(params)
    assert jax.tree.structure(stack) == jax.tree.structure(abstract_params(DEEP, SCANNED))
    for index in (0, 2, 10):
        one = params["blocks"][index]["moe"]["down"][...]
        assert np.array_equal(stack["blocks"]["moe"]["down"][...][index], one)
    assert same(layout.per_layer(stack), params)
    assert same(layout.stored(stack), params) and same(layout.stored(params), params)
    assert same(layout.restored(layout.per_layer(stack), stack), stack)
    assert same(layout.restored(params, params), params)


def test_moments_and_counters_come_along():
    params = random_params(DEEP)
    stack = layout.stacked(params)
    optimizer = optax.adam(1e-3)
    one, other = optimizer.init(params), optimizer.init(stack)
    with jax.numpy_dtype_promotion("standard"):  # of Optax's own code
        _, one = optimizer.update(params, one)
        _, other = optimizer.update(stack, other)
    assert same(layout.stacked((params, one, jnp.int32(3))), (stack, other, jnp.int32(3)))
    assert same(layout.per_layer((stack, other, jnp.int32(3))), (params, one, jnp.int32(3)))


def test_shapes_and_shardings_are_those_of_the_layout():
    mesh = build_mesh(1, 2, 2, 2)
    trees = {}
    for execution in (PLAIN, SCANNED):
        trees[execution.layers] = jax.tree.map(
            lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
            abstract_params(DEEP, execution),
            param_shardings(DEEP, mesh, execution),
        )

    def described(tree):
        leaves = jax.tree.leaves(tree)
        return [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]

    for move, source, target in (
        (layout.stacked, "unrolled", "scanned"),
        (layout.per_layer, "scanned", "unrolled"),
    ):
        moved = move(trees[source])
        assert jax.tree.structure(moved) == jax.tree.structure(trees[target])
        assert described(moved) == described(trees[target])
    shardings = layout.stacked(param_shardings(DEEP, mesh))
    assert jax.tree.leaves(shardings) == jax.tree.leaves(param_shardings(DEEP, mesh, SCANNED))


def test_sharded_arrays_keep_their_places():
    mesh = build_mesh(1, 2, 2, 2)
    params = random_params(DEEP)
    placed = jax.device_put(params, param_shardings(DEEP, mesh))
    stack = layout.stacked(placed)
    wanted = param_shardings(DEEP, mesh, SCANNED)
    assert jax.tree.all(jax.tree.map(lambda a, to: a.sharding == to, stack, wanted))
    back = layout.per_layer(stack)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, back, placed))
    assert same(back, params)
    cut = layout.stored(stack)["blocks"][3]["moe"]["down"][...]
    spec = PartitionSpec("expert", "tensor", "fsdp")
    assert cut.sharding == NamedSharding(mesh, spec, memory_kind="pinned_host")


def test_what_lies_on_the_host_stays_there():
    """Shapes, shardings and arrays alike, in both directions."""
    config, mesh = dataclasses.replace(DEEP, num_layers=2), build_mesh(1, 2, 2, 2)

    def described(tree):
        return [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(tree)]

    places, shapes, arrays = {}, {}, {}
    for name, execution in (("unrolled", PLAIN), ("scanned", SCANNED)):
        places[name] = jax.tree.map(
            lambda place: place.with_memory_kind("pinned_host"),
            param_shardings(config, mesh, execution),
        )
        params = random_params(config, execution)
        arrays[name] = jax.device_put(params, places[name])
        shapes[name] = jax.tree.map(
            lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to),
            params,
            places[name],
        )
    wanted = described(shapes["scanned"])
    assert {place.memory_kind for _, place in wanted} == {"pinned_host"}
    assert jax.tree.leaves(layout.stacked(places["unrolled"])) == [place for _, place in wanted]
    assert described(layout.stacked(shapes["unrolled"])) == wanted
    assert described(layout.stacked(arrays["unrolled"])) == wanted
    wanted = described(shapes["unrolled"])
    assert described(layout.per_layer(shapes["scanned"])) == wanted
    assert described(layout.per_layer(arrays["scanned"])) == wanted
    assert described(layout.stored(arrays["scanned"])) == wanted
    assert same(layout.stacked(arrays["unrolled"]), layout.stacked(random_params(config)))


def test_restoring_frees_each_layer_once_it_is_stacked():
    layers = layout.per_layer(random_params(DEEP, SCANNED))
    table, first = layers["embedding"][...], layers["blocks"][0]["moe"]["down"][...]
    stack = layout.restored(layers, abstract_params(DEEP, SCANNED))
    assert first.is_deleted() and not table.is_deleted()
    assert same(stack, random_params(DEEP, SCANNED))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_layouts_draw_the_same_numbers(dtype):
    config = dataclasses.replace(DEEP, num_layers=2)
    one, other = (
        init_params(config, jax.random.key(0), None, dataclasses.replace(e, param_dtype=dtype))
        for e in (PLAIN, SCANNED)
    )
    assert same(layout.stacked(one), other)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(other)} == {dtype}
    abstract = transformer.abstract_params(config, dataclasses.replace(SCANNED, param_dtype=dtype))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype, other, abstract))
