"""Sizes of tiles and the padding to whole ones, which every grouped kernel needs."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Num


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that holds `size`."""
    return -(-size // multiple) * multiple


def pad_axis(x: Num[Array, "..."], axis: int, multiple: int) -> Num[Array, "..."]:
    """Add zeros at the end of an axis until its size is a multiple; often there are none to add."""
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths)


def row_tile(rows: int, experts: int, smallest: int, largest: int) -> int:
    """Rows of a tile: a power of two that the fair share of an expert about fills.

    A larger one computes rows of other groups for nothing, a smaller one reads the matrices more
    often than it must.
    """
    share = max(rows // experts, 1)
    return min(max(1 << (share.bit_length() - 1), smallest), largest)


def largest_divisor(size: int, unit: int, limit: int) -> int:
    """Return the largest multiple of `unit` up to `limit` that divides `size`, itself one."""
    return max(tile for tile in range(unit, limit + 1, unit) if size % tile == 0)


def zero_tail(
    result: Num[Array, "rows size"], group_sizes: Int[Array, " experts"]
) -> Num[Array, "rows size"]:
    """Set the rows past the last group to zero; the kernels never write them."""
    rows = jnp.arange(result.shape[0], dtype=jnp.int32)
    inside = (rows < jnp.sum(group_sizes, dtype=jnp.int32))[:, None]
    return jnp.where(inside, result, jnp.zeros((), result.dtype))
