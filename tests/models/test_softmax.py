"""The softmax of attention in chunks: against NumPy, and training's attention against decode's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import blockwise, paged, softmax
from models.cache import places

PAGE = 16


def random(seed, *shape, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)


def test_a_power_is_exact():
    exponents = np.arange(-140, 1)
    expected = np.where(exponents < -126, 0.0, 2.0**exponents).astype(np.float32)
    assert np.array_equal(softmax.power(jnp.asarray(exponents, jnp.float32)), expected)
    assert float(softmax.power(jnp.float32(-1e30))) == 0


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_joined_chunks_are_the_softmax(scale):
    """In float64 by NumPy; the queries differ in how many keys they see, and one sees none."""
    scores, values = random(0, 5, 3 * 64, scale=scale), random(1, 3 * 64, 32)
    seen = jnp.arange(3 * 64)[None] < jnp.array([192, 130, 64, 1, 0])[:, None]
    parts = [
        softmax.chunk(scores[:, at : at + 64], seen[:, at : at + 64], values[at : at + 64])
        for at in (0, 64, 128)
    ]
    exponent, total, sums = softmax.join(softmax.join(parts[0], parts[1]), parts[2])
    wide = np.where(seen, np.asarray(scores, np.float64), -np.inf)
    for query in range(4):
        weights = np.exp(wide[query] - wide[query].max())
        expected = weights @ np.asarray(values, np.float64) / weights.sum()
        np.testing.assert_allclose(sums[query] / total[query], expected, atol=1e-5)
        logs = np.log(weights.sum()) + wide[query].max()
        assert softmax.log_sum(exponent, total)[query] == pytest.approx(logs, rel=1e-6)
    assert float(total[4]) == 0 and not np.any(sums[4])


def test_it_does_not_matter_how_chunks_are_joined():
    """A scale is a power of two, so that only the order of the sums counts."""
    scores, values = random(2, 7, 4 * 64, scale=20.0), random(3, 4 * 64, 16)
    parts = [
        softmax.chunk(scores[:, at : at + 64], jnp.ones((7, 64), bool), values[at : at + 64])
        for at in range(0, 256, 64)
    ]
    running = parts[0]
    for part in parts[1:]:
        running = softmax.join(running, part)
    top = jnp.max(jnp.stack([part[0] for part in parts]), axis=0)
    shares = [softmax.power(part[0] - top) for part in parts]
    total = parts[0][1] * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        total = total + part[1] * share
    assert np.array_equal(running[0], top) and np.array_equal(running[1], total)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 3, 32), (9, 3, 64)])
def test_decode_and_training_attend_with_the_same_bits(heads, kv_heads, dim):
    """A packed row of two segments, the second at a whole chunk, and each token of both decoded; in
    the shapes of tiny and of SmolLM2.
    """
    lengths, starts, width = (200, 150), (0, 256), 512
    segments = np.zeros((1, width), np.int32)
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        segments[0, start : start + length] = index + 1
    query, key, value = (
        random(i, 1, width, n, dim) for i, n in enumerate((heads, *[kv_heads] * 2))
    )
    first = jnp.asarray(np.where(segments == 2, 256, 0))
    last = jnp.asarray(np.where(segments > 0, np.arange(width), -1))
    row = jnp.zeros(1, jnp.int32)
    packed = jax.jit(blockwise.attend)(query, key, value, row, first, last)[0]
    decode = jax.jit(paged.attend, static_argnames="kv_heads")
    for start, length in zip(starts, lengths, strict=True):
        table = jnp.arange(-(-length // PAGE), dtype=jnp.int32)[None]
        positions = jnp.arange(length, dtype=jnp.int32)
        where = places(table, positions[None], table.size, PAGE)
        empty = [jnp.zeros(s) for s in paged.shapes(table.size, PAGE, kv_heads, dim)]
        own = slice(start, start + length)
        pages = paged.write(*empty, key[:, own], value[:, own], where)
        table = jnp.broadcast_to(table, (length, table.size))
        got = decode(query[0, own, None], *pages, table, positions[:, None], kv_heads=kv_heads)
        assert np.array_equal(got[:, 0], packed[own])
