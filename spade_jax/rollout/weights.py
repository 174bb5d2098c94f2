"""The sampler's copy of the weights: on its mesh, in the dtype it computes in or in eight bits.

Moves are device to device, between processes too: where the learner's mesh spans several, each
gets a whole copy, and all must ask for it together.
"""

import functools
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import quantized, sharding, transformer
from models.config import TransformerConfig
from models.execution import Execution
from models.layers import Axes, cast_params
from models.layout import LAYERS
from models.quantized import Quantized
from models.transformer import Params
from spade_jax.engine_config import WeightFormat
from spade_jax.rollout.spread import Move, collect, spreader


def rounded(params: Params, execution: Execution, form: WeightFormat = "same") -> Params:
    """The numbers of the copy: products take theirs in the dtype of the activations, norms do not;
    with int8 the matrices of the blocks are `Quantized`.
    """
    cast = cast_params(params, execution.compute_dtype)
    return cast if form == "same" else quantized.map_matrices(_quantize, cast)


def abstract_params(
    config: TransformerConfig, execution: Execution, form: WeightFormat = "same"
) -> Params:
    """Shapes and dtypes of the copy."""
    copy = functools.partial(rounded, execution=execution, form=form)
    return jax.eval_shape(copy, transformer.abstract_params(config, execution))


def shardings(
    config: TransformerConfig, mesh: Mesh, execution: Execution, form: WeightFormat = "same"
) -> Params:
    """Where the copy lies; scales lie with the integers that they belong to."""
    places = sharding.param_shardings(config, mesh, execution)

    def split(place: NamedSharding, axes: Axes) -> Quantized:
        summed = quantized.summed_axis(axes)
        scale = (*place.spec[:summed], None, *place.spec[summed + 1 :])
        beside: Any = NamedSharding(mesh, PartitionSpec(*scale), memory_kind=place.memory_kind)
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

    shapes = abstract_params(config, execution, form)
    if not jax.tree.leaves(params)[0].is_fully_addressable:
        return _to_hosts(config, execution, params, form)

    def move(array: jax.Array, like: jax.ShapeDtypeStruct, target: NamedSharding) -> jax.Array:
        if array.dtype != like.dtype:
            array = _round(array, like.dtype)
        if array.sharding.is_equivalent_to(target, array.ndim):
            return array
        return jax.device_put(array, target)

    return jax.tree.map(move, params, shapes, shardings(config, mesh, execution, form))


def _quantize(weights: jax.Array, axes: Axes) -> Quantized:
    return _eight_bits(weights, quantized.summed_axis(axes))


_eight_bits = jax.jit(quantized.quantize, static_argnums=1)


def _to_hosts(
    config: TransformerConfig, execution: Execution, params: Params, form: WeightFormat
) -> Params:
    """Move parameters that lie on several processes; each takes the copy for its own devices."""
    leaves, tree = jax.tree.flatten(params)
    learner = leaves[0].sharding.mesh
    samplers = sharding.host_meshes(config, learner)
    lie = jax.tree.leaves(shardings(config, learner, execution, form))
    leaves = [jax.device_put(*pair) for pair in zip(leaves, lie, strict=True)]
    moved = spreader(
        learner, tuple(samplers), moves(config, execution, learner, samplers[0], form)
    )(leaves)
    places = jax.tree.leaves(shardings(config, samplers[jax.process_index()], execution, form))
    return jax.tree.unflatten(
        tree,
        [
            collect(array, leaf.shape, place)
            for array, leaf, place in zip(moved, leaves, places, strict=True)
        ],
    )


def moves(
    config: TransformerConfig,
    execution: Execution,
    learner: Mesh,
    sampler: Mesh,
    form: WeightFormat = "same",
) -> tuple[Move, ...]:
    """The moves of the parameters between meshes, in the order of their leaves."""
    copy = abstract_params(config, execution, form)
    params = jax.tree.leaves(copy, is_leaf=lambda node: isinstance(node, nnx.Variable))
    stacked = [
        param.get_metadata("axes")[0] == LAYERS for param in params for _ in jax.tree.leaves(param)
    ]
    places = (
        jax.tree.leaves(shardings(config, mesh, execution, form)) for mesh in (learner, sampler)
    )
    return tuple(
        Move(source.spec, target.spec, leaf.dtype, is_stack)
        for is_stack, leaf, source, target in zip(
            stacked, jax.tree.leaves(copy), *places, strict=True
        )
    )


@functools.partial(jax.jit, static_argnums=1)
def _round(array: jax.Array, dtype: Any) -> jax.Array:
    return array.astype(dtype)
