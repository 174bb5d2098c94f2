"""Meshes and their errors, the rule table, and sharded results against those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from models import transformer
from models.config import TransformerConfig
from models.errors import ModelError
from models.sharding import (
    FIELDS,
    RULES,
    build_mesh,
    data_sharding,
    param_shardings,
    partition,
    replicated,
)
from models.transformer import init_params

TINY = TransformerConfig(
    vocab_size=24,
    num_layers=1,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=12,
    num_experts=4,
    experts_per_token=2,
)


def test_one_axis_takes_the_rest():
    mesh = build_mesh(2, -1, 1, 2)
    assert dict(mesh.shape) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 4
    assert dict(build_mesh(1, -1, 1, 1, jax.devices()[:1]).shape)["fsdp"] == 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, -1, 1, 3), r"mesh.tensor=3 multiply to 3, .* 8 devices; .*\[1, 2, 4, 8\]"),
        ((2, 2, 1, 1), r"multiply to 4, but there are 8 devices; .*mesh.data=4"),
        ((-1, -1, 1, 1), r"\['data', 'fsdp'\] are all -1"),
        ((1, 0, 1, 1), r"mesh.fsdp=0 must be at least 1"),
        ((1, 8, 2, 1), r"multiply to 16, which does not divide the 8 devices"),
    ],
)
def test_mesh_errors_say_what_would_fit(sizes, message):
    with pytest.raises(ModelError, match=message):
        build_mesh(*sizes)


def test_parameters_that_do_not_divide_are_named():
    with pytest.raises(
        ModelError, match=r"model.num_kv_heads=2 does not divide over mesh.tensor=4; .*\[1, 2\]"
    ):
        param_shardings(TINY, build_mesh(1, -1, 1, 4))
    with pytest.raises(ModelError, match=r"model.num_experts=4 .* mesh.expert=8; .* multiple of 8"):
        param_shardings(TINY, build_mesh(1, -1, 8, 1))


def test_rules_cover_every_axis_and_no_parameter_uses_a_mesh_axis_twice():
    untied = TransformerConfig(tied_head=False)
    for _, param in nnx.to_flat_state(transformer.abstract_params(untied)):
        used = [axis for axis in partition(param.get_metadata("axes")) if axis is not None]
        assert len(used) == len(set(used))
    assert {axis for axis, mesh_axis in RULES.items() if mesh_axis} == {
        axis for axis in FIELDS if RULES[axis]
    }


def loss(params, tokens, positions, segment_ids, mesh):
    out = transformer.forward(TINY, params, tokens, positions, segment_ids=segment_ids, mesh=mesh)
    scores = jax.nn.log_softmax(transformer.logits(TINY, params, out.hidden))
    live = (segment_ids > 0)[:, :, None]
    return jnp.sum(jnp.where(live, scores[:, :, :1], 0.0)), out


def batch():
    tokens = np.random.default_rng(0).integers(0, 24, (8, 6)).astype(np.int32)
    segment_ids = np.array([[1, 1, 1, 2, 2, 0]] * 7 + [[0] * 6], np.int32)
    return tokens, np.array([[0, 1, 2, 0, 1, 0]] * 8, np.int32), segment_ids


@pytest.fixture(scope="module")
def expected():
    params = init_params(TINY, jax.random.key(0))
    step = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=4)
    return params, jax.device_get(step(params, *batch(), None))


@pytest.mark.parametrize(
    ("sizes", "split"),
    [((2, 2, 1, 2), True), ((1, 4, 2, 1), True), ((2, 2, 1, 2), False)],
    ids=["data2-fsdp2-tensor2", "fsdp4-expert2", "left to the compiler"],
)
def test_sharded_equals_unsharded(expected, sizes, split):
    params, ((total, out), grads) = expected
    mesh = build_mesh(*sizes)
    shardings = param_shardings(TINY, mesh)
    placed = jax.device_put(params, shardings)
    rows = jax.device_put(batch(), data_sharding(mesh))
    step = jax.jit(
        jax.value_and_grad(loss, has_aux=True),
        static_argnums=4,
        out_shardings=((replicated(mesh), None), shardings),
    )
    (got_total, got), got_grads = step(placed, *rows, mesh if split else None)
    np.testing.assert_allclose(got_total, total, rtol=1e-5)
    np.testing.assert_allclose(got.hidden, out.hidden, atol=1e-5)
    assert np.array_equal(got.expert_load, out.expert_load)
    for one, other in zip(jax.tree.leaves(got_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_parameters_are_drawn_onto_their_shards(expected):
    params, _ = expected
    mesh = build_mesh(1, 2, 2, 2)
    placed = init_params(TINY, jax.random.key(0), mesh)
    for one, other in zip(jax.tree.leaves(placed), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    gate_up = placed["blocks"][0]["moe"]["gate_up"][...]
    spec = PartitionSpec("expert", "fsdp", None, "tensor")
    assert gate_up.sharding == NamedSharding(mesh, spec)
    assert gate_up.addressable_shards[0].data.shape == (2, 8, 2, 6)
