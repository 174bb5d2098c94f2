"""What the attention kernels share about packed rows."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def runs(segment_ids: Int[Array, "rows seq"]) -> Int[Array, "rows seq"]:
    """Number the runs of equal ids, so that an id that comes back is another segment.

    Padding is a run like others: a softmax over no keys would not be a number.
    """
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(changed, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


def zero_padding(
    output: Float[Array, "rows seq heads head_dim"], segment_ids: Int[Array, "rows seq"]
) -> Float[Array, "rows seq heads head_dim"]:
    """Set what padding has attended to to zero, and so its gradient."""
    live = (segment_ids > 0)[:, :, None, None]
    return jnp.where(live, output, jnp.zeros((), output.dtype))
