"""Grouped products on GPUs through Pallas-Triton: one program a tile of the result.

Which rows a program computes is worked out beforehand, from the group sizes, and read by each
program; tiles begin where their group begins, so no row is computed for two groups.

    groups of 5, 0 and 6 rows, tiles of 4       0123 4 | 5678 9A
    expert and first row of each program        (0, 0) (0, 4) (2, 5) (2, 9), then idle ones

The loads of a tile that reaches past the last row are moved back to end with it, and masked. jax
0.12 runs Pallas-Triton with a warning that a later one will not.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from models.kernels.tiles import pad_axis, row_tile, zero_tail

ROWS = 64  # of a tile of results, at most; the matrix instructions take no fewer than 16
COLUMNS = 128
DEPTH = 64  # of what one step adds up
UNIT = 16  # axes are padded to a multiple of it
PARAMS = plgpu.CompilerParams(num_warps=8, num_stages=3)


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
    experts, size, out = group_sizes.shape[0], x.shape[1], grad.shape[1]
    x, grad = (pad_axis(pad_axis(part, 0, UNIT), 1, UNIT) for part in (x, grad))
    inner, width = _power(x.shape[1], COLUMNS), _power(grad.shape[1], COLUMNS)
    shape = (experts, x.shape[1], grad.shape[1])
    result = pl.pallas_call(
        functools.partial(_outer_kernel, tile=_rows(x, experts)),
        grid=(shape[1] // inner, shape[2] // width, experts),
        in_specs=[pl.BlockSpec()] * 4,
        out_specs=pl.BlockSpec((None, inner, width), lambda i, j, expert: (expert, i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        compiler_params=PARAMS,
        interpret=interpret,
        name="grouped_outer",
    )(*_bounds(group_sizes), x, grad)
    return result[:, :size, :out]


def _outer_kernel(start_ref, end_ref, x_ref, grad_ref, out_ref, *, tile: int) -> None:
    """Add up one tile of one expert's sum, over all rows of its group."""
    expert = pl.program_id(2)
    start, end = start_ref[expert], end_ref[expert]
    inner = pl.ds(pl.program_id(0) * out_ref.shape[0], out_ref.shape[0])
    columns = pl.ds(pl.program_id(1) * out_ref.shape[1], out_ref.shape[1])

    def step(index: Array, total: Array) -> Array:
        begin = start + index * tile
        rows, own = _own_rows(begin, end, tile, x_ref.shape[0])
        # Both are masked: what is not a number times zero would not be zero.
        x = jnp.where(own, x_ref[rows, inner], jnp.zeros((), x_ref.dtype))
        grad = jnp.where(own, grad_ref[rows, columns], jnp.zeros((), x_ref.dtype))
        return total + plgpu.dot(x, grad, trans_a=True)

    total = jnp.zeros(out_ref.shape, jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(end - start, tile), step, total)
    out_ref[...] = total.astype(out_ref.dtype)


def _product(x: Array, w: Array, group_sizes: Array, transpose: bool, interpret: bool) -> Array:
    rows, experts, out = x.shape[0], w.shape[0], w.shape[1 if transpose else 2]
    x, w = pad_axis(pad_axis(x, 0, UNIT), 1, UNIT), pad_axis(pad_axis(w, 1, UNIT), 2, UNIT)
    shape = (x.shape[0], w.shape[1 if transpose else 2])
    tile, width = _rows(x, experts), _power(shape[1], COLUMNS)
    programs = _programs(group_sizes, x.shape[0], tile)
    result = pl.pallas_call(
        functools.partial(
            _product_kernel,
            tile=tile,
            width=width,
            depth=_power(x.shape[1], DEPTH),
            transpose=transpose,
        ),
        # The first axis runs fastest: the tiles of a row follow one another, so rows are read once.
        grid=(shape[1] // width, programs[0].shape[0]),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        compiler_params=PARAMS,
        interpret=interpret,
        name="grouped_transposed" if transpose else "grouped_product",
    )(*programs, x, w)
    return zero_tail(result[:rows, :out], group_sizes)


def _product_kernel(
    expert_ref,
    start_ref,
    end_ref,
    x_ref,
    w_ref,
    out_ref,
    *,
    tile: int,
    width: int,
    depth: int,
    transpose: bool,
) -> None:
    """Compute one tile of the result, of rows of one group."""
    program = pl.program_id(1)
    expert, start, end = expert_ref[program], start_ref[program], end_ref[program]
    columns = pl.ds(pl.program_id(0) * width, width)

    @pl.when(start < end)
    def _():
        rows, own = _own_rows(start, end, tile, x_ref.shape[0])

        def step(index: Array, total: Array) -> Array:
            inner = pl.ds(index * depth, depth)
            matrix = w_ref[(expert, columns, inner) if transpose else (expert, inner, columns)]
            return total + plgpu.dot(x_ref[rows, inner], matrix, trans_b=transpose)

        total = jnp.zeros((tile, width), jnp.float32)
        total = jax.lax.fori_loop(0, x_ref.shape[1] // depth, step, total)
        plgpu.store(out_ref.at[rows, columns], total.astype(out_ref.dtype), mask=own)


def _own_rows(begin: Array, end: Array, tile: int, num_rows: int) -> tuple[Any, Array]:
    """Return the rows to load for a tile, and which of them are begin..end."""
    first = jnp.minimum(begin, num_rows - tile)
    rows = first + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
    return pl.ds(first, tile), (rows >= begin) & (rows < end)


def _programs(group_sizes: Array, num_rows: int, tile: int) -> tuple[Array, Array, Array]:
    """Return expert, first row and end row of each program; idle ones end where they begin."""
    starts, ends = _bounds(group_sizes)
    tiles = (group_sizes + tile - 1) // tile
    last = jnp.cumsum(tiles, dtype=jnp.int32)
    program = jnp.arange(num_rows // tile + group_sizes.shape[0], dtype=jnp.int32)
    expert = jnp.searchsorted(last, program, side="right").astype(jnp.int32)
    live = expert < group_sizes.shape[0]
    expert = jnp.where(live, expert, 0)
    start = starts[expert] + (program - (last - tiles)[expert]) * tile
    return expert, start, jnp.where(live, ends[expert], start)


def _bounds(group_sizes: Array) -> tuple[Array, Array]:
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    return ends - group_sizes, ends


def _rows(x: Array, experts: int) -> int:
    """Rows of a tile, which all rows together must fill."""
    return min(row_tile(x.shape[0], experts, UNIT, ROWS), _power_below(x.shape[0]))


def _power(size: int, limit: int) -> int:
    """Return the largest power of two up to `limit` that divides `size`."""
    return min(size & -size, limit)


def _power_below(size: int) -> int:
    return 1 << (size.bit_length() - 1)
