"""Weights of eight bits for sampling: half the memory of bfloat16, and half the bytes to read at
each decode step.

Each matrix of a block becomes integers in -127..127 and scales, one for all weights along the first
axis of the matrix: the largest of them over 127. What the forward multiplies with is the integers
times the scale, rounded to the dtype of the activations, layer by layer. Embedding, head, biases,
norms and routers stay as they are: they are small, or decide much. Activations are not rounded, and
there is no gradient.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int8

Axes = tuple[str | None, ...]
LARGEST = 127
STACKED_AXES = {"layers", "expert"}  # logical axes along which matrices lie beside each other


class Quantized(NamedTuple):
    """A parameter in eight bits."""

    values: Int8[Array, "..."]
    scale: Float[Array, "..."]  # float32, of length 1 along the axis it serves


def is_quantized(axes: Axes) -> bool:
    """Whether a parameter is one of those to be rounded: the matrices of the blocks."""
    return "embed" in axes and not {"router", "vocab"} & set(axes)


def summed_axis(axes: Axes) -> int:
    """Return the axis of a parameter along which one scale serves: the first of its matrix."""
    return next(index for index, name in enumerate(axes) if name not in STACKED_AXES)


def quantize(weights: Float[Array, "..."], axis: int) -> Quantized:
    """Round weights to eight bits; an error of at most half a step, the largest weight over 254."""
    wide = weights.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=axis, keepdims=True) / LARGEST
    steps = jnp.round(wide / jnp.where(scale == 0, 1.0, scale))
    return Quantized(steps.astype(jnp.int8), scale)


def dequantize(weights: Quantized, dtype: DTypeLike) -> Float[Array, "..."]:
    """Return what the products take."""
    return (weights.values.astype(jnp.float32) * weights.scale).astype(dtype)


def map_matrices(function: Callable[[Any, Axes], Any], params: nnx.State) -> nnx.State:
    """Give value and axes of each matrix of the blocks to `function`, and take its results."""

    def change(param: nnx.Variable) -> nnx.Variable:
        axes = param.get_metadata("axes")
        return param.replace(function(param.get_value(), axes)) if is_quantized(axes) else param

    return jax.tree.map(change, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
