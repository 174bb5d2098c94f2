"""The blockwise core against a dense softmax; ranges by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import blockwise
from models.attention import packed_ranges
from models.blockwise import attend


def dense(query, key, value, slot_ids, first, last):
    """Softmax over all keys with the range as a mask; no blocks, no grouping of heads."""
    group = query.shape[2] // key.shape[2]
    key = jnp.repeat(key[slot_ids], group, axis=2)
    value = jnp.repeat(value[slot_ids], group, axis=2)
    scores = jnp.einsum("rqhd,rchd->rhqc", query, key) / query.shape[3] ** 0.5
    index = jnp.arange(key.shape[1])[None, None, :]
    mask = ((index >= first[:, :, None]) & (index <= last[:, :, None]))[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("rhqc,rchd->rqhd", jnp.where(mask, weights, 0.0), value)


def random(seed: int, *shape: int):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def random_ranges(seed: int, rows: int, seq: int, context: int):
    """First and last key of every query: mostly some range, sometimes none."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, context, (rows, seq))
    last = first + rng.integers(-2, context, (rows, seq))
    last = np.where(rng.random((rows, seq)) < 0.2, -1, np.minimum(last, context - 1))
    return jnp.asarray(first, jnp.int32), jnp.asarray(last, jnp.int32)


@pytest.mark.parametrize(
    ("query_block", "key_block", "seq", "context"),
    [(4, 4, 7, 7), (4, 4, 1, 13), (3, 5, 12, 21), (128, 128, 12, 21), (128, 128, 1, 1)],
)
def test_attend_equals_dense(monkeypatch, query_block, key_block, seq, context):
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", query_block)
    monkeypatch.setattr(blockwise, "KEY_BLOCK", key_block)
    query, weight = random(0, 3, seq, 4, 6), random(1, 3, seq, 4, 6)
    key, value = random(2, 5, context, 2, 6), random(3, 5, context, 2, 6)
    slot_ids = jnp.array([4, 0, 2], jnp.int32)
    ranges = random_ranges(seq, 3, seq, context)

    def both(function):
        def loss(query, key, value):
            output = function(query, key, value, slot_ids, *ranges)
            return jnp.sum(output * weight), output

        grads, output = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(query, key, value)
        return output, *grads

    for got, expected in zip(both(attend), both(dense), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def test_query_without_keys_gives_zeros():
    keys = random(1, 1, 4, 1, 4)
    none = jnp.full((1, 1), -1, jnp.int32)
    output = attend(random(0, 1, 1, 1, 4), keys, keys, jnp.array([0]), jnp.zeros_like(none), none)
    assert np.array_equal(output, np.zeros((1, 1, 1, 4)))


def test_keys_outside_the_range_are_never_read():
    query, key, value = random(0, 1, 1, 2, 4), random(1, 1, 6, 1, 4), random(2, 1, 6, 1, 4)
    first, last = jnp.array([[1]]), jnp.array([[3]])
    before = attend(query, key, value, jnp.array([0]), first, last)
    outside = jnp.array([0, 4, 5])
    key, value = key.at[:, outside].set(1e6), value.at[:, outside].set(-1e6)
    assert np.array_equal(before, attend(query, key, value, jnp.array([0]), first, last))


def test_packed_ranges_by_hand():
    first, last = packed_ranges(jnp.array([[1, 1, 2, 2, 2, 0, 0], [0, 5, 5, 0, 1, 2, 2]]))
    live = np.asarray(last) >= 0
    assert last.tolist() == [[0, 1, 2, 3, 4, -1, -1], [-1, 1, 2, -1, 4, 5, 6]]
    assert np.asarray(first)[live].tolist() == [0, 0, 2, 2, 2, 1, 1, 4, 5, 5]
