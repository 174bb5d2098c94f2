"""The key-value cache of the sampler: pages of a few consecutive tokens, which sequences may share.

    page_table   row 0  [7 2 5 .]    position p of a row lies in page table[row, p // page_tokens],
                 row 1  [7 2 0 .]    at p % page_tokens; rows 0 and 1 share their first two pages

Layers follow the layout of the weights: a tuple of arrays, or one array with the layers in front,
which is donated and updated in place. Who owns a page, who shares it and when it is free is the
business of the host; nothing of it is here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, Execution

Layer = Float[Array, "pages kv_heads page_tokens head_dim"]
Stack = Float[Array, "layers pages kv_heads page_tokens head_dim"]
Choices = UInt[Array, "pages page_tokens chosen"]
ChoicesStack = UInt[Array, "layers pages page_tokens chosen"]


class Cache(NamedTuple):
    """Keys (rotated) and values of every layer, and the experts its router chose if asked for."""

    keys: tuple[Layer, ...] | Stack
    values: tuple[Layer, ...] | Stack
    chosen: tuple[Choices, ...] | ChoicesStack | None = None


def init_cache(
    config: TransformerConfig,
    num_pages: int,
    page_tokens: int,
    execution: Execution = PLAIN,
    mesh: Mesh | None = None,
    *,
    routing: bool = False,
) -> Cache:
    """Make an empty cache; the mesh is the one that `forward` is given.

    `routing` keeps the experts of every cached token, which only a model with a router has.
    """
    if routing and config.num_experts == 1:
        raise ModelError(
            "routing asks for the experts of every token, and model.num_experts=1 has no router; "
            "leave it off"
        )
    heads = config.num_kv_heads if mesh is None else max(config.num_kv_heads, mesh.shape["tensor"])
    shape = (num_pages, heads, page_tokens, config.head_dim)
    experts = (num_pages, page_tokens, config.experts_per_token)
    dtype = jnp.dtype(execution.compute_dtype)
    small = jnp.uint8 if config.num_experts <= 256 else jnp.uint16
    layers = config.num_layers
    if execution.layers == "scanned":
        stack = (layers, *shape)
        chosen = jnp.zeros((layers, *experts), small) if routing else None
        return Cache(jnp.zeros(stack, dtype), jnp.zeros(stack, dtype), chosen)
    return Cache(
        tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(layers)),
        tuple(jnp.zeros(experts, small) for _ in range(layers)) if routing else None,
    )


def cache_sharding(mesh: Mesh, execution: Execution = PLAIN) -> Cache:
    """Return where a cache lies, as a prefix of its tree: heads are split over `tensor`.

    Pages are not split: any row may read any page, which would cross devices.
    """
    layers = (None,) if execution.layers == "scanned" else ()
    heads = NamedSharding(mesh, PartitionSpec(*layers, None, "tensor"))
    return Cache(heads, heads, NamedSharding(mesh, PartitionSpec()))  # type: ignore[arg-type]


class Places(NamedTuple):
    """Where the tokens of some rows lie in the arrays of a layer; past the last page is nowhere."""

    pages: Int[Array, "rows seq"]
    offsets: Int[Array, "rows seq"]


def places(
    page_table: Int[Array, "rows pages_per_row"],
    positions: Int[Array, "rows seq"],
    num_pages: int,
    page_tokens: int,
) -> Places:
    """Look up the page of every position; -1, positions past the table and pages that are not there
    get the first page past the end, which writes drop.
    """
    column = positions // page_tokens
    known = (column >= 0) & (column < page_table.shape[1])
    column = jnp.where(known, column, jnp.zeros_like(column))
    pages = jnp.take_along_axis(page_table, column, axis=1)
    known &= (pages >= 0) & (pages < num_pages)
    return Places(
        jnp.where(known, pages, jnp.asarray(num_pages, pages.dtype)), positions % page_tokens
    )


def write_cache(
    cached: Float[Array, "pages kv_heads page_tokens head_dim"],
    new: Float[Array, "rows seq kv_heads head_dim"],
    where: Places,
) -> Float[Array, "pages kv_heads page_tokens head_dim"]:
    """Write keys or values at their places."""
    return cached.at[where.pages, :, where.offsets].set(new, mode="drop")


def write_choices(
    cached: UInt[Array, "pages page_tokens chosen"],
    new: Int[Array, "rows seq chosen"],
    where: Places,
) -> UInt[Array, "pages page_tokens chosen"]:
    """Write the experts of tokens at their places."""
    return cached.at[where.pages, where.offsets].set(new.astype(cached.dtype), mode="drop")


def copy_pages(cache: Cache, source: Int[Array, " n"], target: Int[Array, " n"]) -> Cache:
    """Copy whole pages of every layer; a target of -1, or past the end, is no copy."""
    stacked = not isinstance(cache.keys, tuple)

    def copy(x: Array) -> Array:
        num_pages = x.shape[1] if stacked else x.shape[0]
        where = jnp.where(target < 0, jnp.asarray(num_pages, target.dtype), target)
        if stacked:
            return x.at[:, where].set(x[:, source], mode="drop")
        return x.at[where].set(x[source], mode="drop")

    return jax.tree.map(copy, cache)


def read_routing(
    cache: Cache, pages: Int[Array, " n"]
) -> UInt[Array, "n page_tokens layers chosen"]:
    """Return the experts of the tokens of some pages, for `forward(replay=)`."""
    if cache.chosen is None:
        raise ModelError("the cache holds no router choices; make it with init_cache(routing=True)")
    if isinstance(cache.chosen, tuple):
        return jnp.stack([layer[pages] for layer in cache.chosen], axis=2)
    return cache.chosen[:, pages].transpose(1, 2, 0, 3)
