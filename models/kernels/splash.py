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
from jaxtyping import Array, Float, Int

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
    seq, heads, dim = query.shape[1:]
    ids = pad_axis(runs(segment_ids), 1, LANES)  # what is added lies behind every query
    # The kernel does not scale, and wants [heads, seq, head_dim].
    arrays = [
        pad_axis(x, 1, LANES).swapaxes(1, 2)
        for x in (query * jnp.asarray(dim**-0.5, query.dtype), key, value)
    ]
    attend_row = _kernel(ids.shape[1], heads, interpret)
    output: Any = jax.vmap(attend_row)(*arrays, splash.SegmentIds(ids, ids))
    return zero_padding(output.swapaxes(1, 2)[:, :seq], segment_ids)


def _kernel(seq: int, heads: int, interpret: bool) -> Callable[..., Any]:
    block = next(block for block in (MAX_BLOCK, 256, LANES) if seq % block == 0)
    return splash.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((seq, seq))] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
