"""Grouped products on TPU: the megablox kernels of jax, with tiles chosen for the sizes at hand.

The kernels ask for whole tiles of rows, leave rows past the last group unwritten, and mask what a
tile holds beyond the other axes. float32 inputs are multiplied at the default precision of a TPU.
"""

from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jaxtyping import Array, Float, Int

from models.kernels.tiles import largest_divisor, pad_axis, round_up, row_tile, zero_tail

LANES = 128
MAX_ROWS, MAX_COLUMNS = 512, 1024  # two buffers of each operand and the sums fit in 16 MiB


def product(
    x: Float[Array, "rows in"],
    w: Float[Array, "experts in out"],
    group_sizes: Int[Array, " experts"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows out"]:
    """Multiply each group of rows by its expert's matrix."""
    return _product(x, w, group_sizes, False, interpret)


def transposed(
    grad: Float[Array, "rows out"],
    w: Float[Array, "experts in out"],
    group_sizes: Int[Array, " experts"],
    *,
    interpret: bool = False,
) -> Float[Array, "rows in"]:
    """Multiply each group of rows by the transpose of its expert's matrix."""
    return _product(grad, w, group_sizes, True, interpret)


def outer(
    x: Float[Array, "rows in"],
    grad: Float[Array, "rows out"],
    group_sizes: Int[Array, " experts"],
    *,
    interpret: bool = False,
) -> Float[Array, "experts in out"]:
    """Sum x^T grad over the rows of each group."""
    tile = row_tile(x.shape[0], group_sizes.shape[0], LANES, MAX_ROWS)
    return tgmm(
        pad_axis(x, 0, tile).swapaxes(0, 1),  # the kernel swaps them back
        pad_axis(grad, 0, tile),
        group_sizes,
        preferred_element_type=x.dtype,
        tiling=(tile, _column_tile(x.shape[1]), _column_tile(grad.shape[1])),
        interpret=interpret,
    )


def _product(x: Array, w: Array, group_sizes: Array, transpose: bool, interpret: bool) -> Array:
    rows, out = x.shape[0], w.shape[1 if transpose else 2]
    tile = row_tile(rows, w.shape[0], LANES, MAX_ROWS)
    result = gmm(
        pad_axis(x, 0, tile),
        w,
        group_sizes,
        preferred_element_type=x.dtype,
        tiling=(tile, _column_tile(x.shape[1]), _column_tile(out)),
        transpose_rhs=transpose,
        interpret=interpret,
    )
    return zero_tail(result[:rows], group_sizes)


def _column_tile(size: int) -> int:
    """The whole axis where it is short, else the largest tile that divides it."""
    if size <= MAX_COLUMNS:
        return size
    if size % LANES == 0:
        return largest_divisor(size, LANES, MAX_COLUMNS)
    tiles = -(-size // MAX_COLUMNS)  # the last one is cut by a mask
    return round_up(-(-size // tiles), LANES)
