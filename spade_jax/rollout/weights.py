"""The sampler's copy of the weights: on its mesh, in the dtype it computes in or in eight bits.

Moves are device to device within one process; sending weights between hosts is not here.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import quantized, sharding, transformer
from models.config import TransformerConfig
from models.execution import Execution
from models.layers import Axes, cast_params
from models.quantized import Quantized
from models.transformer import Params
from spade_jax.engine_config import WeightFormat


def abstract_params(
    config: TransformerConfig, execution: Execution, form: WeightFormat = "same"
) -> Params:
    """Shapes and dtypes of the copy: products take theirs from the activations, norms do not; with
    int8 the matrices of the blocks are `Quantized`.
    """

    def copy(params: Params) -> Params:
        cast = cast_params(params, execution.compute_dtype)
        return cast if form == "same" else quantized.map_matrices(_quantize, cast)

    return jax.eval_shape(copy, transformer.abstract_params(config, execution))


def shardings(
    config: TransformerConfig, mesh: Mesh, execution: Execution, form: WeightFormat = "same"
) -> Params:
    """Where the copy lies; scales lie with the integers that they belong to."""
    places = sharding.param_shardings(config, mesh, execution)

    def split(place: NamedSharding, axes: Axes) -> Quantized:
        summed = quantized.summed_axis(axes)
        scale = (*place.spec[:summed], None, *place.spec[summed + 1 :])
        beside: Any = NamedSharding(mesh, PartitionSpec(*scale))
        return Quantized(place, beside)  # type: ignore[arg-type]

    return places if form == "same" else quantized.map_matrices(split, places)


def to_sampler(
    config: TransformerConfig,
    mesh: Mesh,
    execution: Execution,
    params: Params,
    form: WeightFormat = "same",
) -> Params:
    """Lay the learner's parameters out for the sampler; what already lies so is not copied."""
    if form == "int8":
        params = quantized.map_matrices(_quantize, params)  # before the move: there is less to send

    def move(array: jax.Array, like: jax.ShapeDtypeStruct, target: NamedSharding) -> jax.Array:
        if array.dtype != like.dtype:
            array = _round(array, like.dtype)
        if array.sharding.is_equivalent_to(target, array.ndim):
            return array
        return jax.device_put(array, target)

    shapes = abstract_params(config, execution, form)
    return jax.tree.map(move, params, shapes, shardings(config, mesh, execution, form))


def _quantize(weights: jax.Array, axes: Axes) -> Quantized:
    return _eight_bits(weights, quantized.summed_axis(axes))


_eight_bits = jax.jit(quantized.quantize, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def _round(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)
