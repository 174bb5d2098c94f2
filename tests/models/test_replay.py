"""Routing through the whole transformer: returned in every mode, and taken back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import layout, transformer
from models.config import TransformerConfig
from models.errors import ModelError
from models.transformer import init_cache, init_params

TINY = TransformerConfig(
    vocab_size=23,
    num_layers=2,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=8,
    num_experts=4,
    experts_per_token=2,
)


@pytest.fixture(scope="module")
def inputs():
    tokens = np.random.default_rng(0).integers(0, 23, (2, 6)).astype(np.int32)
    positions = np.tile(np.arange(6, dtype=np.int32), (2, 1))
    return init_params(TINY, jax.random.key(0)), tokens, positions


@jax.jit
def run(params, tokens, positions, replay):
    out = transformer.forward(TINY, params, tokens, positions, replay=replay)
    return out.hidden, out.routing


def test_replay_of_what_was_chosen_gives_the_same(inputs):
    hidden, routing = run(*inputs, None)
    assert routing.chosen.shape == (2, 2, 6, 2)
    assert routing.load.sum(-1).tolist() == [24, 24]
    again, same = run(*inputs, routing.chosen)
    np.testing.assert_allclose(again, hidden, atol=1e-6)
    assert np.array_equal(same.chosen, routing.chosen)


def test_each_layer_takes_its_own_in_either_layout(inputs):
    params, *rest = inputs
    replay = jnp.asarray(np.random.default_rng(1).integers(0, 3, (2, 2, 6, 1)), jnp.int32)
    replay = jnp.concatenate([replay, replay + 1], axis=-1)
    hidden, routing = run(params, *rest, replay)
    assert np.array_equal(routing.chosen, replay)
    scanned, other = run(layout.stacked(params), *rest, replay)
    np.testing.assert_allclose(scanned, hidden, atol=1e-5)
    assert np.array_equal(other.chosen, replay)


def test_what_the_cache_path_chooses_can_be_replayed(inputs):
    params, tokens, positions = inputs[0], *map(jnp.asarray, inputs[1:])
    cached = jax.jit(
        lambda *inputs: transformer.forward(
            TINY, *inputs, cache=init_cache(TINY, 2, 8), page_table=jnp.array([[1], [0]])
        )
    )(*inputs)
    hidden, routing = run(params, tokens, positions, cached.routing.chosen)
    np.testing.assert_allclose(hidden, cached.hidden, atol=1e-5)
    np.testing.assert_allclose(routing.balance, cached.routing.balance, rtol=1e-5)
    with pytest.raises(ModelError, match="segment_ids and replay are for rows without a cache"):
        transformer.forward(
            TINY,
            params,
            tokens,
            positions,
            cache=init_cache(TINY, 2, 8),
            page_table=jnp.array([[1], [0]]),
            replay=cached.routing.chosen,
        )
