"""LoRA: low-rank adapters that are trained instead of the weights (attention and experts).

    used = W + lora_alpha / lora_rank * A @ B

A starts random and B at zero, so that training starts from W. Adapters are merged where weights are
used: in the loss, once per update for the sampler, and on export; W itself never moves. The router,
norms, biases, embedding and head have no adapters.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers import Axes
from models.transformer import Params
from spade_jax.learner_config import LearnerConfig

RANK = "lora"  # logical axis of the rank


class Target(NamedTuple):
    """How the axes of a matrix of one layer divide: those it is stacked over, then its inputs."""

    stacked: int
    inputs: int


TARGETS: dict[str, dict[tuple, Target]] = {
    "attention": {
        ("attention", "query"): Target(0, 1),
        ("attention", "key"): Target(0, 1),
        ("attention", "value"): Target(0, 1),
        ("attention", "output"): Target(0, 2),
    },
    "experts": {("moe", "gate_up"): Target(1, 1), ("moe", "down"): Target(1, 1)},
}
EVERY = {end: target for part in TARGETS.values() for end, target in part.items()}


def targets(config: LearnerConfig) -> dict[tuple, Target]:
    """The matrices that have adapters, by the end of their path."""
    return EVERY if config.lora_on == "all" else TARGETS[config.lora_on]


def scale(config: LearnerConfig) -> float:
    """What A @ B is multiplied by."""
    return config.lora_alpha / config.lora_rank


def abstract_adapters(params: Params, config: LearnerConfig) -> Params:
    """The adapters of parameters given as shapes, in their layout, with logical axes.

    They are float32 whatever the weights are: an update of bfloat16 would be rounded away.
    """
    flat: dict[tuple, Any] = {}
    for path, leaf in nnx.to_flat_state(params):
        target = targets(config).get(path[-2:])
        if target is None:
            continue
        axes: Axes = leaf.get_metadata("axes")
        shape = leaf.get_value().shape
        stacked = target.stacked + ("layers" in axes)
        middle = stacked + target.inputs
        for name, part, named in (
            ("a", (*shape[:middle], config.lora_rank), (*axes[:middle], RANK)),
            (
                "b",
                (*shape[:stacked], config.lora_rank, *shape[middle:]),
                (*axes[:stacked], RANK, *axes[middle:]),
            ),
        ):
            flat[(*path, name)] = nnx.Param(jax.ShapeDtypeStruct(part, jnp.float32), axes=named)
    return nnx.from_flat_state(flat)


def draw_adapters(abstract: Params, key: jax.Array) -> Params:
    """Draw A so that A @ x has the size of x, and B as zeros."""

    def draw(index: int, path: tuple, leaf: nnx.Variable) -> nnx.Variable:
        like = leaf.get_value()
        if path[-1] == "b":
            return leaf.replace(jnp.zeros(like.shape, like.dtype))
        fan_in = math.prod(like.shape[-1 - EVERY[path[-3:-1]].inputs : -1])
        value = jax.random.normal(jax.random.fold_in(key, index), like.shape, jnp.float32)
        return leaf.replace((value * fan_in**-0.5).astype(like.dtype))

    flat = nnx.to_flat_state(abstract)
    return nnx.from_flat_state(
        {path: draw(index, path, leaf) for index, (path, leaf) in enumerate(flat)}
    )


def product(a: Any, b: Any, inputs: int) -> Any:
    """A @ B in the shape of its matrix; NumPy or JAX, stacked over any leading axes."""
    stacked = a.ndim - inputs - 1
    names = "abcdefghijkl"
    lead, left = names[:stacked], names[stacked : stacked + inputs]
    right = names[stacked + inputs :][: b.ndim - stacked - 1]
    einsum = np.einsum if isinstance(a, np.ndarray) else jnp.einsum
    return einsum(f"{lead}{left}z,{lead}z{right}->{lead}{left}{right}", a, b)


def merge(params: Params, adapters: Params, config: LearnerConfig) -> Params:
    """The weights with their adapters added."""
    found = {path: leaf.get_value() for path, leaf in nnx.to_flat_state(adapters)}
    flat = {}
    for path, leaf in nnx.to_flat_state(params):
        if (*path, "a") in found:
            added = product(found[*path, "a"], found[*path, "b"], EVERY[path[-2:]].inputs)
            value = leaf.get_value()
            leaf = leaf.replace(value + (scale(config) * added).astype(value.dtype))
        flat[path] = leaf
    return nnx.from_flat_state(flat)
