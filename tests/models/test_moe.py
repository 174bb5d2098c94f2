"""Grouped products against one product per row, and the layer against a loop over tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import TransformerConfig
from models.moe import MoE, block_rows, grouped_matmul, route

CONFIG = TransformerConfig(num_layers=1, embed=12, mlp=10, num_experts=4, experts_per_token=2)


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
}


@partial(jax.jit, static_argnums=0)
def output_and_gradients(function, x, w, group_sizes, weight):
    def loss(x, w):
        output = function(x, w, group_sizes)
        return jnp.sum(output * weight), output

    grads, output = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return output, *grads


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("scale", [1, 25])
def test_grouped_matmul_equals_naive(sizes, scale):
    rng = np.random.default_rng(0)
    rows = 24 * scale
    x, weight = (jnp.asarray(rng.standard_normal((rows, d)), jnp.float32) for d in (5, 7))
    w = jnp.asarray(rng.standard_normal((4, 5, 7)), jnp.float32)
    inputs = (x, w, jnp.asarray(sizes, jnp.int32) * scale, weight)
    both = (output_and_gradients(function, *inputs) for function in (grouped_matmul, naive))
    for got, expected in zip(*both, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_blocks_follow_the_load():
    assert block_rows(64, 8) == 8
    assert block_rows(2**15, 8) == 256
    assert block_rows(2**20, 4) == 256
    for rows in (1, 7, 100, 3000, 10**6):
        block = block_rows(rows, 8)
        assert 8 <= block <= 256
        assert block & (block - 1) == 0


def test_route_by_hand():
    # probabilities 1/8, 4/8, 3/8: the best two are experts 1 and 2, with 4/7 and 3/7
    x = jnp.log(jnp.array([[1.0, 4.0, 3.0]]))
    chosen, weights = route(x, jnp.eye(3), 2)
    assert chosen.tolist() == [[1, 2]]
    np.testing.assert_allclose(weights, [[4 / 7, 3 / 7]], rtol=1e-6)


def apply(moe: MoE, x: np.ndarray, live: np.ndarray):
    return jax.jit(lambda x, live: moe(x, live))(x, live)


def moe_by_loop(moe: MoE, x: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, one expert at a time."""
    assert moe.router is not None
    router, gate_up, down = (np.asarray(p[...]) for p in (moe.router, moe.gate_up, moe.down))
    output, load = np.zeros_like(x), np.zeros(router.shape[1])
    for index in np.argwhere(live):
        token = x[tuple(index)]
        probs = np.exp(token @ router)
        chosen = np.argsort(-probs)[: moe.experts_per_token]
        for expert in chosen:
            gate, up = token @ gate_up[expert, :, 0], token @ gate_up[expert, :, 1]
            result = (gate / (1 + np.exp(-gate)) * up) @ down[expert]
            output[tuple(index)] += probs[expert] / probs[chosen].sum() * result
            load[expert] += 1
    return output, load


def test_moe_equals_loop_and_ignores_padding(getkey):
    moe = MoE(CONFIG, nnx.Rngs(params=getkey()))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 9, 12)).astype(np.float32)
    live = rng.random((3, 9)) < 0.7
    expected, load = moe_by_loop(moe, x, live)
    output, got_load = apply(moe, x, live)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert got_load.tolist() == load.tolist()
    x[~live] = 1e3
    assert np.array_equal(output, apply(moe, x, live)[0])


def test_no_token_is_dropped_when_all_choose_the_same_experts(getkey):
    moe = MoE(CONFIG, nnx.Rngs(params=getkey()))
    assert moe.router is not None
    moe.router[...] = jnp.zeros_like(moe.router[...]).at[0].set(jnp.array([0.0, 9.0, 0.0, 5.0]))
    x = np.random.default_rng(0).standard_normal((2, 50, 12)).astype(np.float32)
    x[:, :, 0] = 1.0
    live = np.ones((2, 50), bool)
    output, load = apply(moe, x, live)
    assert load.tolist() == [0, 100, 0, 100]
    np.testing.assert_allclose(output, moe_by_loop(moe, x, live)[0], atol=1e-5)


def test_single_expert_is_dense_without_router(getkey):
    config = TransformerConfig(embed=12, mlp=10, num_experts=1, experts_per_token=1)
    moe = MoE(config, nnx.Rngs(params=getkey()))
    assert moe.router is None
    x = np.random.default_rng(0).standard_normal((2, 4, 12)).astype(np.float32)
    live = np.array([[True] * 4, [True] * 3 + [False]])
    output, load = apply(moe, x, live)
    gate_up, down = np.asarray(moe.gate_up[...]), np.asarray(moe.down[...])
    gate, up = x @ gate_up[0, :, 0], x @ gate_up[0, :, 1]
    expected = (gate / (1 + np.exp(-gate)) * up) @ down[0] * live[:, :, None]
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert load.tolist() == [7]
