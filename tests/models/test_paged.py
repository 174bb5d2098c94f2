"""Attention over pages against a dense softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import paged
from models.paged import attend_pages


def dense(query, keys, values, page_table, last):
    """Gather every page of every row, and mask."""
    group = query.shape[2] // keys.shape[1]
    rows = page_table.shape[0]

    def gather(x):
        x = x[jnp.clip(page_table, 0, x.shape[0] - 1)].transpose(0, 1, 3, 2, 4)
        return jnp.repeat(x.reshape(rows, -1, *x.shape[3:]), group, axis=2)

    scores = jnp.einsum("rqhd,rchd->rhqc", query, gather(keys)) / query.shape[3] ** 0.5
    mask = (jnp.arange(scores.shape[3])[None, None] <= last[:, :, None])[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("rhqc,rchd->rqhd", jnp.where(mask, weights, 0.0), gather(values))


def inputs(rows: int, seq: int, page_tokens: int, width: int, heads: int = 6, kv_heads: int = 2):
    rng = np.random.default_rng(seq * 100 + page_tokens)

    def random(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    num_pages, context = rows * width + 1, page_tokens * width
    query = random(rows, seq, heads, 8)
    keys, values = (random(num_pages, kv_heads, page_tokens, 8) for _ in range(2))
    table = rng.permutation(num_pages)[: rows * width].reshape(rows, width)
    last = rng.integers(0, context - seq + 1, (rows, 1)) + np.arange(seq)
    last[0], last[1] = np.arange(seq), context - seq + np.arange(seq)  # at the start, at the end
    last[2] = -1
    last[3, seq // 2 + 1 :] = -1
    return query, keys, values, jnp.asarray(table, jnp.int32), jnp.asarray(last, jnp.int32)


@pytest.mark.parametrize("block", [8, 512])
@pytest.mark.parametrize(
    ("seq", "page_tokens", "width"), [(1, 1, 7), (1, 16, 5), (1, 4, 9), (5, 4, 6), (9, 16, 3)]
)
def test_attention_over_pages_equals_dense(monkeypatch, block, seq, page_tokens, width):
    monkeypatch.setattr(paged, "KEY_BLOCK", block)
    query, keys, values, table, last = inputs(6, seq, page_tokens, width)
    got = jax.jit(attend_pages)(query, keys, values, table, last)
    expected = dense(query, keys, values, table, last)
    np.testing.assert_allclose(got, expected, atol=2e-5)
    assert not got[2].any()
    query, keys, values = (x.astype(jnp.bfloat16) for x in (query, keys, values))
    rounded = attend_pages(query, keys, values, table, last)
    assert rounded.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounded.astype(jnp.float32), expected, atol=0.05)


def test_pages_that_are_not_there_yet_may_be_any_number():
    query, keys, values, table, _ = inputs(6, 1, 4, 5)
    last = jnp.full((6, 1), 9)  # of page 2
    expected = attend_pages(query, keys, values, table, last)
    unknown = table.at[:, 3:].set(jnp.array([[-1, 10**6]]))
    assert np.array_equal(attend_pages(query, keys, values, unknown, last), expected)
