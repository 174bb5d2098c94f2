"""The two layouts of the layers' parameters, and the moves between them.

    unrolled   blocks.0.moe.down [experts, mlp, embed], blocks.1.moe.down ...    a list of layers
    scanned    blocks.moe.down [layers, experts, mlp, embed]                     stacked layers

What is stored is always per layer, so that a checkpoint moves between platforms and no reader meets
one tensor of all layers. The functions take any tree that holds parameters, or arrays, shapes or
shardings in their structure, such as a train state with its moments; all else passes through.
They work leaf by leaf: beside the tree there is never more than one stacked leaf.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

LAYERS = "layers"  # logical axis of a stack
Tree = TypeVar("Tree")


def is_stacked(params: nnx.State) -> bool:
    """Whether the layers of a model's parameters are stacked."""
    return 0 not in params["blocks"]


def per_layer(tree: Tree) -> Tree:
    """Return the tree with every stack of layers as a list."""
    return _map_params(_unstack_blocks, tree)


def stacked(tree: Tree, *, free: bool = False) -> Tree:
    """Return the tree with every list of layers as a stack; `free` deletes the layers' arrays."""
    return _map_params(functools.partial(_stack_blocks, free), tree)


def stored(tree: Tree) -> Tree:
    """Return `per_layer` for writing: what has to be cut from a stack is put in host memory."""
    return _map_params(functools.partial(_unstack_blocks, on_host=True), tree)


def restored(tree: Tree, like: Tree) -> Tree:
    """Bring what was read per layer into the layout of `like`, consuming it."""
    same = jax.tree.structure(tree) == jax.tree.structure(like)
    return tree if same else stacked(tree, free=True)


def _map_params(function: Callable[[nnx.State], nnx.State], tree: Tree) -> Tree:
    def has_blocks(node: object) -> bool:
        return isinstance(node, nnx.State) and "blocks" in node

    return jax.tree.map(
        lambda node: function(node) if has_blocks(node) else node, tree, is_leaf=has_blocks
    )


def _unstack_blocks(params: nnx.State, *, on_host: bool = False) -> nnx.State:
    if not is_stacked(params):
        return params
    flat: dict[tuple, Any] = {}
    for path, leaf in nnx.to_flat_state(params):
        if path[0] != "blocks":
            flat[path] = leaf
            continue
        axes = leaf.get_metadata("axes")[1:]
        for index, value in enumerate(_unstack(leaf.get_value(), on_host)):
            flat["blocks", index, *path[1:]] = leaf.replace(value, axes=axes)
    return nnx.from_flat_state(flat)


def _stack_blocks(free: bool, params: nnx.State) -> nnx.State:
    if is_stacked(params):
        return params
    flat: dict[tuple, Any] = {}
    layers: dict[tuple, list[nnx.Variable]] = {}
    for path, leaf in nnx.to_flat_state(params):  # sorted, so layers come in order
        if path[0] == "blocks":
            layers.setdefault(("blocks", *path[2:]), []).append(leaf)
        else:
            flat[path] = leaf
    for path, leaves in layers.items():
        value = _stack([leaf.get_value() for leaf in leaves], free)
        flat[path] = leaves[0].replace(value, axes=(LAYERS, *leaves[0].get_metadata("axes")))
    return nnx.from_flat_state(flat)


def _unstack(leaf: Any, on_host: bool) -> Sequence[Any]:
    """Cut one leaf: an array, a shape or a sharding."""
    if isinstance(leaf, NamedSharding):
        raise TypeError("a sharding does not say how many layers it is of")
    if isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = layer_sharding(leaf.sharding)
        return [jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)] * leaf.shape[0]
    if isinstance(leaf, np.ndarray | Tracer):
        return [leaf[index] for index in range(leaf.shape[0])]
    sharding = layer_sharding(leaf.sharding)
    if on_host:
        sharding = sharding.with_memory_kind("pinned_host")
    return _cutter(leaf.shape[0], sharding)(_on_device(leaf))


def layer_sharding(sharding: Any) -> Any:
    """Return the sharding of one layer of a stack, whose layers are never split; in the memory that
    the stack is in.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    return _with_spec(sharding, sharding.spec[1:])


def _stack_sharding(sharding: Any) -> Any:
    """Return the sharding of a stack of layers that lie so, in the memory that they are in."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return _with_spec(sharding, (None, *sharding.spec))


def _with_spec(sharding: NamedSharding, spec: Sequence[Any]) -> NamedSharding:
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _on_device(array: jax.Array) -> jax.Array:
    """Fetch an array from the memory of the host, so that no program has to compute there."""
    sharding = array.sharding
    kind = next(iter(sharding.addressable_devices)).default_memory().kind
    if sharding.memory_kind == kind:
        return array
    return jax.device_put(array, sharding.with_memory_kind(kind))


@functools.lru_cache(maxsize=64)
def _cutter(num_layers: int, sharding: Any) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    return jax.jit(
        lambda stack: tuple(stack[index] for index in range(num_layers)),
        out_shardings=(sharding,) * num_layers,
    )


def _stack(layers: Sequence[Any], free: bool) -> Any:
    """Join the same leaf of all layers."""
    first = layers[0]
    if isinstance(first, NamedSharding):
        return _stack_sharding(first)
    if isinstance(first, jax.ShapeDtypeStruct):
        shape = (len(layers), *first.shape)
        return jax.ShapeDtypeStruct(shape, first.dtype, sharding=_stack_sharding(first.sharding))
    if isinstance(first, np.ndarray):
        return np.stack(layers)
    if isinstance(first, Tracer):
        return jnp.stack(layers)
    stack = _joiner(_stack_sharding(first.sharding))(*map(_on_device, layers))
    if free:
        stack.block_until_ready()
        for layer in layers:
            layer.delete()
    return stack


@functools.lru_cache(maxsize=64)
def _joiner(sharding: Any) -> Callable[..., jax.Array]:
    return jax.jit(lambda *layers: jnp.stack(layers), out_shardings=sharding)
