"""Pages: where tokens are written, copies, router choices, and that where they lie is no matter."""

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import cache as pages
from models import layout, paged, transformer
from models.cache import Cache, copy_pages, init_cache, keep_finite, places, read_routing
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN

MODEL = TransformerConfig(
    vocab_size=31,
    num_layers=2,
    embed=32,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    mlp=16,
    num_experts=4,
    experts_per_token=2,
)
# The family of the large checkpoints: many experts, several of them for each token.
QWEN3_MOE = dataclasses.replace(
    MODEL, family="qwen3_moe", num_layers=3, num_experts=32, experts_per_token=8, qk_norm=True
)
EXECUTIONS = {"unrolled": PLAIN, "scanned": dataclasses.replace(PLAIN, layers="scanned")}

run = partial(jax.jit, static_argnums=0, static_argnames="execution")(transformer.forward)


@pytest.fixture(scope="module")
def params():
    return transformer.init_params(MODEL, jax.random.key(0))


def tokens_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, MODEL.vocab_size, shape).astype(np.int32)


def filled(cache: Cache, seed: int, value: float | None = None) -> Any:
    """A cache in which earlier owners have left something: numbers, or one value everywhere."""
    rng = np.random.default_rng(seed)

    def fill(x):
        if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
            return jnp.full_like(x, 7)
        return jnp.asarray(
            rng.standard_normal(x.shape) if value is None else np.full(x.shape, value), x.dtype
        )

    return jax.tree.map(fill, cache)


def test_writes_by_hand():
    shapes = paged.shapes(4, 2, 1, 1)  # four pages of two tokens
    table = jnp.array([[2, 0], [3, -1]], jnp.int32)
    positions = jnp.array([[0, 3, -1], [1, 2, 4]], jnp.int32)
    new = jnp.arange(1.0, 7.0).reshape(2, 3, 1, 1)
    where = places(table, positions, 4, 2)
    assert where.pages.tolist() == [[2, 0, 4], [3, 4, 4]]  # 4: padding, no page, past the table
    keys, values = (jnp.zeros(shape) for shape in shapes)
    keys, values = paged.write(keys, values, new, -new, where)
    assert keys[:, 0, 0, :].tolist() == [[0, 2], [0, 0], [1, 0], [0, 4]]
    assert np.array_equal(values[:, 0, :, 0], -keys[:, 0, 0, :])


def test_values_that_are_no_numbers_are_told_by_their_keys():
    key, value = np.ones((1, 3, 2, 2), np.float32), np.ones((1, 3, 2, 2), np.float32)
    value[0, 1, 0, 1], value[0, 2, 1, 0] = np.nan, -np.inf
    key, value = keep_finite(jnp.asarray(key), jnp.asarray(value))
    assert np.isnan(key).all(axis=-1).tolist() == [[[False, False], [True, False], [False, True]]]
    assert np.isfinite(key).sum() == 8 and np.isfinite(value).all()


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
def test_copies_of_pages_by_hand(execution):
    cache = filled(init_cache(MODEL, 5, 2, execution, routing=True), 0)
    copied = jax.jit(copy_pages)(cache, jnp.array([1, 4, 2, 0]), jnp.array([3, -1, 5, 1]))
    assert jax.tree.structure(copied) == jax.tree.structure(cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(copied), strict=True):
        axis = old.ndim - (4 if jnp.issubdtype(old.dtype, jnp.floating) else 3)
        assert np.array_equal(new, jnp.take(old, jnp.array([0, 0, 2, 1, 4]), axis=axis))


