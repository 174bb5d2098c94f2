"""Grouped matrix products: consecutive groups of rows, each times its own matrix.

One function with its own derivative over a table of back-ends. "blocks" is plain XLA, which runs
everywhere and is what a CPU uses; the kernels of accelerators are in `models.kernels`. Bare
`jax.lax.ragged_dot` is deliberately no back-end: off TPU it multiplies every row by every matrix.
Sharding is not here: the functions see the arrays of one device.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import kernels
from models.kernels import Grouped

FORWARD_ROWS, MOST_ROWS = 32, 128  # of a block, at most: of the product, and of its gradients


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(
    x: Float[Array, "tokens in"],
    w: Float[Array, "experts in out"],
    group_sizes: Int[Array, " experts"],
    backend: str = "blocks",
) -> Float[Array, "tokens out"]:
    """Multiply consecutive groups of rows of `x` each by its own matrix, summing in float32.

    `group_sizes` may sum to fewer than `tokens`: rows past the sum give zeros and get no gradient.
    `backend` is a settled one of `models.execution.Execution.experts`.
    """
    return _products(backend).product(x, w, group_sizes)


def _forward(x: Array, w: Array, group_sizes: Array, backend: str):
    return grouped_matmul(x, w, group_sizes, backend), (x, w, group_sizes)


def _backward(backend: str, residuals: tuple[Array, Array, Array], grad: Array):
    x, w, group_sizes = residuals
    products = _products(backend)
    # `grad` has the dtype of the product, so each gradient comes out in that of its input.
    return (
        products.transposed(grad, w, group_sizes),
        products.outer(x, grad, group_sizes),
        None,
    )


grouped_matmul.defvjp(_forward, _backward)


def _products(backend: str) -> Grouped:
    return BLOCKS if backend == "blocks" else kernels.grouped(backend)


def block_rows(rows: int, experts: int, most: int = MOST_ROWS) -> int:
    """Rows of one block: a power of two, at most half of an expert's fair share, in 8..most.

    Smaller blocks read an expert's matrix more often, larger ones compute more rows for nothing.
    """
    share = max(rows // (2 * experts), 1)
    return min(max(1 << (share.bit_length() - 1), 8), most)


def _each_group(group_sizes: Array, function: Callable, result: Array) -> Array:
    """Fold function(expert, first row, end row, result) over the groups with rows, in order."""
    ends = jnp.cumsum(group_sizes)
    order = jnp.argsort(group_sizes == 0, stable=True)

    def step(place: Array, result: Array) -> Array:
        expert = order[place]
        return function(expert, ends[expert] - group_sizes[expert], ends[expert], result)

    return jax.lax.fori_loop(0, jnp.sum(group_sizes > 0), step, result)


def _window(start: Array, end: Array, index: Array, block: int, rows: int) -> tuple[Array, Array]:
    """Return where block `index` of the group `start..end` begins, and which rows are its own.

    A block is moved back rather than leave the array, so that nothing is padded or copied. Groups
    of 3, 0 and 5 rows of 9 in blocks of 4, the rows of others in brackets:

        expert 0    0 1 2 [3]
        expert 2          3 4 5 6
                        [5 6] 7 [8]     moved back from 7..10
    """
    first = start + index * block
    begin = jnp.minimum(first, rows - block)
    row = begin + jnp.arange(block, dtype=begin.dtype)
    return begin, ((row >= first) & (row < end))[:, None]


def _multiply(x: Array, w: Array, group_sizes: Array, contract: int) -> Array:
    """Multiply each group of rows by its expert's matrix, contracting that matrix's given axis."""
    rows = x.shape[0]
    # A CPU's library sums larger products in another order: with these, decode and training get
    # the same numbers.
    most = FORWARD_ROWS if contract == 0 else MOST_ROWS
    block = min(block_rows(rows, w.shape[0], most), rows)

    def group(expert: Array, start: Array, end: Array, result: Array) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False)

        def step(index: Array, result: Array) -> Array:
            begin, own = _window(start, end, index, block, rows)
            product = jax.lax.dot_general(
                jax.lax.dynamic_slice_in_dim(x, begin, block),
                matrix,
                (((1,), (contract,)), ((), ())),
                preferred_element_type=jnp.float32,
            ).astype(x.dtype)
            kept = jax.lax.dynamic_slice_in_dim(result, begin, block)
            kept = jnp.where(own, product, kept)
            return jax.lax.dynamic_update_slice_in_dim(result, kept, begin, 0)

        return jax.lax.fori_loop(0, (end - start + block - 1) // block, step, result)

    return _each_group(group_sizes, group, _zeros((rows, w.shape[2 - contract]), x))


def _outer(x: Array, grad: Array, group_sizes: Array) -> Array:
    """Sum x^T grad over the rows of each group."""
    rows, experts = x.shape[0], group_sizes.shape[0]
    block = min(2 * block_rows(rows, experts), rows)  # each block reads and writes a whole sum

    def group(expert: Array, start: Array, end: Array, result: Array) -> Array:
        def part(index: Array) -> Array:
            begin, own = _window(start, end, index, block, rows)
            tile = jax.lax.dynamic_slice_in_dim(x, begin, block)
            return jax.lax.dot_general(
                jnp.where(own, tile, jnp.zeros_like(tile)),
                jax.lax.dynamic_slice_in_dim(grad, begin, block),
                (((0,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            )

        count = (end - start + block - 1) // block
        zero = jnp.zeros((), count.dtype)
        total = jax.lax.fori_loop(1, count, lambda i, total: total + part(i), part(zero))
        return jax.lax.dynamic_update_index_in_dim(result, total.astype(x.dtype), expert, 0)

    return _each_group(group_sizes, group, _zeros((experts, x.shape[1], grad.shape[1]), x))


def _zeros(shape: tuple[int, ...], x: Array) -> Array:
    """Return zeros in the dtype of `x` that no other call shares.

    The compiler makes equal arrays of zeros once and copies them for each loop that writes into
    one, which costs a product's memory and time. It cannot see that this scalar is always 0.
    """
    first = x[(0,) * x.ndim]
    never = (first != first) & (first == first)
    return jnp.broadcast_to(never.astype(x.dtype), shape)


BLOCKS = Grouped(
    functools.partial(_multiply, contract=0), functools.partial(_multiply, contract=1), _outer
)
