"""The sampler's copy of the weights: on its mesh, rounded to the dtype it computes in.

Moves are device to device within one process; sending weights between hosts is not here.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from models import sharding, transformer
from models.config import TransformerConfig
from models.execution import Execution
from models.layers import cast_params
from models.transformer import Params


def abstract_params(config: TransformerConfig, execution: Execution) -> Params:
    """Shapes and dtypes of the copy: products take theirs from the activations, norms do not."""
    params = transformer.abstract_params(config, execution)
    return jax.eval_shape(lambda params: cast_params(params, execution.compute_dtype), params)


def to_sampler(
    config: TransformerConfig, mesh: Mesh, execution: Execution, params: Params
) -> Params:
    """Lay the learner's parameters out for the sampler; what already lies so is not copied."""

    def move(array: jax.Array, like: jax.ShapeDtypeStruct, target: NamedSharding) -> jax.Array:
        if array.dtype != like.dtype:
            array = _round(array, like.dtype)  # before the move: there is less to send
        if array.sharding.is_equivalent_to(target, array.ndim):
            return array
        return jax.device_put(array, target)

    shardings = sharding.param_shardings(config, mesh, execution)
    return jax.tree.map(move, params, abstract_params(config, execution), shardings)


@functools.partial(jax.jit, static_argnums=1)
def _round(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)
