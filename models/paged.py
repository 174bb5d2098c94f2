"""Attention over the pages of a cache without a kernel: each query sees the keys of its row's pages
up to its own position.

    keys      [pages, kv_heads, head_dim, page_tokens]      as the product with a query reads them
    values    [pages, kv_heads, page_tokens, head_dim]

A platform takes the way that suits it. To decode, a CPU works through the pages that are in use,
some at a time, whatever rows they belong to, and joins the parts of each row at the end: no row
waits for the longest. Pieces of prompts it takes one by one. Other devices want wide work: a block
of keys of all rows at a time, as many as the longest row needs. What a row gets is the same numbers
summed in the same order whatever the other rows are, and on a CPU as in training, whose segments
begin at whole chunks. There is no gradient. Operands of products are rounded to the dtype of the
cache, sums and softmax are float32.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import softmax
from models.cache import Places
from models.softmax import MASKED

HEADS_AXIS, TOKENS_AXIS = 1, 3  # of the keys
KEY_BLOCK = 512  # keys of a row in one block
ITEM_TOKENS = softmax.WIDTH  # keys of a row that a CPU takes as one: it sums as training does
CHUNK_BYTES = 3 * 2**19  # of keys that a CPU gathers at a time: they stay in its cache


def shapes(
    num_pages: int, page_tokens: int, kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the keys and of the values of a layer on one device."""
    return (
        (num_pages, kv_heads, head_dim, page_tokens),
        (num_pages, kv_heads, page_tokens, head_dim),
    )


