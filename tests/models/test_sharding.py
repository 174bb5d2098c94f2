"""Meshes and their errors, the rule table, and sharded results against those of one device."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from helpers import tree_allclose
from models import layout, transformer
from models.cache import cache_sharding, init_cache, read_routing
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN
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

SCANNED = dataclasses.replace(PLAIN, layers="scanned")
EXECUTIONS = {"unrolled": PLAIN, "scanned": SCANNED}
MOE = TransformerConfig(
    vocab_size=48,
    num_layers=2,
    embed=16,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    mlp=16,
    num_experts=8,
    experts_per_token=2,
    qk_norm=True,
    tied_head=False,
    scale_embedding=False,
)
DENSE = dataclasses.replace(
    MOE, num_kv_heads=2, num_experts=1, experts_per_token=1, tied_head=True, qkv_bias=True
)
MODELS = {"moe": MOE, "dense": DENSE}


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


@pytest.mark.parametrize(
    ("changes", "sizes", "message"),
    [
        (
            {"num_kv_heads": 3, "num_heads": 24, "mlp": 48},
            (1, -1, 1, 8),
            "model.num_kv_heads=3 does not divide over mesh.tensor=8; set mesh.tensor to one of "
            "[1, 3, 6, 12, 24], or model.num_kv_heads to a multiple of 8",
        ),
        (
            {"num_heads": 4, "num_kv_heads": 2},
            (1, 1, 1, 8),
            "model.num_heads=4 does not divide over mesh.tensor=8; set mesh.tensor to one of "
            "[1, 2, 4], or model.num_heads to a multiple of 8",
        ),
        (
            {"vocab_size": 50},
            (1, 2, 1, 4),
            "model.vocab_size=50 does not divide over mesh.tensor=4; set mesh.tensor to one of "
            "[1, 2], or model.vocab_size to a multiple of 4",
        ),
        (
            {"num_experts": 4},
            (1, 1, 8, 1),
            "model.num_experts=4 does not divide over mesh.expert=8; set mesh.expert to one of "
            "[1, 2, 4], or model.num_experts to a multiple of 8",
        ),
        (
            {"embed": 12},
            (1, 8, 1, 1),
            "model.embed=12 does not divide over mesh.fsdp=8; set mesh.fsdp to one of "
            "[1, 2, 3, 4, 6, 12], or model.embed to a multiple of 8",
        ),
    ],
)
def test_parameters_that_do_not_divide_are_named(changes, sizes, message):
    with pytest.raises(ModelError, match=re.escape(message)):
        param_shardings(dataclasses.replace(MOE, **changes), build_mesh(*sizes))


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
def test_rules_cover_every_axis_and_no_parameter_uses_a_mesh_axis_twice(execution):
    config = dataclasses.replace(MOE, qkv_bias=True)
    for _, param in nnx.to_flat_state(transformer.abstract_params(config, execution)):
        used = [axis for axis in partition(param.get_metadata("axes")) if axis is not None]
        assert len(used) == len(set(used))
        assert len(param.get_metadata("axes")) == len(param.shape)
    assert {axis for axis, mesh_axis in RULES.items() if mesh_axis} == {
        axis for axis in FIELDS if RULES[axis]
    }


def batch():
    """Packed rows with padding, one of them all padding."""
    tokens = np.random.default_rng(0).integers(0, 48, (8, 6)).astype(np.int32)
    segment_ids = np.array([[1, 1, 1, 2, 2, 0]] * 7 + [[0] * 6], np.int32)
    return tokens, np.array([[0, 1, 2, 0, 1, 0]] * 8, np.int32), segment_ids


def random_params(config: TransformerConfig, execution):
    """Norms off one, biases off zero, scores far from uniform."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        low, high = (0.5, 2.0) if len(leaf.shape) == 1 else (-0.6, 0.6)
        return jnp.asarray(rng.uniform(low, high, leaf.shape), jnp.float32)

    params = jax.tree.map(draw, transformer.abstract_params(config))
    return layout.stacked(params) if execution.layers == "scanned" else params


