"""The move of arrays from the learner's mesh to the samplers of several hosts.

Every host gets a whole copy, laid out on its own mesh, by one program over all devices, which every
process runs at once. A stack of layers is moved one layer at a time: rounded, gathered on every
device, and cut to the device's part, so that beside the copies there is never more than one layer.
Left to the compiler, such a move would put whole stacks on every device. The hosts' meshes may
order their devices as they like. Which arrays these are is the business of `weights`.

    learner, four devices, fsdp     w0 w1 w2 w3
    a host's sampler, tensor        [a a] [b b]    a: the first half of the columns of w0..w3
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from models.sharding import MESH_AXES


class Move(NamedTuple):
    """How one array lies before and after; each axis of it along one axis of a mesh at most."""

    source: PartitionSpec
    target: PartitionSpec
    dtype: Any  # after
    stacked: bool  # layers lie along its first axis


@functools.lru_cache(maxsize=8)
def spreader(
    learner: Mesh, samplers: tuple[Mesh, ...], moves: tuple[Move, ...]
) -> Callable[[list[Array]], list[Array]]:
    """Return the jitted move of some arrays; `collect` takes a host's copy out of each result.

    Args:
        samplers: the mesh of every host, alike in shape; each device of the learner is in one.
    """
    places, shape = _places(learner, samplers), samplers[0].shape

    def local(place: Array, arrays: list[Array]) -> list[Array]:
        index = dict(zip(MESH_AXES, place.reshape(len(MESH_AXES)), strict=True))

        def part(move: Move, array: Array, first: int) -> Array:
            """Round, gather and cut an array whose axes are those of the move from `first` on."""
            array = array.astype(move.dtype)
            for dim, axis in enumerate(move.source[first:]):
                if axis is not None and learner.shape[axis] > 1:
                    array = jax.lax.all_gather(array, axis, axis=dim, tiled=True)
            for dim, axis in enumerate(move.target[first:]):
                if axis is not None and shape[axis] > 1:
                    size = array.shape[dim] // shape[axis]
                    array = jax.lax.dynamic_slice_in_dim(array, index[axis] * size, size, dim)
            return array

        def whole(move: Move, array: Array) -> Array:
            if not move.stacked:
                return part(move, array, 0)
            return jax.lax.map(lambda layer: part(move, layer, 1), array)

        return [whole(move, array) for move, array in zip(moves, arrays, strict=True)]

    own = PartitionSpec(MESH_AXES)  # along the first axis, one part for each device
    inputs = [move.source for move in moves]
    spread = jax.shard_map(
        local,
        mesh=learner,
        in_specs=(PartitionSpec(*MESH_AXES), inputs),
        out_specs=[own] * len(moves),
        check_vma=False,
    )
    return jax.jit(
        lambda arrays: spread(jnp.asarray(places), arrays),
        in_shardings=([NamedSharding(learner, spec) for spec in inputs],),
        out_shardings=[NamedSharding(learner, own)] * len(moves),
    )


def collect(spread: jax.Array, shape: Sequence[int], target: NamedSharding) -> jax.Array:
    """Take the copy of one host, whose devices are of this process; nothing is copied."""
    parts = {shard.device: shard.data for shard in spread.addressable_shards}
    own = [parts[device] for device in target.mesh.devices.flat]  # type: ignore[union-attr]
    return jax.make_array_from_single_device_arrays(tuple(shape), target, own)


def _places(
    learner: Mesh, samplers: Sequence[Mesh]
) -> Int[np.ndarray, "data fsdp expert tensor axes"]:
    """Where each device of the learner stands in the mesh of its host."""
    found = {device: index for mesh in samplers for index, device in np.ndenumerate(mesh.devices)}
    places = [found[device] for device in learner.devices.flat]
    return np.array(places, np.int32).reshape(*learner.devices.shape, len(MESH_AXES))
