"""Where parameters and data live: one table from logical axes of a parameter to mesh axes.

Axes are Auto: the compiler propagates the shardings given here, and gathers `fsdp` shards of a
weight for its use. Rows of a batch are split over `data`, `fsdp` and `expert` together; only
`tensor` splits the work on one row. Sending tokens to the shard of their expert, and moving weights
between meshes, are not here.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, Execution
from models.layers import Axes

MESH_AXES = ("data", "fsdp", "expert", "tensor")
ROW_AXES = ("data", "fsdp", "expert")  # mesh axes that split the rows of a batch

RULES: dict[str, str | None] = {  # logical axis of a parameter -> mesh axis
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "expert": "expert",
    "mlp": "tensor",
    "router": None,
    "norm": None,
    "layers": None,
}

FIELDS = {  # logical axis -> the config field that sets its size
    "vocab": "vocab_size",
    "embed": "embed",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "expert": "num_experts",
    "mlp": "mlp",
}


def build_mesh(
    data: int, fsdp: int, expert: int, tensor: int, devices: Sequence[Any] | None = None
) -> Mesh:
    """Arrange all devices, or those given, in a mesh; -1 on one axis takes what is left."""
    devices = jax.devices() if devices is None else list(devices)
    sizes: dict[str, int] = dict(zip(MESH_AXES, (data, fsdp, expert, tensor), strict=True))
    for axis, size in sizes.items():
        if size != -1 and size < 1:
            raise ModelError(
                f"mesh.{axis}={size} must be at least 1, or -1 for the remaining devices"
            )
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ModelError(
            f"mesh axes {free} are all -1; only one axis can take the remaining devices"
        )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    named = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != -1)
    if len(devices) % fixed:
        raise ModelError(
            f"{named} multiply to {fixed}, which does not divide the {len(devices)} devices; "
            f"use sizes whose product is one of {_divisors(len(devices))}"
        )
    if free:
        sizes[free[0]] = len(devices) // fixed
    elif fixed != len(devices):
        raise ModelError(
            f"{named} multiply to {fixed}, but there are {len(devices)} devices; set one axis to "
            f"-1, for example mesh.data={sizes['data'] * len(devices) // fixed}"
        )
    types = (AxisType.Auto,) * len(MESH_AXES)
    # Not `jax.make_mesh`, which splits a side of a slice over two axes on some TPUs alone.
    shape = tuple(sizes.values())
    chips = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Mesh(chips, MESH_AXES, axis_types=types)


def host_meshes(config: TransformerConfig, mesh: Mesh) -> list[Mesh]:
    """The mesh on which each process samples, by process: `mesh` itself where there is one.

    Of several, each has its own devices of `mesh`: heads and widths are split over them as far as
    they divide, and the experts over what is left.
    """
    devices: dict[int, list[Any]] = {}
    for device in mesh.devices.flat:
        devices.setdefault(device.process_index, []).append(device)
    if len(devices) == 1:
        return [mesh]
    return [host_mesh(config, devices[process]) for process in sorted(devices)]


def host_mesh(config: TransformerConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh on which one process of several samples: see `host_meshes`.

    Raises:
        ModelError: the model does not divide over so many devices.
    """
    for tensor in reversed(_divisors(len(devices))):
        mesh = build_mesh(1, 1, len(devices) // tensor, tensor, devices=devices)
        with contextlib.suppress(ModelError):
            axis_rules(config, mesh)
            return mesh
    raise ModelError(
        f"model.num_heads={config.num_heads} and model.num_experts={config.num_experts} do not "
        f"divide over the {len(devices)} devices of a process; give each process one of "
        f"{_divisors(config.num_heads)} devices"
    )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def split_rows(mesh: Mesh | None, function: Callable, inputs: Any, outputs: Any) -> Callable:
    """Run `function` on each device's own rows; with no mesh, or one device, return it unchanged.

    Loops over rows and over sorted tokens need this: partitioned by the compiler, they would gather
    every row first. Gradients of inputs that a spec replicates are summed over the devices.
    """
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def keep_rows(mesh: Mesh | None, x: jax.Array, *, split: bool = True) -> jax.Array:
    """Hold activations to the sharding of the rows, so that weights are gathered and not rows.

    Without `split`, rows are whole on every device: the few of a sampler.
    """
    if mesh is None:
        return x
    target = data_sharding(mesh) if split else replicated(mesh)
    return jax.lax.with_sharding_constraint(x, target)


def sum_over(mesh: Mesh | None, x: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Add the parts of `x` that the devices along `axes` hold, inside `split_rows`."""
    return x if mesh is None or mesh.size == 1 else jax.lax.psum(x, axes)


def axis_rules(config: TransformerConfig, mesh: Mesh) -> dict[str, str | None]:
    """Return RULES as they hold for a model on a mesh.

    Key-value heads that are fewer than the devices along `tensor`, and divide them, are computed on
    all of these devices.

    Raises:
        ModelError: an axis of the model does not divide over its mesh axis.
    """
    rules = dict(RULES)
    for axis, field in FIELDS.items():
        mesh_axis, size = RULES[axis], getattr(config, field)
        shards = 1 if mesh_axis is None else mesh.shape[mesh_axis]
        if size % shards == 0:
            continue
        if axis == "kv_heads" and shards % size == 0:
            rules[axis] = None
            continue
        fitting = _fitting(config, str(mesh_axis))
        raise ModelError(
            f"model.{field}={size} does not divide over mesh.{mesh_axis}={shards}; set "
            f"mesh.{mesh_axis} to one of {fitting}, or model.{field} to a multiple of {shards}"
        )
    return rules


def _fitting(config: TransformerConfig, mesh_axis: str) -> list[int]:
    """Sizes of a mesh axis over which all of the model divides."""
    sizes = [getattr(config, field) for axis, field in FIELDS.items() if RULES[axis] == mesh_axis]
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if mesh_axis != "tensor":
        return _divisors(math.gcd(*sizes))
    common = math.gcd(heads, config.mlp, config.vocab_size)
    return [size for size in _divisors(common) if kv_heads % size == 0 or size % kv_heads == 0]


def partition(axes: Axes, rules: Mapping[str, str | None] = RULES) -> PartitionSpec:
    """Map the logical axes of one parameter to mesh axes."""
    return PartitionSpec(*(None if axis is None else rules[axis] for axis in axes))


def param_shardings(
    config: TransformerConfig, mesh: Mesh, execution: Execution = PLAIN
) -> nnx.State:
    """Return the sharding of every parameter, in the layout of `Params`."""
    from models.transformer import abstract_params  # here: the transformer imports this module

    rules = axis_rules(config, mesh)

    def place(param: nnx.Variable) -> nnx.Variable:
        return param.replace(NamedSharding(mesh, partition(param.get_metadata("axes"), rules)))

    return jax.tree.map(
        place,
        abstract_params(config, execution),
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )


def data_sharding(mesh: Mesh) -> NamedSharding:
    """Split the leading axis of a batch over all devices but those that share a row."""
    return NamedSharding(mesh, PartitionSpec(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Keep a whole copy on every device."""
    return NamedSharding(mesh, PartitionSpec())
