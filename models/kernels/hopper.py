"""Grouped products on Hopper GPUs: the kernels of jax that use the warpgroup matrix instructions.

16-bit numbers only. The search for a tile's group is unrolled over the experts, so split many
experts over devices. The weight gradient multiplies what lies behind a group in its last tile by
zero, so all rows must be finite. They can be neither interpreted nor run elsewhere.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot
from jaxtyping import Array, Float, Int

from models.errors import ModelError
from models.kernels.tiles import pad_axis, row_tile, zero_tail

COLUMNS = 128  # of a tile of results
DEPTH = 64  # of what one step adds up: 128 bytes, the widest swizzle
STEPS = 4  # tiles in flight


def product(
    x: Float[Array, "rows in"],
    w: Float[Array, "experts in out"],
    group_sizes: Int[Array, " experts"],
) -> Float[Array, "rows out"]:
    """Multiply each group of rows by its expert's matrix."""
    return _product(x, w, group_sizes, False)


def transposed(
    grad: Float[Array, "rows out"],
    w: Float[Array, "experts in out"],
    group_sizes: Int[Array, " experts"],
) -> Float[Array, "rows in"]:
    """Multiply each group of rows by the transpose of its expert's matrix."""
    return _product(grad, w, group_sizes, True)


def outer(
    x: Float[Array, "rows in"],
    grad: Float[Array, "rows out"],
    group_sizes: Int[Array, " experts"],
) -> Float[Array, "experts in out"]:
    """Sum x^T grad over the rows of each group."""
    _check(x.dtype)
    size, out = x.shape[1], grad.shape[1]
    result = transposed_ragged_dot(
        pad_axis(x, 1, COLUMNS),
        pad_axis(grad, 1, COLUMNS),
        group_sizes=group_sizes,
        block_m=COLUMNS,
        block_n=COLUMNS,
        block_k=DEPTH,
        max_concurrent_steps=STEPS,
        grid_block_n=1,
    )
    return result[:, :size, :out]


def _product(x: Array, w: Array, group_sizes: Array, transpose: bool) -> Array:
    _check(x.dtype)
    inner, columns = (2, 1) if transpose else (1, 2)
    out = w.shape[columns]
    result = ragged_dot(
        pad_axis(x, 1, DEPTH),
        pad_axis(pad_axis(w, inner, DEPTH), columns, COLUMNS),
        group_sizes=group_sizes,
        block_m=row_tile(x.shape[0], w.shape[0], 64, 128),
        block_n=COLUMNS,
        block_k=DEPTH,
        max_concurrent_steps=STEPS,
        grid_block_n=1,
        transpose_rhs=transpose,
    )
    return zero_tail(result[:, :out], group_sizes)


def _check(dtype: jax.typing.DTypeLike) -> None:
    if jnp.dtype(dtype).itemsize != 2:
        raise ModelError(
            f"the Hopper kernel multiplies 16-bit numbers, not {jnp.dtype(dtype).name}; compute in "
            "bfloat16 or choose the triton kernel"
        )
