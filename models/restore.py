"""Put converted weights onto devices: each group of parameters straight to its sharding.

Whether the parameters fit is checked first. Room for activations and optimiser state is the
caller's to plan.
"""

import math
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from models import layout, stored, tensors
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, Execution
from models.layout import named_leaves
from models.sharding import param_shardings
from models.transformer import Params, abstract_params


def load_stored(
    folder: Path, config: TransformerConfig, mesh: Mesh | None, execution: Execution = PLAIN
) -> Params:
    """Read converted weights a group at a time, each straight onto its devices, in the dtype and
    the layout of `execution`."""
    stored.check_files(folder)
    layers = layout.per_layer(_placed(config, mesh, execution))
    targets: dict[str, Any] = dict(named_leaves(layers))
    arrays: dict[str, jax.Array] = {}
    for group in tensors.group_names(config):
        stored.check_group(folder, config, group)
        prefix = "" if group == tensors.OUTER else f"{group}."
        wanted = {
            tensor.name: targets[prefix + tensor.name] for tensor in tensors.group(config, group)
        }
        found = stored.read_group(folder, group, wanted)
        arrays |= {prefix + name: array for name, array in found.items()}
    params = jax.tree.unflatten(jax.tree.structure(layers), [arrays[name] for name in targets])
    return layout.stacked(params, free=True) if execution.layers == "scanned" else params


def _placed(config: TransformerConfig, mesh: Mesh | None, execution: Execution) -> Params:
    """Return the parameters as shapes, dtypes and shardings."""
    params = abstract_params(config, execution)
    if mesh is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = jax.tree.map(lambda _: device, params)
    else:
        shardings = param_shardings(config, mesh, execution)
    return jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        params,
        shardings,
    )


def check_room(
    config: TransformerConfig, mesh: Mesh | None = None, execution: Execution = PLAIN
) -> None:
    """Refuse a model whose parameters alone do not fit the devices of this process."""
    needed = sum(
        leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
        for leaf in jax.tree.leaves(_placed(config, mesh, execution))
    )
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    for device in devices:
        free = free_bytes(device)
        if device.platform == "cpu" and free is not None:
            free //= len(devices)  # they share the host's memory
        if free is not None and needed > free:
            raise ModelError(
                f"the model's {execution.param_dtype} parameters need {needed / 1e9:.2f} GB on "
                f"each of {len(devices)} devices, and {device} has {free / 1e9:.2f} GB free; use "
                "more devices with mesh.fsdp, mesh.tensor or mesh.expert, or a smaller model"
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
