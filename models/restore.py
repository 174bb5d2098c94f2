"""Put converted weights onto devices: each group of parameters straight to its sharding.

Whether the parameters fit is checked first. Room for activations and optimiser state is the
caller's to plan.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models import stored, tensors
from models.config import TransformerConfig
from models.errors import ModelError
from models.sharding import param_shardings
from models.transformer import Params, abstract_params


def named_leaves(params: Params) -> Iterator[tuple[str, jax.Array]]:
    """Yield each parameter with its dotted name, such as `blocks.0.moe.down`."""
    for path, leaf in nnx.to_flat_state(params):
        yield ".".join(str(part) for part in path), leaf.get_value()


def load_stored(folder: Path, config: TransformerConfig, mesh: Mesh | None) -> Params:
    """Read converted weights a group at a time, each straight onto its devices."""
    stored.check_files(folder)
    params = abstract_params(config)
    names = [name for name, _ in named_leaves(params)]
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = dict.fromkeys(names, device)
    else:
        leaves = jax.tree.leaves(param_shardings(config, mesh))
        shardings = dict(zip(names, leaves, strict=True))
    arrays: dict[str, jax.Array] = {}
    for group in tensors.group_names(config):
        stored.check_group(folder, config, group)
        prefix = "" if group == tensors.OUTER else f"{group}."
        targets = {
            tensor.name: jax.ShapeDtypeStruct(
                tensor.shape, jnp.float32, sharding=shardings[prefix + tensor.name]
            )
            for tensor in tensors.group(config, group)
        }
        found = stored.read_group(folder, group, targets)
        arrays |= {prefix + name: array for name, array in found.items()}
    return jax.tree.unflatten(jax.tree.structure(params), [arrays[name] for name in names])


def check_room(config: TransformerConfig, mesh: Mesh | None = None) -> None:
    """Refuse a model whose parameters alone do not fit the devices of this process."""
    leaves = jax.tree.leaves(abstract_params(config))
    if mesh is None:
        shapes = [leaf.shape for leaf in leaves]
        devices = jax.local_devices()[:1]
    else:
        shardings = jax.tree.leaves(param_shardings(config, mesh))
        shapes = [
            place.shard_shape(leaf.shape) for place, leaf in zip(shardings, leaves, strict=True)
        ]
        devices = list(mesh.local_devices)
    needed = 4 * sum(math.prod(shape) for shape in shapes)
    for device in devices:
        free = free_bytes(device)
        if device.platform == "cpu" and free is not None:
            free //= len(devices)  # they share the host's memory
        if free is not None and needed > free:
            raise ModelError(
                f"the model's float32 parameters need {needed / 1e9:.2f} GB on each of "
                f"{len(devices)} devices, and {device} has {free / 1e9:.2f} GB free; use more "
                "devices with mesh.fsdp, mesh.tensor or mesh.expert, or a smaller model"
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