def packed(config, execution, mesh, params, tokens, positions, segment_ids):
    """A loss that reads every score, with all that the forward gives."""
    out = transformer.forward(
        config,
        params,
        tokens,
        positions,
        segment_ids=segment_ids,
        mesh=mesh,
        execution=execution,
    )
    scores = transformer.logits(config, params, out.hidden, mesh)
    likely = jax.nn.log_softmax(scores, axis=-1)
    live = (segment_ids > 0)[:, :, None]
    return jnp.sum(jnp.where(live, jnp.sin(likely), 0.0)) / 64, (out, scores)


@functools.cache
def expected(config: TransformerConfig):
    step = jax.value_and_grad(functools.partial(packed, config, PLAIN, None), has_aux=True)
    return jax.device_get(jax.jit(step)(random_params(config, PLAIN), *batch()))


MESHES = {
    "fsdp8": (1, 8, 1, 1),
    "tensor8": (1, 1, 1, 8),  # more than the key-value heads
    "expert8": (1, 1, 8, 1),
    "data2-fsdp2-tensor2": (2, 2, 1, 2),
    "fsdp2-expert2-tensor2": (1, 2, 2, 2),
    "fsdp2-tensor4": (1, 2, 1, 4),
}
CASES = [
    ("fsdp8", "moe", "unrolled"),
    ("fsdp8", "dense", "scanned"),
    ("tensor8", "dense", "unrolled"),
    ("tensor8", "moe", "scanned"),
    ("expert8", "moe", "scanned"),
    ("data2-fsdp2-tensor2", "moe", "unrolled"),
    ("data2-fsdp2-tensor2", "dense", "scanned"),
    ("fsdp2-expert2-tensor2", "moe", "unrolled"),
    ("fsdp2-expert2-tensor2", "moe", "scanned"),
    ("fsdp2-tensor4", "dense", "unrolled"),
]


