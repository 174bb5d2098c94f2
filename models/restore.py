"""Put converted weights onto devices: each group of parameters straight to its sharding.

Whether the parameters fit is checked first. Room for activations and optimiser state is the
caller's to plan.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from models import layout, stored, tensors
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, Execution
from models.sharding import param_shardings
from models.transformer import Params, abstract_params

Read = Callable[[str, Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]]
"""Reads the named parameters of a group onto the shardings and dtypes that are asked for."""


def load_stored(
    folder: Path,
    config: TransformerConfig,
    mesh: Mesh | None = None,
    execution: Execution = PLAIN,
) -> Params:
    """Read converted weights into the layout and dtype of `execution`."""
    stored.check_files(folder)

    def read(group: str, targets: Mapping[str, jax.ShapeDtypeStruct]) -> Mapping[str, jax.Array]:
        stored.check_group(folder, config, group)
        return stored.read_group(folder, group, targets)

    return load_groups(read, config, mesh, execution)


def load_groups(
    read: Read, config: TransformerConfig, mesh: Mesh | None, execution: Execution
) -> Params:
    """Read parameters a group at a time, into the layout and dtype of `execution`.

    Scanned layers are written into their stack one by one, so that beside the parameters there is
    never more than one layer.
    """
    params = abstract_params(config, execution)
    stacked = layout.is_stacked(params)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    leaves = jax.tree.leaves(params)
    places: list[Sharding] = [SingleDeviceSharding(jax.local_devices()[0])] * len(leaves)
    if mesh is not None:
        places = jax.tree.leaves(param_shardings(config, mesh, execution))
    wanted = dict(zip(names, zip(leaves, places, strict=True), strict=True))
    arrays: dict[str, jax.Array] = {}
    for group in tensors.group_names(config):
        in_stack = stacked and group != tensors.OUTER
        prefix = "blocks." if in_stack else "" if group == tensors.OUTER else f"{group}."
        targets = {}
        for tensor in tensors.group(config, group):
            leaf, place = wanted[prefix + tensor.name]
            place = layout.layer_sharding(place) if in_stack else place
            targets[tensor.name] = jax.ShapeDtypeStruct(tensor.shape, leaf.dtype, sharding=place)
        for name, array in read(group, targets).items():
            if in_stack:
                leaf, place = wanted[prefix + name]
                if prefix + name not in arrays:
                    arrays[prefix + name] = _zeros(leaf.shape, leaf.dtype, place)()
                index = int(group.removeprefix("blocks."))
                array = _writer(place)(arrays[prefix + name], array, index)
            arrays[prefix + name] = array
    return jax.tree.unflatten(jax.tree.structure(params), [arrays[name] for name in names])


@functools.lru_cache(maxsize=64)
def _zeros(shape: tuple[int, ...], dtype: Any, place: Sharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=place)


@functools.lru_cache(maxsize=64)
def _writer(place: Sharding) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """Return a function that writes a layer into its stack in place."""
    return jax.jit(
        lambda stack, layer, index: jax.lax.dynamic_update_index_in_dim(stack, layer, index, 0),
        out_shardings=place,
        donate_argnums=0,
    )


def check_room(
    config: TransformerConfig, mesh: Mesh | None = None, execution: Execution = PLAIN
) -> None:
    """Refuse a model whose parameters alone do not fit the devices of this process."""
    leaves = jax.tree.leaves(abstract_params(config, execution))
    shapes = [leaf.shape for leaf in leaves]
    devices = jax.local_devices()[:1]
    if mesh is not None:
        shardings = jax.tree.leaves(param_shardings(config, mesh, execution))
        shapes = [place.shard_shape(shape) for place, shape in zip(shardings, shapes, strict=True)]
        devices = list(mesh.local_devices)
    needed = sum(
        leaf.dtype.itemsize * math.prod(shape) for leaf, shape in zip(leaves, shapes, strict=True)
    )
    for device in devices:
        free = free_bytes(device)
        if device.platform == "cpu" and free is not None:
            free //= len(devices)  # they share the host's memory
        if free is not None and needed > free:
            raise ModelError(
                f"the model's parameters need {needed / 1e9:.2f} GB on each of {len(devices)} "
                f"devices, and {device} has {free / 1e9:.2f} GB free; use more devices with "
                "mesh.fsdp, mesh.tensor or mesh.expert, or a smaller model; where adapters are "
                "trained, set execution.param_dtype to bfloat16"
            )


def free_bytes(device: Any) -> int | None:
    """Return the memory a device can still give; None where it does not say."""
    if device.platform != "cpu":
        stats = device.memory_stats()
        return stats["bytes_limit"] - stats["bytes_in_use"] if stats else None
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(found[0]) if found else None
