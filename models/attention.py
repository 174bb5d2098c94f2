"""Grouped-query attention, over packed rows (training) and over a key-value cache (sampling).

A query attends to one contiguous range of keys, `first..last`; a range with last < first is padding
and gives zeros.

    packed row   ids   1 1 1 2 2 0       query 4 (id 2) sees keys 3..4, query 5 (padding) sees none
    cache slot   keys  0 1 2 x x x       the query at position 2 sees keys 0..2, never what an
                                         earlier sequence left at x

One core serves both. It visits only the blocks of keys that some query of its block can see, with
an online softmax, and recomputes the weights in the backward pass: time follows the live ranges,
memory is one block. Accelerator kernels are not here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from models.config import TransformerConfig
from models.layers import RMSNorm, fan_in, normal, rotate, zeros
from models.sharding import ROW_AXES, split_rows

QUERY_BLOCK = 128
KEY_BLOCK = 128
MASKED = -1e30  # finite, so that a row of masked scores makes no NaN


class Cache(NamedTuple):
    """Keys (rotated) and values of every layer; one row per slot, indexed by absolute position."""

    keys: tuple[Float[Array, "slots context kv_heads head_dim"], ...]
    values: tuple[Float[Array, "slots context kv_heads head_dim"], ...]


def init_cache(config: TransformerConfig, num_slots: int, context: int) -> Cache:
    """Make an empty cache."""
    shape = (num_slots, context, config.num_kv_heads, config.head_dim)
    layers = range(config.num_layers)
    return Cache(
        tuple(jnp.zeros(shape, jnp.float32) for _ in layers),
        tuple(jnp.zeros(shape, jnp.float32) for _ in layers),
    )


class Attention(nnx.Module):
    """The projections around attention."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        embed, dim = config.embed, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        std = fan_in(embed)
        self.query = normal(rngs, (embed, heads, dim), ("embed", "heads", "head_dim"), std)
        self.key = normal(rngs, (embed, kv_heads, dim), ("embed", "kv_heads", "head_dim"), std)
        self.value = normal(rngs, (embed, kv_heads, dim), ("embed", "kv_heads", "head_dim"), std)
        out_std = fan_in(heads * dim) / (2 * config.num_layers) ** 0.5
        self.output = normal(rngs, (heads, dim, embed), ("heads", "head_dim", "embed"), out_std)
        bias = config.qkv_bias
        self.query_bias = zeros((heads, dim), ("heads", "head_dim")) if bias else None
        self.key_bias = zeros((kv_heads, dim), ("kv_heads", "head_dim")) if bias else None
        self.value_bias = zeros((kv_heads, dim), ("kv_heads", "head_dim")) if bias else None
        self.query_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None

    def project(
        self,
        x: Float[Array, "rows seq embed"],
        cos: Float[Array, "rows seq 1 half"],
        sin: Float[Array, "rows seq 1 half"],
    ) -> tuple[
        Float[Array, "rows seq heads head_dim"],
        Float[Array, "rows seq kv_heads head_dim"],
        Float[Array, "rows seq kv_heads head_dim"],
    ]:
        """Return rotated queries, rotated keys, and values."""
        query = jnp.einsum("rse,ehd->rshd", x, self.query[...])
        key = jnp.einsum("rse,ehd->rshd", x, self.key[...])
        value = jnp.einsum("rse,ehd->rshd", x, self.value[...])
        if self.query_bias is not None and self.key_bias is not None:
            query, key = query + self.query_bias[None, None], key + self.key_bias[None, None]
        if self.value_bias is not None:
            value = value + self.value_bias[None, None]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def merge(
        self, heads: Float[Array, "rows seq heads head_dim"]
    ) -> Float[Array, "rows seq embed"]:
        """Project the heads back to the residual stream."""
        return jnp.einsum("rshd,hde->rse", heads, self.output[...])


def packed_ranges(
    segment_ids: Int[Array, "rows seq"],
) -> tuple[Int[Array, "rows seq"], Int[Array, "rows seq"]]:
    """Return first and last key of each token: its run of equal ids up to itself; none for id 0."""
    index = jnp.broadcast_to(
        jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None], segment_ids.shape
    )
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(jnp.where(changed, index[:, 1:], 0), ((0, 0), (1, 0)))
    return jax.lax.cummax(starts, axis=1), jnp.where(segment_ids > 0, index, -1)


