"""The key-value cache of the sampler: one row per slot, indexed by absolute position.

Layers follow the layout of the weights: a tuple of arrays, or one array with the layers in front,
which is donated and updated in place. Paged caches are not here.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from models.config import TransformerConfig
from models.execution import PLAIN, Execution

Layer = Float[Array, "slots context kv_heads head_dim"]
Stack = Float[Array, "layers slots context kv_heads head_dim"]


class Cache(NamedTuple):
    """Keys (rotated) and values of every layer."""

    keys: tuple[Layer, ...] | Stack
    values: tuple[Layer, ...] | Stack


def init_cache(
    config: TransformerConfig,
    num_slots: int,
    context: int,
    execution: Execution = PLAIN,
    mesh: Mesh | None = None,
) -> Cache:
    """Make an empty cache; the mesh is the one that `forward` is given."""
    heads = config.num_kv_heads if mesh is None else max(config.num_kv_heads, mesh.shape["tensor"])
    shape = (num_slots, context, heads, config.head_dim)
    dtype = jnp.dtype(execution.compute_dtype)
    if execution.layers == "scanned":
        stack = (config.num_layers, *shape)
        return Cache(jnp.zeros(stack, dtype), jnp.zeros(stack, dtype))
    layers = range(config.num_layers)
    return Cache(
        tuple(jnp.zeros(shape, dtype) for _ in layers),
        tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


def cache_sharding(mesh: Mesh, execution: Execution = PLAIN) -> NamedSharding:
    """Split the heads of every array over `tensor`.

    Slots are not split: prefill gathers any slot's row, which would cross devices.
    """
    layers = (None,) if execution.layers == "scanned" else ()
    return NamedSharding(mesh, PartitionSpec(*layers, None, None, "tensor"))


def write_cache(
    cached: Float[Array, "slots context kv_heads head_dim"],
    new: Float[Array, "rows seq kv_heads head_dim"],
    positions: Int[Array, "rows seq"],
    slot_ids: Int[Array, " rows"],
) -> Float[Array, "slots context kv_heads head_dim"]:
    """Write at (slot, position) in place; positions -1 or past the context are dropped."""
    # A negative index would wrap to the end; one past the end is dropped.
    columns = jnp.where(positions < 0, cached.shape[1], positions)
    return cached.at[slot_ids[:, None], columns].set(new, mode="drop")
