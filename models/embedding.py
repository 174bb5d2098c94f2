"""The token table: looked up by ids, and multiplied by hidden states as the head.

Under a mesh the table is split by vocabulary over `tensor` and by width over `fsdp`. The lookup
moves ids and activations, never the table. The head leaves its scores split by vocabulary; along
`fsdp` it gathers the width for training, as for every weight, and adds up partial scores where
rows are not split.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from models.sharding import ROW_AXES, split_rows

TABLE = PartitionSpec("tensor", "fsdp")


def lookup(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "rows seq"],
    dtype: Any,
    mesh: Mesh | None = None,
    *,
    rows_split: bool = True,
) -> Float[Array, "rows seq embed"]:
    """Return the rows of the table, in `dtype`.

    With a mesh and `rows_split`, the rows of `tokens` lie split over the devices, and so does the
    result: each device looks its columns up for all rows along `fsdp`, which are then exchanged.
    Otherwise both are whole on every device.
    """
    if mesh is None or mesh.size == 1:
        return table[tokens].astype(dtype)

    def local(table: Array, tokens: Array) -> Array:
        if rows_split:
            tokens = jax.lax.all_gather(tokens, "fsdp", axis=0, tiled=True)
        own = tokens - jax.lax.axis_index("tensor") * table.shape[0]
        here = (own >= 0) & (own < table.shape[0])
        found = table[jnp.where(here, own, 0)].astype(dtype)
        # One device along `tensor` has the token; the others add zeros.
        found = jax.lax.psum(jnp.where(here[:, :, None], found, jnp.zeros((), dtype)), "tensor")
        if rows_split:
            return jax.lax.all_to_all(found, "fsdp", split_axis=0, concat_axis=2, tiled=True)
        return jax.lax.all_gather(found, "fsdp", axis=2, tiled=True)

    rows = PartitionSpec(ROW_AXES) if rows_split else PartitionSpec()
    return split_rows(mesh, local, (TABLE, rows), rows)(table, tokens)


def scores(
    table: Float[Array, "embed vocab"],
    hidden: Float[Array, "*batch embed"],
    mesh: Mesh | None = None,
    *,
    rows_split: bool = True,
) -> Float[Array, "*batch vocab"]:
    """Return hidden @ table, summed in float32 and kept so.

    With a mesh the vocabulary stays split, and so do the rows, the first axis of `hidden`, if
    `rows_split`.
    """
    if hidden.dtype == jnp.float32:
        product = jnp.einsum("...e,ev->...v", hidden, table.astype(jnp.float32))
    else:
        product = _product(hidden, table.astype(hidden.dtype))
    if mesh is None:
        return product
    rows = ROW_AXES if rows_split else None
    spec = PartitionSpec(rows, *(None,) * (hidden.ndim - 2), "tensor")
    return jax.lax.with_sharding_constraint(product, NamedSharding(mesh, spec))


@jax.custom_vjp
def _product(hidden: Array, table: Array) -> Array:
    return jnp.einsum("...e,ev->...v", hidden, table, preferred_element_type=jnp.float32)


def _product_forward(hidden: Array, table: Array):
    return _product(hidden, table), (hidden, table)


def _product_backward(residuals: tuple[Array, Array], grad: Array):
    """Round the gradient of the scores, so that both products take operands of one dtype."""
    hidden, table = residuals
    grad = grad.astype(hidden.dtype)
    wide = {"preferred_element_type": jnp.float32}
    grad_hidden = jnp.einsum("...v,ev->...e", grad, table, **wide)
    grad_table = jnp.einsum("...e,...v->ev", hidden, grad, **wide)
    return grad_hidden.astype(hidden.dtype), grad_table.astype(table.dtype)


_product.defvjp(_product_forward, _product_backward)