def attend_packed(
    query: Float[Array, "rows seq heads head_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    segment_ids: Int[Array, "rows seq"],
    mesh: Mesh | None = None,
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend causally within segments; with a mesh, each device does its own rows and heads."""

    def local(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
        rows = jnp.arange(query.shape[0], dtype=jnp.int32)
        return attend(query, key, value, rows, *packed_ranges(segment_ids))

    heads = PartitionSpec(ROW_AXES, None, "tensor")
    split = split_rows(mesh, local, (heads, heads, heads, PartitionSpec(ROW_AXES)), heads)
    return split(query, key, value, segment_ids)


def write_cache(
    cached: Float[Array, "slots context kv_heads head_dim"],
    new: Float[Array, "rows seq kv_heads head_dim"],
    positions: Int[Array, "rows seq"],
    slot_ids: Int[Array, " rows"],
) -> Float[Array, "slots context kv_heads head_dim"]:
    """Write at (slot, position) in place; positions -1 or past the context are dropped."""
    # A negative index would wrap to the end; one past the end is dropped.
    columns = jnp.where(positions < 0, cached.shape[1], positions)
    return cached.at[slot_ids[:, None], columns].set(new, mode="drop")


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

    def __init__(self, query: Array, key: Array, slot_ids: Array, first: Array, last: Array):
        self.rows, seq, heads, self.dim = query.shape
        self.context, self.kv_heads = key.shape[1:3]
        self.group = heads // self.kv_heads
        self.queries, self.keys = min(QUERY_BLOCK, seq), min(KEY_BLOCK, self.context)
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
    grid = _Grid(query, key, slot_ids, first, last)
    width = grid.group * grid.queries

    def query_block(index: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        row, start = grid.place(index)
        tile = grid.load_queries(query, row, start) * grid.dim**-0.5
        low, high = grid.ranges(row, start)

        def key_block(block: Array, state: tuple[Array, Array, Array]):
            peak, total, sums = state
            scores = jnp.einsum("kqd,ckd->kqc", tile, grid.load_keys(key, row, block))
            mask = grid.mask(low, high, block)
            new_peak = jnp.maximum(peak, jnp.max(jnp.where(mask, scores, MASKED), axis=-1))
            weights = jnp.where(mask, jnp.exp(scores - new_peak[:, :, None]), 0.0)
            shrink = jnp.exp(peak - new_peak)
            new = jnp.einsum("kqc,ckd->kqd", weights, grid.load_keys(value, row, block))
            total = total * shrink + jnp.sum(weights, axis=-1)
            return new_peak, total, sums * shrink[:, :, None] + new

        zeros = jnp.zeros((grid.kv_heads, width), query.dtype)
        state = (zeros + MASKED, zeros, jnp.zeros_like(tile))
        begin, end = grid.key_blocks(low, high)
        peak, total, sums = jax.lax.fori_loop(begin, end, key_block, state)
        total = jnp.where(total > 0, total, 1.0)  # a query that sees nothing gives zeros
        output = grid.store_queries(results[0], sums / total[:, :, None], row, start)
        log_sum = peak + jnp.log(total)
        return output, jax.lax.dynamic_update_index_in_dim(results[1], log_sum, index, 0)

    num_blocks = grid.rows * grid.blocks
    log_sums = jnp.zeros((num_blocks, grid.kv_heads, width), query.dtype)
    results = (jnp.zeros_like(query), log_sums)
    output, log_sums = jax.lax.fori_loop(0, num_blocks, query_block, results)
    return output, (query, key, value, slot_ids, first, last, output, log_sums)


def _attend_backward(residuals: tuple[Array, ...], grad: Array):
    """Recompute the weights from the log-sum-exp; return gradients of query, key and value."""
    query, key, value, slot_ids, first, last, output, log_sums = residuals
    grid = _Grid(query, key, slot_ids, first, last)
    scale = grid.dim**-0.5

    def query_block(index: Array, grads: tuple[Array, Array, Array]):
        row, start = grid.place(index)
        tile = grid.load_queries(query, row, start) * scale
        grad_tile = grid.load_queries(grad, row, start)
        shift = jnp.sum(grad_tile * grid.load_queries(output, row, start), axis=-1)
        log_sum = log_sums[index]
        low, high = grid.ranges(row, start)

        def key_block(block: Array, state: tuple[Array, Array, Array]):
            grad_query, grad_key, grad_value = state
            keys, values = grid.load_keys(key, row, block), grid.load_keys(value, row, block)
            scores = jnp.einsum("kqd,ckd->kqc", tile, keys)
            weights = jnp.where(
                grid.mask(low, high, block), jnp.exp(scores - log_sum[:, :, None]), 0.0
            )
            grad_weights = jnp.einsum("kqd,ckd->kqc", grad_tile, values)
            grad_scores = weights * (grad_weights - shift[:, :, None])
            grad_query = grad_query + jnp.einsum("kqc,ckd->kqd", grad_scores, keys) * scale
            new_key = jnp.einsum("kqc,kqd->ckd", grad_scores, tile)
            new_value = jnp.einsum("kqc,kqd->ckd", weights, grad_tile)
            grad_key = grid.add_keys(grad_key, new_key, row, block)
            return grad_query, grad_key, grid.add_keys(grad_value, new_value, row, block)

        begin, end = grid.key_blocks(low, high)
        state = (jnp.zeros_like(tile), grads[1], grads[2])
        grad_query, grad_key, grad_value = jax.lax.fori_loop(begin, end, key_block, state)
        return grid.store_queries(grads[0], grad_query, row, start), grad_key, grad_value

    grads = (jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value))
    grads = jax.lax.fori_loop(0, grid.rows * grid.blocks, query_block, grads)
    return *grads, None, None, None


_attend.defvjp(_attend_forward, _attend_backward)
