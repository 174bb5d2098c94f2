"""Attention of each query to one contiguous range of keys, in blocks; a range with last < first is
padding and gives zeros.

One core serves packed rows and the cache. It visits only the blocks of keys that some query of its
block can see, with an online softmax, and recomputes the weights in the backward pass: time follows
the live ranges, memory is one block. Products take their operands in the dtype of the inputs and
sum in float32; the softmax is float32. Runs everywhere; accelerator kernels are in `kernels`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import softmax
from models.softmax import MASKED

QUERY_BLOCK = 256
KEY_BLOCK = 128  # of the backward pass; the forward one takes chunks that join exactly


def attend(
    query: Float[Array, "rows seq heads head_dim"],
    key: Float[Array, "slots context kv_heads head_dim"],
    value: Float[Array, "slots context kv_heads head_dim"],
    slot_ids: Int[Array, " rows"],
    first: Int[Array, "rows seq"],
    last: Int[Array, "rows seq"],
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend from each query to keys first..last of its row's slot.

    Query head h reads key-value head h // (heads / kv_heads); scores are scaled by head_dim^-0.5.
    """
    seq = query.shape[1]
    padding = -seq % min(QUERY_BLOCK, seq)
    if padding:
        query = jnp.pad(query, ((0, 0), (0, padding), (0, 0), (0, 0)))
        first = jnp.pad(first, ((0, 0), (0, padding)))
        last = jnp.pad(last, ((0, 0), (0, padding)), constant_values=-1)
    return _attend(query, key, value, slot_ids, first, last)[:, :seq]


class _Grid:
    """The blocks of one attention: `blocks` of queries a row, each with its range of key blocks."""

    def __init__(
        self, query: Array, key: Array, slot_ids: Array, first: Array, last: Array, keys: int
    ) -> None:
        self.rows, seq, heads, self.dim = query.shape
        self.context, self.kv_heads = key.shape[1:3]
        self.group = heads // self.kv_heads
        self.queries, self.keys = min(QUERY_BLOCK, seq), min(keys, self.context)
        self.blocks = seq // self.queries
        self.slot_ids, self.first, self.last = slot_ids, first, last

    def place(self, index: Array) -> tuple[Array, Array]:
        """Return the row and the first query of a query block."""
        return index // self.blocks, index % self.blocks * self.queries

    def load_queries(self, x: Array, row: Array, start: Array) -> Array:
        """Return one block as [kv_heads, group * queries, head_dim]."""
        shape = (1, self.queries, self.kv_heads * self.group, self.dim)
        block = jax.lax.dynamic_slice(x, (row, start, 0, 0), shape)
        block = block.reshape(self.queries, self.kv_heads, self.group, self.dim)
        return block.transpose(1, 2, 0, 3).reshape(self.kv_heads, -1, self.dim)

    def store_queries(self, x: Array, block: Array, row: Array, start: Array) -> Array:
        """Write one block of `load_queries` back in its place."""
        block = block.reshape(self.kv_heads, self.group, self.queries, self.dim)
        block = block.transpose(2, 0, 1, 3).reshape(1, self.queries, -1, self.dim)
        return jax.lax.dynamic_update_slice(x, block, (row, start, 0, 0))

    def load_keys(self, x: Array, row: Array, block: Array) -> Array:
        """Return one block as [keys, kv_heads, head_dim]; the last one ends with the context."""
        shape = (1, self.keys, self.kv_heads, self.dim)
        return jax.lax.dynamic_slice(x, (self.slot_ids[row], self._start(block), 0, 0), shape)[0]

    def add_keys(self, x: Array, update: Array, row: Array, block: Array) -> Array:
        """Add to one block of `load_keys` in place."""
        update = update + self.load_keys(x, row, block)
        return jax.lax.dynamic_update_slice(
            x, update[None], (self.slot_ids[row], self._start(block), 0, 0)
        )

    def _start(self, block: Array) -> Array:
        return jnp.minimum(block * self.keys, self.context - self.keys)

    def ranges(self, row: Array, start: Array) -> tuple[Array, Array]:
        """Return first and last key of every query of a block."""
        size = (1, self.queries)
        first = jax.lax.dynamic_slice(self.first, (row, start), size)[0]
        return first, jax.lax.dynamic_slice(self.last, (row, start), size)[0]

    def key_blocks(self, first: Array, last: Array) -> tuple[Array, Array]:
        """Return the range of key blocks that holds the keys of all live queries."""
        live = first <= last
        begin = jnp.min(jnp.where(live, first, self.context)) // self.keys
        end = (jnp.max(jnp.where(live, last, -1)) + self.keys) // self.keys
        return begin, end

    def mask(self, first: Array, last: Array, block: Array) -> Array:
        """Return [1, group * queries, keys]: what each query sees; no key is in two blocks."""
        index = (self._start(block) + jnp.arange(self.keys))[None, :]
        seen = (index >= first[:, None]) & (index <= last[:, None]) & (index >= block * self.keys)
        return jnp.tile(seen, (self.group, 1))[None]


