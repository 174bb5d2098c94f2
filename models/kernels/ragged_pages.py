"""Attention over the pages of a cache on TPU: jax's ragged paged attention, for decoding and for
pieces of prompts alike.

    keys    [pages, page_tokens, (key 0, value 0, key 1, value 1, ...), head_dim]

The kernel reads keys and values from one array, so there is none of values. It takes heads of whole
lanes, in numbers that fill tiles: what is missing is zeros, in the cache and in the queries.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
from jaxtyping import Array, Float, Int

from models.cache import Places
from models.kernels.tiles import round_up

HEADS_AXIS, TOKENS_AXIS = 2, 1
LANES = 128
QUERY_BLOCK = 32
STEP_TOKENS = 1024  # keys in one step of the kernel: its scores of a block of queries are in VMEM,
STEP_BYTES = 2**21  # and twice the keys and values of a step


def shapes(
    num_pages: int, page_tokens: int, kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], None]:
    """Return the shape of the keys and values of a layer on one device."""
    heads = next(size for size in (1, 2, 4, round_up(kv_heads, 8)) if size >= kv_heads)
    return (num_pages, page_tokens, 2 * heads, round_up(head_dim, LANES)), None


def write(
    keys: Float[Array, "pages page_tokens combined_heads padded_dim"],
    values: None,
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    where: Places,
) -> tuple[Float[Array, "pages page_tokens combined_heads padded_dim"], None]:
    """Write keys and values at their places."""
    both = jnp.stack([key, value], axis=3)  # one after the other, head by head
    both = both.reshape(*key.shape[:2], -1, key.shape[3])
    both = _pad(both, keys.shape[2], keys.shape[3])
    return keys.at[where.pages, where.offsets].set(both, mode="drop"), values


def attend(
    query: Float[Array, "rows seq heads head_dim"],
    keys: Float[Array, "pages page_tokens combined_heads padded_dim"],
    values: None,
    page_table: Int[Array, "rows pages_per_row"],
    last: Int[Array, "rows seq"],
    kv_heads: int,
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend from each query to keys 0..last of its row; a query with last -1 gets zeros.

    Within a row `last` grows by one, and -1 is padding behind. The kernel wants the queries of all
    rows without padding between them, and at least one of each row:

        last  3  4 -1    tokens 0 0 1 2 2 2    a row of padding has one that sees one key, and
             -1 -1 -1    query  0 1 0 0 1 2    whose result is thrown away
              7  8  9
    """
    del values
    rows, seq, heads, dim = query.shape
    num_pages, page_tokens, combined, padded = keys.shape
    group = heads // kv_heads
    counts = jnp.maximum(jnp.sum(last >= 0, axis=1, dtype=jnp.int32), 1)
    starts = jnp.pad(jnp.cumsum(counts, dtype=jnp.int32), (1, 0))
    lengths = jnp.maximum(jnp.max(last, axis=1).astype(jnp.int32) + 1, 1)
    tokens = _pad(query, combined // 2 * group, padded).reshape(rows * seq, -1, padded)
    if seq > 1:
        place = jnp.arange(rows * seq, dtype=jnp.int32)
        row = jnp.sum(place[:, None] >= starts[None, 1:], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, rows - 1)
        tokens = tokens[row * seq + jnp.minimum(place - starts[row], seq - 1)]
    page_bytes = page_tokens * combined * padded * keys.dtype.itemsize
    step = min(STEP_TOKENS // page_tokens, STEP_BYTES // page_bytes)
    output = kernel.ragged_paged_attention(
        tokens,
        keys,
        lengths,
        jnp.clip(page_table, 0, num_pages - 1).astype(jnp.int32),
        starts,
        jnp.full((1,), rows, jnp.int32),
        sm_scale=dim**-0.5,
        num_kv_pages_per_block=min(max(step, 1), page_table.shape[1]),
        num_queries_per_block=min(QUERY_BLOCK, rows * seq),
    )
    if seq > 1:
        column = jnp.arange(seq, dtype=jnp.int32)[None]
        output = output[jnp.minimum(starts[:-1, None] + column, rows * seq - 1)]
    output = output.reshape(rows, seq, -1, padded)[:, :, :heads, :dim]
    return jnp.where((last >= 0)[:, :, None, None], output, jnp.zeros((), output.dtype))


def _pad(x: Array, heads: int, dim: int) -> Any:
    """Add heads and numbers to a head; the ones added are zeros."""
    widths = (0, heads - x.shape[2]), (0, dim - x.shape[3])
    return jnp.pad(x, ((0, 0), (0, 0), *widths)) if any(map(sum, widths)) else x
