"""Where the sampler's arrays live on its mesh: weights in their layout, and the KV cache.

Moves are device to device within one process; sending weights between hosts is not here.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import sharding
from models.config import TransformerConfig
from models.transformer import Params


def to_sampler(config: TransformerConfig, mesh: Mesh, params: Params) -> Params:
    """Lay the learner's parameters out for the sampler; what already lies so is not copied."""

    def move(array: jax.Array, target: NamedSharding) -> jax.Array:
        if array.sharding.is_equivalent_to(target, array.ndim):
            return array
        return jax.device_put(array, target)

    return jax.tree.map(move, params, sharding.param_shardings(config, mesh))


def cache_sharding(config: TransformerConfig, mesh: Mesh) -> NamedSharding:
    """Split the heads of every cache array [slots, context, kv_heads, head_dim] like their weights.

    Slots are not split: prefill gathers any slot's row, which would cross devices.
    """
    split = config.num_kv_heads % mesh.shape["tensor"] == 0
    return NamedSharding(mesh, PartitionSpec(None, None, "tensor" if split else None))