def write(
    keys: Float[Array, "pages kv_heads head_dim page_tokens"],
    values: Float[Array, "pages kv_heads page_tokens head_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    where: Places,
) -> tuple[
    Float[Array, "pages kv_heads head_dim page_tokens"],
    Float[Array, "pages kv_heads page_tokens head_dim"],
]:
    """Write keys and values at their places."""
    keys = keys.at[where.pages, :, :, where.offsets].set(key, mode="drop")
    return keys, values.at[where.pages, :, where.offsets].set(value, mode="drop")


def attend(
    query: Float[Array, "rows seq heads head_dim"],
    keys: Float[Array, "pages kv_heads head_dim page_tokens"],
    values: Float[Array, "pages kv_heads page_tokens head_dim"],
    page_table: Int[Array, "rows pages_per_row"],
    last: Int[Array, "rows seq"],
    kv_heads: int,
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend from each query to keys 0..last of its row; a query with last -1 gets zeros.

    Query head h reads key-value head h // (heads / kv_heads); scores are scaled by head_dim^-0.5.
    Values must be finite everywhere; keys that no query sees may be anything.
    """
    assert kv_heads == keys.shape[HEADS_AXIS]
    narrow = _ragged if query.shape[1] == 1 else _each_row

    def core(*inputs: Array) -> Array:
        return jax.lax.platform_dependent(*inputs, cpu=narrow, default=_blocks)

    scaled = query * jnp.asarray(query.shape[3] ** -0.5, query.dtype)
    return _by_head(core, scaled, keys, values, page_table, last)


def attend_wide(
    query: Float[Array, "rows seq heads head_dim"],
    keys: Float[Array, "pages kv_heads page_tokens head_dim"],
    values: Float[Array, "pages kv_heads page_tokens head_dim"],
    page_table: Int[Array, "rows pages_per_row"],
    last: Int[Array, "rows seq"],
) -> Float[Array, "rows seq heads head_dim"]:
    """Do what `attend` does on an accelerator, for queries that are scaled already, and keys that
    lie as values do.
    """
    core = functools.partial(_blocks, turned=False)
    return _by_head(core, query, keys, values, page_table, last)


def _by_head(
    core: Callable[..., Array],
    query: Array,
    keys: Array,
    values: Array,
    page_table: Array,
    last: Array,
) -> Array:
    """Give `core` the queries of a key-value head side by side, and take them apart again."""
    rows, seq, heads, dim = query.shape
    kv_heads = values.shape[1]
    tile = query.reshape(rows, seq, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    tile = tile.reshape(rows, kv_heads, -1, dim)
    table = jnp.clip(page_table, 0, values.shape[0] - 1)
    output = core(tile, keys, values, table, last)
    output = output.reshape(rows, kv_heads, heads // kv_heads, seq, dim).transpose(0, 3, 1, 2, 4)
    return output.reshape(query.shape).astype(query.dtype)


def _quotient(sums: Array, total: Array) -> Array:
    """Divide by the sum of the weights, which is 0 where a query sees nothing."""
    return sums / jnp.where(total == 0, 1.0, total)[..., None]


def _blocks(
    tile: Array,
    keys: Array,
    values: Array,
    table: Array,
    last: Array,
    size: int = 0,
    *,
    turned: bool = True,
) -> Array:
    """Take a block of keys of every row at a time; `turned` keys have tokens as their last axis."""
    rows, kv_heads, width, _ = tile.shape
    page_tokens = values.shape[2]
    pages = min(max((size or KEY_BLOCK) // page_tokens, 1), table.shape[1])  # of a row in a block
    block = pages * page_tokens
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages)))
    last = jnp.tile(last, (1, width // last.shape[1]))

    def step(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        here = jax.lax.dynamic_slice_in_dim(table, index * pages, pages, axis=1)

        def gather(x: Array) -> Array:
            return x[here].swapaxes(1, 2).reshape(rows, kv_heads, block, -1)

        if turned:
            beside = keys[here].transpose(0, 2, 3, 1, 4).reshape(rows, kv_heads, -1, block)
            scores = softmax.product("rkqd,rkdc->rkqc", tile, beside)
        else:
            scores = softmax.product("rkqd,rkcd->rkqc", tile, gather(keys))
        place = index * block + jnp.arange(block, dtype=last.dtype)
        seen = (place[None, None] <= last[:, :, None])[:, None]
        return softmax.join(state, softmax.chunk(scores, seen, gather(values)))

    zeros = jnp.zeros((rows, kv_heads, width), jnp.float32)
    state = (zeros + MASKED, zeros, jnp.zeros(tile.shape, jnp.float32))
    _, total, sums = jax.lax.fori_loop(0, (jnp.max(last) + block) // block, step, state)
    return _quotient(sums, total)


def _each_row(tile: Array, keys: Array, values: Array, table: Array, last: Array) -> Array:
    """Take one row at a time: its queries are work enough, and no row waits for a longer one."""

    def row(inputs: tuple[Array, Array, Array]) -> Array:
        tile, table, last = (x[None] for x in inputs)
        return _blocks(tile, keys, values, table, last, ITEM_TOKENS)[0]

    return jax.lax.map(row, (tile, table, last))


def _ragged(tile: Array, keys: Array, values: Array, table: Array, last: Array) -> Array:
    """Take the pages in use one after another, for one query a row.

    a row of 3 pages, one of none, one of 5      item    0 1 2 3 4    of two pages each
                                                 row     0 0 2 2 2
                                                 column  0 1 0 1 2
    """
    rows, (page_tokens, dim) = table.shape[0], values.shape[2:]
    pages = min(max(ITEM_TOKENS // page_tokens, 1), table.shape[1])  # of an item
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages))).reshape(rows, -1, pages)
    columns, size = table.shape[1], pages * page_tokens
    counts = (last[:, 0] + size) // size
    ends = jnp.cumsum(counts, dtype=counts.dtype)
    starts, num_items = ends - counts, ends[-1]
    chunk = CHUNK_BYTES // (pages * keys[0].size * keys.dtype.itemsize)
    chunk = max(1, min(chunk, rows * columns))
    item = jnp.arange(-(-rows * columns // chunk) * chunk, dtype=counts.dtype)
    row = jnp.sum(item[:, None] >= ends[None], axis=1, dtype=counts.dtype)
    row = jnp.minimum(row, rows - 1)
    column = jnp.clip(item - starts[row], 0, columns - 1)
    page, seen = table[row, column], last[row, 0] - column * size  # the last seen in it
    place = jnp.arange(size, dtype=seen.dtype)[None, None, None]

    def step(index: Array, parts: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        def cut(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, index * chunk, chunk)

        # The pages of an item in one line for each head, so that products are few and long.
        here = cut(page)
        key = keys[here].transpose(0, 2, 3, 1, 4).reshape(chunk, -1, dim, size)
        value = values[here].swapaxes(1, 2).reshape(chunk, -1, size, dim)
        scores = softmax.product("ikqd,ikdc->ikqc", tile[cut(row)], key)
        mask = place <= cut(seen)[:, None, None, None]
        exponents, totals, sums = (
            jax.lax.dynamic_update_slice_in_dim(x, y, index * chunk, axis=0)
            for x, y in zip(parts, softmax.chunk(scores, mask, value), strict=True)
        )
        return exponents, totals, sums

    zeros = jnp.zeros((item.shape[0], *tile.shape[1:3]), jnp.float32)
    parts = zeros, zeros, jnp.zeros((*zeros.shape, dim), jnp.float32)
    parts = jax.lax.fori_loop(0, (num_items + chunk - 1) // chunk, step, parts)

    def join(column: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        index = jnp.minimum(starts + column, item.shape[0] - 1)
        exponents, totals, sums = (part[index] for part in parts)
        live = (column < counts)[:, None, None]
        exponents = jnp.where(live, exponents, 2 * MASKED)  # below any: the part counts for nothing
        return softmax.join(state, (exponents, totals, sums))

    state = tuple(jnp.zeros((rows, *part.shape[1:]), jnp.float32) for part in parts)
    _, total, sums = jax.lax.fori_loop(0, jnp.max(counts), join, (state[0] + MASKED, *state[1:]))
    return _quotient(sums, total)
