"""The move of the weights from the learner's mesh to the samplers of several hosts.

Every host gets a whole copy, laid out on its own mesh; each is one program over all devices, which
every process runs at once. A stack of layers is moved one layer at a time: rounded, gathered on
every device, and cut to the device's part, so that beside the copies there is never more than one
layer. The hosts' meshes may order their devices as they like. What moves within one mesh is in
`weights`.

    learner, four devices, fsdp     w0 w1 w2 w3
    a host's sampler, tensor        [a a] [b b]    a: the first half of the columns of w0..w3
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from models import transformer
from models.config import TransformerConfig
from models.execution import Execution
from models.layers import FLOAT32_AXES
from models.layout import LAYERS
from models.sharding import MESH_AXES, axis_rules, param_shardings, partition
from models.transformer import Params


def spreader(
    config: TransformerConfig, execution: Execution, learner: Mesh, samplers: Sequence[Mesh]
) -> Callable[[Params], Params]:
    """Return the jitted move; `collect` takes a host's copy out of its result.

    Args:
        samplers: the mesh of every host, alike in shape; each device of the learner is in one.
    """
    from_rules, to_rules = axis_rules(config, learner), axis_rules(config, samplers[0])
    shapes = transformer.abstract_params(config, execution)
    variables = jax.tree.leaves(shapes, is_leaf=_is_variable)
    axes = [variable.get_metadata("axes") for variable in variables]
    structure = jax.tree.structure(shapes)
    places = _places(learner, samplers)

    def local(place: Array, leaves: list[Array]) -> list[Array]:
        index = dict(zip(MESH_AXES, place.reshape(len(MESH_AXES)), strict=True))

        def move(names: tuple[str | None, ...], array: Array) -> Array:
            """Round, gather and cut one layer of a parameter."""
            if not FLOAT32_AXES & set(names):
                array = array.astype(execution.compute_dtype)
            for dim, axis in enumerate(partition(names, from_rules)):
                if axis is not None and learner.shape[axis] > 1:
                    array = jax.lax.all_gather(array, axis, axis=dim, tiled=True)
            for dim, axis in enumerate(partition(names, to_rules)):
                if axis is not None and (parts := samplers[0].shape[axis]) > 1:
                    size = array.shape[dim] // parts
                    array = jax.lax.dynamic_slice_in_dim(array, index[axis] * size, size, dim)
            return array

        def whole(names: tuple[str | None, ...], array: Array) -> Array:
            if names[0] != LAYERS:
                return move(names, array)
            return jax.lax.map(lambda layer: move(names[1:], layer), array)

        return [whole(names, array) for names, array in zip(axes, leaves, strict=True)]

    own = PartitionSpec(MESH_AXES)  # along the first axis, one part for each device
    inputs = [partition(names, from_rules) for names in axes]
    spread = jax.shard_map(
        local,
        mesh=learner,
        in_specs=(PartitionSpec(*MESH_AXES), inputs),
        out_specs=[own] * len(axes),
        check_vma=False,
    )

    def run(params: Params) -> Params:
        return jax.tree.unflatten(structure, spread(jnp.asarray(places), jax.tree.leaves(params)))

    return jax.jit(
        run,
        in_shardings=(param_shardings(config, learner, execution),),
        out_shardings=jax.tree.unflatten(structure, [NamedSharding(learner, own)] * len(axes)),
    )


def collect(
    config: TransformerConfig, execution: Execution, sampler: Mesh, spread: Params
) -> Params:
    """Take the copy of one host, whose devices are of this process; nothing is copied."""

    def take(array: jax.Array, like: jax.ShapeDtypeStruct, target: NamedSharding) -> jax.Array:
        parts = {shard.device: shard.data for shard in array.addressable_shards}
        own = [parts[device] for device in sampler.devices.flat]
        return jax.make_array_from_single_device_arrays(like.shape, target, own)

    shapes = transformer.abstract_params(config, execution)
    return jax.tree.map(take, spread, shapes, param_shardings(config, sampler, execution))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _places(
    learner: Mesh, samplers: Sequence[Mesh]
) -> Int[np.ndarray, "data fsdp expert tensor axes"]:
    """Where each device of the learner stands in the mesh of its host."""
    found = {device: index for mesh in samplers for index, device in np.ndenumerate(mesh.devices)}
    places = [found[device] for device in learner.devices.flat]
    return np.array(places, np.int32).reshape(*learner.devices.shape, len(MESH_AXES))