@pytest.mark.parametrize(("mesh", "model", "layers"), CASES)
def test_sharded_equals_unsharded(mesh, model, layers):
    config, execution = MODELS[model], EXECUTIONS[layers]
    mesh = build_mesh(*MESHES[mesh])
    (total, (out, scores)), grads = expected(config)
    shardings = param_shardings(config, mesh, execution)
    step = jax.jit(
        jax.value_and_grad(functools.partial(packed, config, execution, mesh), has_aux=True),
        out_shardings=((replicated(mesh), None), shardings),
    )
    params = jax.device_put(random_params(config, execution), shardings)
    rows = jax.device_put(batch(), data_sharding(mesh))
    (got_total, (got, got_scores)), got_grads = step(params, *rows)
    np.testing.assert_allclose(got_total, total, rtol=1e-5)
    np.testing.assert_allclose(got.hidden, out.hidden, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(got_scores, scores, atol=1e-5, rtol=1e-5)
    assert np.array_equal(got.expert_load, out.expert_load)
    shard = got_scores.sharding.shard_shape(got_scores.shape)
    assert shard == (mesh.shape["tensor"], 6, 48 // mesh.shape["tensor"])
    got_grads = layout.per_layer(jax.device_get(got_grads))
    assert tree_allclose(got_grads, grads, atol=1e-5, rtol=1e-5)
    assert min(float(abs(leaf).max()) for leaf in jax.tree.leaves(grads)) > 1e-4


def cached(config, execution, mesh, params, cache, tokens, positions, page_table):
    out = transformer.forward(
        config,
        params,
        tokens,
        positions,
        cache=cache,
        page_table=page_table,
        mesh=mesh,
        execution=execution,
    )
    scores = transformer.logits(config, params, out.hidden, mesh, rows_split=False)
    return out.cache, out.hidden, scores


@pytest.mark.parametrize(("mesh", "model", "layers"), CASES)
def test_sharded_cache_equals_packed_rows(mesh, model, layers):
    """A prompt of four tokens of two rows, then two steps of decoding."""
    config, execution = MODELS[model], EXECUTIONS[layers]
    mesh = build_mesh(*MESHES[mesh])
    tokens = batch()[0][:2]
    positions = np.broadcast_to(np.arange(6, dtype=np.int32), (2, 6))
    out = jax.jit(transformer.forward, static_argnums=0)(
        config, random_params(config, PLAIN), tokens, positions
    )
    params = random_params(config, execution)
    scores = transformer.logits(config, params, out.hidden)
    placed = jax.device_put(params, param_shardings(config, mesh, execution))
    sharding = cache_sharding(mesh, execution)
    routing = config.num_experts > 1
    cache = init_cache(config, 5, 4, execution, mesh, routing=routing)
    cache = jax.device_put(cache, sharding)
    assert cache.keys[0].sharding.shard_shape(cache.keys[0].shape)[-3] == max(
        config.num_kv_heads // mesh.shape["tensor"], 1
    )
    step = jax.jit(
        functools.partial(cached, config, execution, mesh),
        donate_argnums=1,
        out_shardings=(sharding, None, None),
    )
    table = np.array([[3, 0], [1, 4]], np.int32)
    for columns in (slice(0, 4), slice(4, 5), slice(5, 6)):
        cache, hidden, got = step(placed, cache, tokens[:, columns], positions[:, columns], table)
        np.testing.assert_allclose(hidden, out.hidden[:, columns], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(got, scores[:, columns], atol=1e-5, rtol=1e-5)
    if routing:
        kept = read_routing(cache, jnp.asarray(table.reshape(-1)))
        chosen = kept.reshape(2, 8, config.num_layers, -1)
        assert np.array_equal(chosen[:, :6].transpose(2, 0, 1, 3), out.routing.chosen)


def gathered(text: str) -> set[tuple[int, ...]]:
    """Shapes that all-gathers of a compiled program give."""
    shapes = re.findall(r"= \(?[a-z0-9]+\[([\d,]*)\][^=]*? all-gather(?:-start)?\(", text)
    return {tuple(int(size) for size in shape.split(",") if size) for shape in shapes}


@pytest.mark.parametrize("kind", ["packed", "cached"])
def test_the_table_is_never_whole(kind):
    """48 pieces over 4 devices and a width of 16 over 2: no program holds all pieces."""
    mesh = build_mesh(1, 2, 1, 4)
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        transformer.abstract_params(DENSE),
        param_shardings(DENSE, mesh),
    )
    if kind == "packed":
        rows = jax.ShapeDtypeStruct((8, 6), jnp.int32, sharding=data_sharding(mesh))
        step = jax.grad(functools.partial(packed, DENSE, PLAIN, mesh), has_aux=True)
        inputs = (params, rows, rows, rows)
    else:
        rows = jax.ShapeDtypeStruct((8, 1), jnp.int32, sharding=replicated(mesh))
        table = jax.ShapeDtypeStruct((8, 2), jnp.int32, sharding=replicated(mesh))
        cache = jax.eval_shape(lambda: init_cache(DENSE, 16, 4, PLAIN, mesh))
        step = functools.partial(cached, DENSE, PLAIN, mesh)
        inputs = (params, cache, rows, rows, table)
    shapes = gathered(jax.jit(step).lower(*inputs).compile().as_text())
    assert shapes, "the pattern finds all-gathers"
    assert not {shape for shape in shapes if 48 in shape}, shapes


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
def test_parameters_are_drawn_onto_their_shards(execution):
    mesh = build_mesh(1, 2, 2, 2)
    placed = init_params(MOE, jax.random.key(0), mesh, execution)
    params = layout.per_layer(jax.device_get(placed))
    assert tree_allclose(params, init_params(MOE, jax.random.key(0)), rtol=1e-6, atol=0)
    blocks = placed["blocks"]
    stack = execution is SCANNED
    gate_up = (blocks if stack else blocks[0])["moe"]["gate_up"][...]
    spec = PartitionSpec(*(None,) * stack, "expert", "fsdp", None, "tensor")
    assert gate_up.sharding == NamedSharding(mesh, spec)
    assert gate_up.addressable_shards[0].data.shape[stack:] == (4, 8, 2, 8)
