"""The key-value cache of the sampler: pages of a few consecutive tokens, which sequences may share.

    page_table   row 0  [7 2 5 .]    position p of a row lies in page table[row, p // page_tokens],
                 row 1  [7 2 0 .]    at p % page_tokens; rows 0 and 1 share their first two pages

Layers follow the layout of the weights: a tuple of arrays, or one array with the layers in front,
which is donated and updated in place. How keys and values lie within a page is the choice of the
attention back-end (`models.paged` and its kernels). Who owns a page, who shares it and when it is
free is the business of the host; nothing of it is here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt

from models import kernels
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, AttentionBackend, Execution


class Cache(NamedTuple):
    """Keys (rotated) and values of every layer, and the experts its router chose if asked for: of
    each a tuple with an entry for every layer, or a stack of them.
    """

    keys: Any  # of [pages, ...]; values as well, where these have no array of their own
    values: Any  # the same, or None
    chosen: Any = None  # unsigned integers [pages, page_tokens, chosen], or None


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
    dtype = jnp.dtype(execution.compute_dtype)
    devices = 1 if mesh is None else mesh.shape["tensor"]
    heads = max(config.num_kv_heads // devices, 1)  # of a device
    paged = kernels.paged(execution.attention)
    shapes = paged.shapes(num_pages, page_tokens, heads, config.head_dim)
    keys, values = (None if shape is None else list(shape) for shape in shapes)
    for shape in (keys, values):
        if shape is not None:
            shape[paged.HEADS_AXIS] *= devices
    chosen = [num_pages, page_tokens, config.experts_per_token] if routing else None
    small = jnp.uint8 if config.num_experts <= 256 else jnp.uint16
    layers = config.num_layers

    def make(shape: list[int] | None, dtype: Any) -> Any:
        if execution.layers == "scanned":
            return None if shape is None else jnp.zeros([layers, *shape], dtype)
        return tuple(None if shape is None else jnp.zeros(shape, dtype) for _ in range(layers))

    return Cache(make(keys, dtype), make(values, dtype), make(chosen, small) if routing else None)


def cache_sharding(mesh: Mesh, execution: Execution = PLAIN) -> Cache:
    """Return where a cache lies, as a prefix of its tree: heads are split over `tensor`.

    Pages are not split: any row may read any page, which would cross devices.
    """
    layers = (None,) if execution.layers == "scanned" else ()
    heads: Any = NamedSharding(mesh, PartitionSpec(*layers, *heads_spec(execution.attention)))
    whole: Any = NamedSharding(mesh, PartitionSpec())
    return Cache(heads, heads, whole)


def heads_spec(backend: AttentionBackend) -> PartitionSpec:
    """Return how the arrays of a layer are split."""
    axis = kernels.paged(backend).HEADS_AXIS
    return PartitionSpec(*(None,) * axis, "tensor")


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


def keep_finite(
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
) -> tuple[Float[Array, "rows seq kv_heads head_dim"], Float[Array, "rows seq kv_heads head_dim"]]:
    """Make values safe to leave behind: finite, and where they were not, the key is NaN instead.

    What a page held before is masked by its scores alone, and a weight of 0 times NaN is NaN. Who
    sees such a token gets NaN by its key, as it should.
    """
    finite = jnp.isfinite(value)
    key = jnp.where(jnp.all(finite, axis=-1, keepdims=True), key, jnp.asarray(jnp.nan, key.dtype))
    return key, jnp.where(finite, value, jnp.zeros((), value.dtype))


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
