"""Packed causal attention on TPU: the splash kernels of jax, forward and backward.

Blocks above the diagonal are skipped; blocks of other segments are computed and masked, so time
follows the square of the row, not of the segments. Memory is linear in the row.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)
from jaxtyping import Array, Bool, Float, Int

from models.kernels.segments import runs, zero_padding
from models.kernels.tiles import pad_axis

LANES = 128
MAX_BLOCK = 512


def attend(
    query: Float[Array, "rows seq heads head_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    segment_ids: Int[Array, "rows seq"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend causally within runs of equal ids; query head h reads key head h // (heads / kv)."""
    ids = runs(segment_ids)
    output = _attend(query, key, value, ids, ids, interpret)
    return zero_padding(output, segment_ids)


def _attend(
    query: Array, key: Array, value: Array, query_ids: Array, key_ids: Array, interpret: bool
) -> Array:
    seq, heads, dim = query.shape[1:]
    offset = key.shape[1] - seq
    # What is added lies behind every query.
    query_ids, key_ids = pad_axis(query_ids, 1, LANES), pad_axis(key_ids, 1, LANES)
    # The kernel does not scale, and wants [heads, seq, head_dim].
    arrays = [
        pad_axis(x, 1, LANES).swapaxes(1, 2)
        for x in (query * jnp.asarray(dim**-0.5, query.dtype), key, value)
    ]
    attend_row = _kernel(query_ids.shape[1], key_ids.shape[1], offset, heads, interpret)
    output: Any = jax.vmap(attend_row)(*arrays, splash.SegmentIds(query_ids, key_ids))
    return output.swapaxes(1, 2)[:, :seq]


def _kernel(
    queries: int, keys: int, offset: int, heads: int, interpret: bool
) -> Callable[..., Any]:
    block_q, block_kv = (
        next(block for block in (MAX_BLOCK, 256, LANES) if size % block == 0)
        for size in (queries, keys)
    )
    return splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((queries, keys), offset)] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
