"""Grouped products against one product per row, in the back-end that runs everywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.grouped import block_rows, grouped_matmul


def naive(x, w, group_sizes):
    """Pick the matrix of each row; rows past the last group give zeros."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(x.shape[0])
    expert = jnp.sum(row[:, None] >= ends[None, :], axis=1)
    matrices = w[jnp.minimum(expert, w.shape[0] - 1)]
    return jnp.where((row < ends[-1])[:, None], jnp.einsum("ti,tio->to", x, matrices), 0.0)


GROUPS = {
    "even": (6, 6, 6, 6),
    "empty": (0, 20, 0, 4),
    "all on the first": (24, 0, 0, 0),
    "all on the last": (0, 0, 0, 24),
    "padding": (3, 1, 0, 9),
    "nothing": (0, 0, 0, 0),
    "one row": (0, 1, 0, 0),
    "one row short": (7, 9, 6, 1),
}


@partial(jax.jit, static_argnums=0)
def output_and_gradients(function, x, w, group_sizes, weight):
    def loss(x, w):
        output = function(x, w, group_sizes)
        return jnp.sum(output.astype(jnp.float32) * weight), output

    grads, output = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return output, *grads


def draw(rows, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal((rows, d)), jnp.float32) for d in (5, 7))
    w = jnp.asarray(rng.standard_normal((4, 5, 7)), jnp.float32)
    return x.astype(dtype), w.astype(dtype), weight


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("scale", [1, 25])
def test_grouped_matmul_equals_naive(sizes, scale):
    x, w, weight = draw(24 * scale)
    inputs = (x, w, jnp.asarray(sizes, jnp.int32) * scale, weight)
    both = (output_and_gradients(function, *inputs) for function in (grouped_matmul, naive))
    for got, expected in zip(*both, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_fewer_rows_than_a_block():
    x, w, weight = draw(3)
    inputs = (x, w, jnp.array([1, 0, 2, 0], jnp.int32), weight)
    both = (output_and_gradients(function, *inputs) for function in (grouped_matmul, naive))
    for got, expected in zip(*both, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_bfloat16_is_summed_in_float32():
    """Within the rounding of the result itself: sums in bfloat16 would be off by many times it."""
    x, w, weight = draw(600, jnp.bfloat16)
    sizes = jnp.array([500, 0, 60, 40], jnp.int32)
    got = output_and_gradients(grouped_matmul, x, w, sizes, weight)
    weight = weight.astype(jnp.bfloat16).astype(jnp.float32)  # as the gradient enters the products
    wide = (x.astype(jnp.float32), w.astype(jnp.float32), sizes, weight)
    for one, exact in zip(got, output_and_gradients(naive, *wide), strict=True):
        assert one.dtype == jnp.bfloat16
        scale = float(jnp.abs(exact).max())
        np.testing.assert_allclose(one.astype(jnp.float32), exact, rtol=2**-8, atol=2e-6 * scale)


def test_rows_past_the_groups_do_not_matter():
    x, w, weight = draw(24)
    sizes = jnp.array([3, 1, 0, 9], jnp.int32)
    first = output_and_gradients(grouped_matmul, x, w, sizes, weight)
    second = output_and_gradients(
        grouped_matmul, x.at[13:].set(1e3), w, sizes, weight.at[13:].set(-1e3)
    )
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one, other)


def test_blocks_follow_the_load():
    assert block_rows(64, 8) == 8
    assert block_rows(2048, 64) == 16
    assert block_rows(2**15, 64) == 128
    assert block_rows(2**20, 4) == 128
    for rows in (1, 7, 100, 3000, 10**6):
        block = block_rows(rows, 8)
        assert 8 <= block <= 128
        assert block & (block - 1) == 0


def test_no_array_of_experts_by_rows_and_nothing_padded():
    """Neither a dense expansion nor copies of the rows: temporaries are a few blocks."""
    rows, experts = 4096, 8
    shapes = [(rows, 64), (experts, 64, 64), (experts,), (rows, 64)]
    kinds = [jnp.float32, jnp.float32, jnp.int32, jnp.float32]
    inputs = [jax.ShapeDtypeStruct(*pair) for pair in zip(shapes, kinds, strict=True)]
    forward = jax.jit(grouped_matmul).lower(*inputs[:3]).compile()
    memory = forward.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < rows * 64 * 4 / 4