@pytest.mark.parametrize("page_tokens", [1, 5, 16])
def test_pieces_of_one_prompt_in_one_call(params, page_tokens):
    """Three rows are consecutive pieces of one sequence, in any order, beside another sequence."""
    tokens = tokens_of(0, 2, 20)
    positions = np.tile(np.arange(20, dtype=np.int32), (2, 1))
    expected = run(MODEL, params, tokens, positions).hidden
    width = -(-20 // page_tokens)
    table = np.random.default_rng(1).permutation(2 * width).astype(np.int32).reshape(2, width)
    cache = filled(init_cache(MODEL, 2 * width, page_tokens), 2)
    owner, start = np.array([0, 1, 0, 0]), np.array([14, 0, 0, 7])
    where = start[:, None] + np.arange(7, dtype=np.int32)
    where = np.where(where < 20, where, -1).astype(np.int32)
    out = run(
        MODEL,
        params,
        tokens[owner[:, None], where],
        where,
        cache=cache,
        page_table=table[owner],
    )
    for row in range(4):
        live = where[row] >= 0
        want = expected[owner[row], where[row][live]]
        np.testing.assert_allclose(out.hidden[row][live], want, atol=1e-5)


def test_rows_that_share_the_pages_of_a_prompt(params):
    """One row prefills eight tokens; three rows continue it, each in a page of its own."""
    prompt, ends = tokens_of(3, 1, 8), tokens_of(4, 3, 3)
    whole = np.concatenate([np.tile(prompt, (3, 1)), ends], axis=1)
    positions = np.tile(np.arange(11, dtype=np.int32), (3, 1))
    expected = run(MODEL, params, whole, positions).hidden
    cache = init_cache(MODEL, 6, 4)
    table = np.array([[4, 1, 0], [4, 1, 5], [4, 1, 2]], np.int32)
    out = run(MODEL, params, prompt, positions[:1, :8], cache=cache, page_table=table[:1])
    for column in range(3):
        out = run(
            MODEL,
            params,
            ends[:, column : column + 1],
            positions[:, 8 + column : 9 + column],
            cache=out.cache,
            page_table=table,
        )
        np.testing.assert_allclose(out.hidden[:, 0], expected[:, 8 + column], atol=1e-5)


def situation(seed: int, seq: int, page_tokens: int):
    """Rows 5 and 9 of 16 hold the same each time; all else, and where all lies, is drawn."""
    rng = np.random.default_rng(seed)
    rows, context = 16, 40
    width = context // page_tokens
    keep = [5, 9]
    order = rng.permutation(rows * width).astype(np.int32)
    table = order.reshape(rows, width)
    tokens = rng.integers(0, MODEL.vocab_size, (rows, seq)).astype(np.int32)
    starts = rng.integers(0, context - seq, rows)
    starts[keep] = [30, 3]
    positions = (starts[:, None] + np.arange(seq)).astype(np.int32)
    positions[rng.random(rows) < 0.3] = -1
    positions[keep] = np.array([[30], [3]]) + np.arange(seq)
    history = np.random.default_rng(99)
    tokens[keep] = history.integers(0, MODEL.vocab_size, (2, seq))
    cache = filled(init_cache(MODEL, rows * width, page_tokens), seed)
    held = history.standard_normal((4, 2, 2, context, 8)).astype(np.float32)
    layers, values = [], cache.values[0].shape
    for layer, kept in zip((*cache.keys, *cache.values), held, strict=True):
        layer = np.array(layer)
        for index, row in enumerate(keep):
            parts = kept[index].reshape(2, width, page_tokens, 8).swapaxes(0, 1)
            layer[table[row]] = parts if layer.shape == values else parts.swapaxes(2, 3)
        layers.append(jnp.asarray(layer))
    shuffle = rng.permutation(rows)
    where = [int(np.flatnonzero(shuffle == row)[0]) for row in keep]
    return (
        tokens[shuffle],
        positions[shuffle],
        Cache(tuple(layers[:2]), tuple(layers[2:])),
        table[shuffle],
        where,
    )


@pytest.mark.parametrize(("seq", "page_tokens"), [(1, 4), (1, 8), (1, 40), (6, 4), (6, 8)])
def test_a_row_is_bit_equal_whatever_its_neighbours_pages_and_place(params, seq, page_tokens):
    def hidden(seed: int):
        tokens, positions, cache, table, where = situation(seed, seq, page_tokens)
        out = run(MODEL, params, tokens, positions, cache=cache, page_table=table)
        return np.asarray(out.hidden)[where]

    first = hidden(1)
    for seed in range(2, 6):
        assert np.array_equal(first, hidden(seed))


@pytest.mark.parametrize("seq", [1, 4])
def test_what_an_earlier_owner_left_is_never_read(params, seq):
    """Not even NaN, in the pages of the row itself and in those of others."""
    tokens = tokens_of(5, 2, 10)
    positions = np.tile(np.arange(10, dtype=np.int32), (2, 1))
    expected = run(MODEL, params, tokens, positions).hidden
    cache = init_cache(MODEL, 9, 4)
    cache = cache._replace(keys=filled(cache, 0, value=np.nan).keys)  # values are never NaN
    table = np.array([[7, 1, 2], [3, 8, 5]], np.int32)
    for start in range(0, 8, seq):
        columns = slice(start, start + seq)
        out = run(
            MODEL,
            params,
            tokens[:, columns],
            positions[:, columns],
            cache=cache,
            page_table=table,
        )
        cache = out.cache
        np.testing.assert_allclose(out.hidden, expected[:, columns], atol=1e-5)


@pytest.mark.parametrize("execution", EXECUTIONS.values(), ids=EXECUTIONS)
@pytest.mark.parametrize("config", [MODEL, QWEN3_MOE], ids=["tiny", "qwen3_moe"])
def test_routing_read_from_pages_replays_to_the_same_experts(config, execution):
    """Prefilled in two pieces, then decoded: the packed forward is given what the cache kept."""
    params = transformer.init_params(config, jax.random.key(1))
    tokens = tokens_of(6, 3, 14)
    positions = np.tile(np.arange(14, dtype=np.int32), (3, 1))
    own = layout.stacked(params) if execution.layers == "scanned" else params
    cache = init_cache(config, 13, 4, execution, routing=True)
    table = np.random.default_rng(7).permutation(13)[:12].reshape(3, 4).astype(np.int32)
    seen = []
    for start, end in itertools.pairwise([0, 5, 10, 11, 12, 13, 14]):
        columns = slice(start, end)
        out = run(
            config, own, tokens[:, columns], positions[:, columns], cache=cache, page_table=table
        )
        cache = out.cache
        seen.append(out.routing.chosen)
    chosen = read_routing(cache, jnp.asarray(table.reshape(-1)))
    assert chosen.shape == (12, 4, config.num_layers, config.experts_per_token)
    assert chosen.dtype == jnp.uint8
    replay = np.asarray(chosen).reshape(3, 16, config.num_layers, -1)[:, :14].transpose(2, 0, 1, 3)
    assert np.array_equal(replay, jnp.concatenate(seen, axis=2))
    packed = run(config, params, tokens, positions, replay=replay)
    assert np.array_equal(packed.routing.chosen, replay)
    free = run(config, params, tokens, positions)
    np.testing.assert_allclose(packed.hidden, free.hidden, atol=1e-5)
    assert np.array_equal(free.routing.chosen, replay)  # in float32, without near ties


def test_many_experts_take_two_bytes():
    config = dataclasses.replace(MODEL, num_experts=300)
    chosen = init_cache(config, 2, 4, routing=True).chosen[0]
    assert chosen.dtype == jnp.uint16
    where = pages.places(jnp.array([[1]]), jnp.array([[2]]), 2, 4)
    written = pages.write_choices(chosen, jnp.array([[[299, 256]]]), where)
    assert written[1, 2].tolist() == [299, 256] and int(written.sum()) == 555


def test_routing_that_is_not_there_is_refused():
    dense = dataclasses.replace(MODEL, num_experts=1, experts_per_token=1)
    with pytest.raises(ModelError, match="num_experts=1 has no router"):
        init_cache(dense, 2, 4, routing=True)
    with pytest.raises(ModelError, match="holds no router choices"):
        read_routing(init_cache(MODEL, 2, 4), jnp.array([0]))
