"""Packed causal attention on NVIDIA GPUs: cuDNN's flash attention through jax.

cuDNN knows causal rows but not segments, so these are a mask, which becomes a bias of rows × seq ×
seq numbers of the inputs' 16 bits: 2 seq² bytes a row, 128 MiB at 8,192 tokens, read once per head
group in each pass. Blocks above the diagonal are skipped, blocks of other segments are not.
16-bit inputs only; it can be neither interpreted nor run elsewhere.
"""

import jax
from jaxtyping import Array, Float, Int

from models.errors import ModelError
from models.kernels.segments import runs, zero_padding
from models.kernels.tiles import pad_axis


def attend(
    query: Float[Array, "rows seq heads head_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    segment_ids: Int[Array, "rows seq"],
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend causally within runs of equal ids; query head h reads key head h // (heads / kv)."""
    if query.dtype.itemsize != 2:
        raise ModelError(
            f"cuDNN attention takes 16-bit numbers, not {query.dtype.name}; compute in bfloat16 or "
            "choose the xla back-end"
        )
    seq = query.shape[1]
    ids = pad_axis(runs(segment_ids), 1, 2)  # the backward pass takes even lengths only
    query, key, value = (pad_axis(x, 1, 2) for x in (query, key, value))
    output = jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=ids[:, None, :, None] == ids[:, None, None, :],
        is_causal=True,
        implementation="cudnn",
    )
    return zero_padding(output[:, :seq], segment_ids)