@jax.custom_vjp
def _attend(
    query: Array, key: Array, value: Array, slot_ids: Array, first: Array, last: Array
) -> Array:
    return _attend_forward(query, key, value, slot_ids, first, last)[0]


def _attend_forward(
    query: Array, key: Array, value: Array, slot_ids: Array, first: Array, last: Array
):
    """Return the output, and for the backward pass the log-sum-exp of the scores as well."""
    grid = _Grid(query, key, slot_ids, first, last, softmax.WIDTH)
    width = grid.group * grid.queries

    def query_block(index: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        row, start = grid.place(index)
        tile = grid.load_queries(query, row, start) * grid.dim**-0.5
        low, high = grid.ranges(row, start)

        def key_block(block: Array, state: tuple[Array, Array, Array]):
            scores = softmax.product("kqd,ckd->kqc", tile, grid.load_keys(key, row, block))
            values = grid.load_keys(value, row, block).swapaxes(0, 1)
            part = softmax.chunk(scores, grid.mask(low, high, block), values)
            return softmax.join(state, part)

        zeros = jnp.zeros((grid.kv_heads, width), jnp.float32)
        state = (zeros + MASKED, zeros, jnp.zeros(tile.shape, jnp.float32))
        begin, end = grid.key_blocks(low, high)
        exponent, total, sums = jax.lax.fori_loop(begin, end, key_block, state)
        total = jnp.where(total > 0, total, 1.0)  # a query that sees nothing gives zeros
        block = (sums / total[:, :, None]).astype(query.dtype)
        output = grid.store_queries(results[0], block, row, start)
        logs = softmax.log_sum(exponent, total)
        return output, jax.lax.dynamic_update_index_in_dim(results[1], logs, index, 0)

    num_blocks = grid.rows * grid.blocks
    log_sums = jnp.zeros((num_blocks, grid.kv_heads, width), jnp.float32)
    results = (jnp.zeros_like(query), log_sums)
    output, log_sums = jax.lax.fori_loop(0, num_blocks, query_block, results)
    return output, (query, key, value, slot_ids, first, last, output, log_sums)


def _attend_backward(residuals: tuple[Array, ...], grad: Array):
    """Recompute the weights from the log-sum-exp; return gradients of query, key and value."""
    query, key, value, slot_ids, first, last, output, log_sums = residuals
    grid = _Grid(query, key, slot_ids, first, last, KEY_BLOCK)
    scale = grid.dim**-0.5

    def query_block(index: Array, grads: tuple[Array, Array, Array]):
        row, start = grid.place(index)
        tile = grid.load_queries(query, row, start) * scale
        grad_tile = grid.load_queries(grad, row, start)
        shift = jnp.sum(
            grad_tile.astype(jnp.float32)
            * grid.load_queries(output, row, start).astype(jnp.float32),
            axis=-1,
        )
        logs = log_sums[index]
        low, high = grid.ranges(row, start)

        def key_block(block: Array, state: tuple[Array, Array, Array]):
            grad_query, grad_key, grad_value = state
            keys, values = grid.load_keys(key, row, block), grid.load_keys(value, row, block)
            scores = softmax.product("kqd,ckd->kqc", tile, keys)
            weights = jnp.where(
                grid.mask(low, high, block), jnp.exp(scores - logs[:, :, None]), 0.0
            )
            grad_weights = softmax.product("kqd,ckd->kqc", grad_tile, values)
            grad_scores = weights * (grad_weights - shift[:, :, None])
            grad_query = grad_query + softmax.product("kqc,ckd->kqd", grad_scores, keys) * scale
            new_key = softmax.product("kqc,kqd->ckd", grad_scores, tile)
            new_value = softmax.product("kqc,kqd->ckd", weights, grad_tile)
            grad_key = grid.add_keys(grad_key, new_key, row, block)
            return grad_query, grad_key, grid.add_keys(grad_value, new_value, row, block)

        begin, end = grid.key_blocks(low, high)
        state = (jnp.zeros(tile.shape, jnp.float32), grads[1], grads[2])
        grad_query, grad_key, grad_value = jax.lax.fori_loop(begin, end, key_block, state)
        return grid.store_queries(grads[0], grad_query, row, start), grad_key, grad_value

    grads = tuple(jnp.zeros(x.shape, jnp.float32) for x in (query, key, value))
    grads = jax.lax.fori_loop(0, grid.rows * grid.blocks, query_block, grads)
    rounded = (x.astype(like.dtype) for x, like in zip(grads, (query, key, value), strict=True))
    return *rounded, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)
