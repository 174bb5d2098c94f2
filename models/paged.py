"""Attention of each query to the pages of its row, up to its own position.

One block of keys of all rows at a time, with an online softmax: as many blocks as the longest row
needs. Products take their operands in the dtype of the cache and sum in float32; the softmax is
float32. It has no gradient. Runs everywhere; accelerator kernels are in `kernels`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

KEY_BLOCK = 512  # keys of a row in one block
MASKED = -1e30  # finite, so that a row of masked scores makes no NaN


def attend_pages(
    query: Float[Array, "rows seq heads head_dim"],
    keys: Float[Array, "pages kv_heads page_tokens head_dim"],
    values: Float[Array, "pages kv_heads page_tokens head_dim"],
    page_table: Int[Array, "rows pages_per_row"],
    last: Int[Array, "rows seq"],
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend from each query to keys 0..last of its row; a query with last -1 gets zeros.

    Query head h reads key-value head h // (heads / kv_heads); scores are scaled by head_dim^-0.5.
    """
    rows, seq, _, dim = query.shape
    num_pages, kv_heads, page_tokens, _ = keys.shape
    width = min(max(KEY_BLOCK // page_tokens, 1), page_table.shape[1])  # pages in a block
    block = width * page_tokens
    page_table = jnp.clip(page_table, 0, num_pages - 1)
    page_table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % width)))
    tile = (query * dim**-0.5).reshape(rows, seq, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)

    ends = jnp.max(last, axis=1)

    def load(x: Array, index: Array) -> Array:
        pages = jax.lax.dynamic_slice_in_dim(page_table, index * width, width, axis=1)
        return x[pages].transpose(0, 2, 1, 3, 4).reshape(rows, kv_heads, block, dim)

    def step(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, sums = state
        place = (index * block + jnp.arange(block, dtype=last.dtype))[None, None, :]
        seen = (place <= last[:, :, None])[:, None, None]
        scores = _product("rkgqd,rkcd->rkgqc", tile, load(keys, index))
        new_peak = jnp.maximum(peak, jnp.max(jnp.where(seen, scores, MASKED), axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        # What an earlier owner left behind a row's end may be NaN, which a weight of 0 keeps.
        written = (place[0] <= ends[:, None])[:, None, :, None]
        block_values = jnp.where(written, load(values, index), jnp.zeros((), values.dtype))
        new = _product("rkgqc,rkcd->rkgqd", weights, block_values)
        total = total * shrink + jnp.sum(weights, axis=-1)
        return new_peak, total, sums * shrink[..., None] + new

    zeros = jnp.zeros(tile.shape[:-1], jnp.float32)
    state = (zeros + MASKED, zeros, jnp.zeros(tile.shape, jnp.float32))
    end = (jnp.max(ends) + block) // block
    _, total, sums = jax.lax.fori_loop(0, end, step, state)
    output = sums / jnp.where(total > 0, total, 1.0)[..., None]
    return output.transpose(0, 3, 1, 2, 4).reshape(query.shape).astype(query.dtype)


def _product(spec: str, left: Array, right: Array) -> Array:
    """Multiply in the dtype of `right`, and sum in float32."""
    return jnp.einsum(spec, left.astype(right.dtype), right, preferred_element_type=jnp.float32)
