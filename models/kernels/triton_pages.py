"""Attention over the pages of a cache on NVIDIA GPUs: jax's paged attention for decoding, and no
kernel for pieces of prompts.

    keys, values    [pages, kv_heads, page_tokens, head_dim]

The kernel wants the pages of a head side by side. They are not, so it is told of one head only,
with each page of each head as a page, and every row as often as there are heads: nothing is copied.
Triton's blocks are powers of two, so a page is one and a head is padded to one in the cache.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import paged_attention
from jaxtyping import Array, Float, Int

from models.cache import Places
from models.errors import ModelError
from models.paged import attend_wide

HEADS_AXIS, TOKENS_AXIS = 1, 2
STEP_TOKENS = 64  # keys in one step of the kernel
SPLITS = 16  # of a row's keys, each worked on by itself
SMALLEST = 16  # side of a product


def shapes(
    num_pages: int, page_tokens: int, kv_heads: int, head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the keys and of the values of a layer on one device."""
    if page_tokens & (page_tokens - 1):
        raise ModelError(
            f"pages of {page_tokens} tokens; execution.attention=cudnn takes a power of two, "
            "such as 16 or 64"
        )
    dim = max(1 << (head_dim - 1).bit_length(), SMALLEST)
    shape = (num_pages, kv_heads, page_tokens, dim)
    return shape, shape


def write(
    keys: Float[Array, "pages kv_heads page_tokens padded_dim"],
    values: Float[Array, "pages kv_heads page_tokens padded_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    where: Places,
) -> tuple[
    Float[Array, "pages kv_heads page_tokens padded_dim"],
    Float[Array, "pages kv_heads page_tokens padded_dim"],
]:
    """Write keys and values at their places."""
    key, value = (_pad(x, keys.shape[3]) for x in (key, value))
    keys = keys.at[where.pages, :, where.offsets].set(key, mode="drop")
    return keys, values.at[where.pages, :, where.offsets].set(value, mode="drop")


def attend(
    query: Float[Array, "rows seq heads head_dim"],
    keys: Float[Array, "pages kv_heads page_tokens padded_dim"],
    values: Float[Array, "pages kv_heads page_tokens padded_dim"],
    page_table: Int[Array, "rows pages_per_row"],
    last: Int[Array, "rows seq"],
    kv_heads: int,
    *,
    interpret: bool = False,
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend from each query to keys 0..last of its row; a query with last -1 gets zeros."""
    rows, seq, heads, dim = query.shape
    num_pages, _, page_tokens, padded = keys.shape
    scaled = _pad(query * jnp.asarray(dim**-0.5, query.dtype), padded)
    if seq > 1:
        return attend_wide(scaled, keys, values, page_table, last)[..., :dim]
    step = max(STEP_TOKENS // page_tokens, 1)  # pages
    splits = min(SPLITS, -(-page_table.shape[1] // step))
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % (step * splits))))
    table = jnp.clip(table, 0, num_pages - 1).astype(jnp.int32)[:, None] * kv_heads
    table += jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]
    output = paged_attention.paged_attention(
        scaled.reshape(rows * kv_heads, heads // kv_heads, padded),
        *(x.reshape(1, -1, page_tokens, padded) for x in (keys, values)),
        table.reshape(rows * kv_heads, -1),
        jnp.repeat(last[:, 0].astype(jnp.int32) + 1, kv_heads),
        pages_per_compute_block=step,
        k_splits=splits,
        interpret=interpret,
    )
    return output.reshape(rows, 1, heads, padded)[..., :dim]


def _pad(x: Array, dim: int) -> Array:
    return x if x.shape[-1] == dim else jnp.pad(x, ((0, 0),) * 3 + ((0, dim - x.shape[-1]),))
