"""Sorted copies, the transposed pair that moves rows, buffers, and the ragged exchange."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import dispatch
from models.dispatch import buffer_rows, collect, exchange, sort_copies, take
from models.sharding import build_mesh

CHOSEN = np.array([[2, 0], [1, 2], [-1, 9], [0, 1], [2, 2]], np.int32)


def test_gradients_of_a_gate_are_those_of_its_formula():
    """Against automatic differentiation of the formula as it is written down."""
    rng = np.random.default_rng(2)
    gate_up, grad = (jnp.asarray(rng.standard_normal((5, n)) * 3, jnp.float32) for n in (8, 4))
    scale = jnp.asarray(rng.standard_normal(5), jnp.float32)

    def formula(gate_up, scale):
        gate, up = gate_up[:, :4], gate_up[:, 4:]
        return gate / (1 + jnp.exp(-gate)) * up * scale[:, None]

    found, back = jax.vjp(dispatch.gated, gate_up, scale)
    expected, plain = jax.vjp(formula, gate_up, scale)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(back(grad), plain(grad), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_copies_are_sorted_stably_and_strangers_come_last():
    plan = sort_copies(jnp.asarray(CHOSEN), 3)
    assert plan.order.tolist() == [1, 6, 2, 7, 0, 3, 8, 9, 4, 5]
    assert plan.place.reshape(-1)[plan.order].tolist() == list(range(10))
    assert plan.sizes.tolist() == [2, 2, 4]


def test_take_and_collect_are_each_others_gradient():
    """Against plain indexing, whose gradient is a scatter; rows named by no slot count nowhere."""
    rng = np.random.default_rng(0)
    plan = sort_copies(jnp.asarray(CHOSEN), 3)
    token, live = plan.order // 2, jnp.sum(plan.sizes)
    slot = jnp.where(plan.place < live, plan.place, 10)
    x, rows = (jnp.asarray(rng.standard_normal((n, 4)), jnp.float32) for n in (5, 10))
    alive = (jnp.arange(10) < live)[:, None]

    def plain_collect(rows):
        return jnp.zeros((5, 4)).at[token].add(jnp.where(alive, rows, 0.0))

    np.testing.assert_allclose(take(x, token, slot), x[token])
    np.testing.assert_allclose(collect(rows, token, slot), plain_collect(rows), rtol=1e-6)
    (got,) = jax.vjp(lambda x: take(x, token, slot), x)[1](rows)
    (expected,) = jax.vjp(lambda x: jnp.where(alive, x[token], 0.0), x)[1](rows)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    (got,) = jax.vjp(lambda rows: collect(rows, token, slot), rows)[1](x)
    np.testing.assert_allclose(got[: int(live)], x[token][: int(live)])


def test_buffers_hold_half_more_than_an_even_load_or_the_worst():
    assert buffer_rows(4096 * 8, 1, 4096 * 8) == 4096 * 8
    assert buffer_rows(4096 * 8, 8, 4096 * 8) == 1.5 * 4096
    assert buffer_rows(64, 8, 64) == 64  # small loads take one round, always
    assert buffer_rows(10_000, 8, 10_000) % 128 == 0
    assert buffer_rows(10_000, 8, 10_000) >= 1.5 * 10_000 / 8


def emulated(operand, output, begins, sent, targets, received, *, axis_name):
    """jax.lax.ragged_all_to_all as its documentation words it, for a platform without it.

    Every device reads what every other one sends to it, and writes it where that one says.
    """
    del received
    everyone = [jax.lax.all_gather(a, axis_name) for a in (operand, begins, sent, targets)]
    me = jax.lax.axis_index(axis_name)
    row = jnp.arange(output.shape[0])
    for data, begin, size, target in zip(*everyone, strict=True):
        inside = (row >= target[me]) & (row < target[me] + size[me])
        source = jnp.clip(begin[me] + row - target[me], 0, data.shape[0] - 1)
        output = jnp.where(inside[:, None], data[source], output)
    return output


@pytest.mark.parametrize("native", [True, False])
def test_exchange_and_its_gradient(native, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    shards, quota = 8, 3
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, quota + 1, (shards, shards)).astype(np.int32)
    rows = rng.standard_normal((shards, shards, quota, 2)).astype(np.float32)
    spec = PartitionSpec("expert")

    def local(rows, sent, received):
        def move(rows):
            return exchange(native, rows, sent[0], received[0])

        moved, pull = jax.vjp(move, rows)
        return moved, pull(moved)[0]

    run = jax.shard_map(
        local,
        mesh=build_mesh(1, 1, shards, 1),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    flat = rows.reshape(-1, 2)
    moved, back = (np.asarray(a).reshape(rows.shape) for a in jax.jit(run)(flat, sizes, sizes.T))
    for source in range(shards):
        for target in range(shards):
            count = sizes[source, target]
            sent = rows[source, target, :count]
            assert np.array_equal(moved[target, source, :count], sent)
            assert np.array_equal(back[source, target, :count], sent)  # there and back again


def test_ragged_transport_over_the_native_exchange(monkeypatch):
    """The whole transport, with the primitive of TPUs emulated, equals all experts at home."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr(dispatch, "buffer_rows", lambda copies, shards, worst: min(2, worst))
    rng = np.random.default_rng(0)
    shards, tokens, chosen = 2, 12, 2
    x = jnp.asarray(rng.standard_normal((tokens, 6)), jnp.float32)
    weights = jnp.asarray(rng.random((tokens, chosen)), jnp.float32)
    ids = np.argsort(rng.random((tokens, 8)), axis=1)[:, :chosen].astype(np.int32)
    ids[5:] = [3, 2]  # most go to one device
    ids[0] = -1  # padding
    experts = dispatch.Experts(
        jnp.asarray(0.3 * rng.standard_normal((8, 6, 10)), jnp.float32),
        jnp.asarray(0.3 * rng.standard_normal((8, 5, 6)), jnp.float32),
    )

    def home(x, weights, ids, experts):
        return dispatch.apply_experts(x, weights, ids, experts, "blocks").output

    def away(x, weights, ids, experts):
        result = dispatch.send_to_experts(x, weights, ids, experts, "blocks", shards, native=True)
        return result.output

    spec = PartitionSpec("expert")
    mesh = build_mesh(1, 1, shards, 1, jax.devices()[:shards])
    away = jax.shard_map(away, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)

    def results(function, x, weights, ids, experts):
        def loss(x, weights, experts):
            output = function(x, weights, ids, experts)
            return jnp.sum(jnp.sin(output)), output

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, weights, experts)

    run = jax.jit(results, static_argnums=0)
    for one, two in zip(
        jax.tree.leaves(run(away, x, weights, jnp.asarray(ids), experts)),
        jax.tree.leaves(run(home, x, weights, jnp.asarray(ids), experts)),
        strict=True,
    ):
        np.testing.assert_allclose(one, two, atol=1e-5)
