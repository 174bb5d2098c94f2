"""The small parts every block is built from: parameters with logical axes, RMSNorm, rotary
positions.

A parameter is described once, where its module makes it: shape, logical axis names and standard
deviation. The axis names travel as metadata on the `nnx.Param` and `models.sharding` maps them to a
mesh. They are deliberately not flax's own sharding metadata, which places arrays eagerly and so
needs a mesh in context. Parameters are drawn in float32; `cast_params` rounds those that enter
products to the dtype of the activations; the small parts here compute in float32 whatever it is.
"""

import functools
import math
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from models.config import RopeScaling
from models.quantized import Quantized, dequantize

Axes = tuple[str | None, ...]
Tree = TypeVar("Tree")  # any pytree of nnx.Param

FLOAT32_AXES = {"norm", "router"}  # logical axes of parameters that are used in float32


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, std: float) -> nnx.Param:
    """Make a parameter drawn from a normal distribution cut at two standard deviations."""
    value = jax.random.truncated_normal(rngs.params(), -2.0, 2.0, shape, jnp.float32)
    return nnx.Param(value * std, axes=axes)


def zeros(shape: tuple[int, ...], axes: Axes) -> nnx.Param:
    """Make a parameter that starts at zero."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


def cast_params(params: Tree, dtype: DTypeLike) -> Tree:
    """Bring the parameters that products take to `dtype`; norms and routers stay as they are."""

    def cast(param: nnx.Variable) -> nnx.Variable:
        if FLOAT32_AXES & set(param.get_metadata("axes")):
            return param
        value = param.get_value()
        if isinstance(value, Quantized):
            return param.replace(dequantize(value, dtype))
        return param.replace(value.astype(dtype))

    return jax.tree.map(cast, params, is_leaf=lambda node: isinstance(node, nnx.Variable))


def fan_in(size: int) -> float:
    """Standard deviation that keeps the scale of a sum over `size` inputs."""
    return 1.0 / math.sqrt(size)


class RMSNorm(nnx.Module):
    """`rms_norm` with its weight."""

    def __init__(self, size: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32), axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return rms_norm(x, self.scale[...], self.eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*batch size"], scale: Float[Array, " size"], eps: float
) -> Float[Array, "*batch size"]:
    """Scale the last axis to unit root mean square, then by a learned weight, in float32."""
    # Batch axes stay apart: as one, heads that a mesh splits would have to be gathered.
    return (_unit(x, eps)[0] * _spread(scale, x)).astype(x.dtype)


def _unit(x: Array, eps: float) -> tuple[Array, Array]:
    """The input at unit root mean square, and what it was multiplied by."""
    wide = x.astype(jnp.float32)
    by = jax.lax.rsqrt(_row_sums(wide, wide) / x.shape[-1] + eps)[..., None]
    return wide * by, by


def _row_sums(left: Array, right: Array) -> Array:
    """Sum the products along the last axis.

    As a product with ones: a CPU does that fast, and in one order whatever the other axes are.
    """
    ones = jnp.ones(left.shape[-1], left.dtype)
    return jnp.einsum("...e,e->...", left * right, ones, precision=jax.lax.Precision.HIGHEST)


def _spread(scale: Array, x: Array) -> Array:
    return jnp.expand_dims(scale.astype(jnp.float32), tuple(range(x.ndim - 1)))


def _rms_norm_forward(x: Array, scale: Array, eps: float):
    return rms_norm(x, scale, eps), (x, scale)


def _rms_norm_backward(eps: float, residuals: tuple[Array, Array], grad: Array):
    """With u the unit input and g = grad scale: d x = by (g - u mean(g u)).

    And d scale = sum(grad u), over all but the last axis.
    """
    x, scale = residuals
    unit, by = _unit(x, eps)
    grad = grad.astype(jnp.float32)
    scaled = grad * _spread(scale, x)
    mean = _row_sums(scaled, unit)[..., None] / x.shape[-1]
    of_scale = jnp.sum(grad * unit, axis=tuple(range(x.ndim - 1)))
    return (by * (scaled - unit * mean)).astype(x.dtype), of_scale.astype(scale.dtype)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """Return the radians by which each pair turns from one position to the next, in float32.

    theta^(-2i / head_dim), computed on the host: an accelerator's power is a few ulps off, which
    thousands of positions multiply.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1) / (theta ** exponents.astype(np.float64)).astype(np.float32)
    if scaling is None:
        return frequencies
    factor = np.float32(scaling.factor)
    if scaling.kind == "linear":
        return frequencies / factor
    # Llama 3: by its turns within the original context a frequency is kept, divided or mixed.
    wavelengths = np.float32(2 * math.pi) * (1 / frequencies)
    turns = np.float32(scaling.original_max_positions) * (1 / wavelengths)
    low, high = np.float32(scaling.low_freq_factor), np.float32(scaling.high_freq_factor)
    share = (turns - low) / (high - low)
    mixed = (1 - share) * frequencies / factor + share * frequencies
    return np.where(turns > high, frequencies, np.where(turns < low, frequencies / factor, mixed))


def rotary_angles(
    positions: Int[Array, "rows seq"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "rows seq 1 half"], Float[Array, "rows seq 1 half"]]:
    """Return cosine and sine of position × frequency, the same for every head."""
    frequencies = jnp.asarray(rotary_frequencies(head_dim, theta, scaling))
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    cos, sin = jax.lax.platform_dependent(
        jnp.cos(angles), jnp.sin(angles), cpu=_computed_once, default=lambda *both: both
    )
    return cos, sin


def _computed_once(*arrays: Array) -> tuple[Array, ...]:
    """Return the same numbers as the result of a product, which a CPU's compiler does not fuse:
    every layer would compute cosine and sine again for every head.
    """
    one = jnp.eye(arrays[0].shape[-1], dtype=jnp.float32)
    return tuple(jnp.matmul(x, one, precision=jax.lax.Precision.HIGHEST) for x in arrays)


def rotate(
    x: Float[Array, "rows seq heads head_dim"],
    cos: Float[Array, "rows seq 1 half"],
    sin: Float[Array, "rows seq 1 half"],
) -> Float[Array, "rows seq heads head_dim"]:
    """Rotate pairs (i, i + head_dim / 2): the half-split order of Hugging Face Llama and Qwen."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
