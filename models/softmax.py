"""The softmax of attention over chunks of keys, joined so that only their order counts.

A chunk's weights are relative to a power of two near its largest, so that bringing two chunks to
one scale rounds nothing: a running sum over chunks (training) and chunks computed apart and joined
at the end (sampling) are the same numbers, bit for bit, if each chunk's are. Which keys a query
sees and where they lie is the callers' affair; kernels have a softmax of their own.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30  # finite, so that a chunk of masked scores makes no NaN
LOWEST = -1e6  # a query whose scores are all below sees nothing
WIDTH = 64  # keys of a chunk
FEW_QUERIES = 3  # for as many the compiler of a CPU writes the loops of a product
Part = tuple[Array, Array, Array]  # exponent, sum of weights, and of weighted values
_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the product of the first with an exponent below 2^12 is exact.
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.4286068203094173e-06


def product(
    spec: str, left: Float[Array, "*left"], right: Float[Array, "*right"]
) -> Float[Array, "*both"]:
    """Round to the dtype of `right`, multiply, and sum in float32.

    Rounded values are multiplied in float32 on a CPU, which sums products of 16-bit numbers
    otherwise for few rows than for many.
    """
    dtype = right.dtype

    def narrow(left: Array, right: Array) -> Array:
        return jnp.einsum(spec, left.astype(dtype), right, preferred_element_type=jnp.float32)

    def wide(left: Array, right: Array) -> Array:
        rounded = left.astype(dtype).astype(jnp.float32)
        return jnp.einsum(spec, rounded, right.astype(jnp.float32))

    if dtype == jnp.float32:
        return narrow(left, right)
    return jax.lax.platform_dependent(left, right, cpu=wide, default=narrow)


def chunk_weights(
    scores: Float[Array, "*tile keys"], seen: Bool[Array, "*_ keys"]
) -> tuple[Float[Array, "*tile"], Float[Array, "*tile keys"]]:
    """Return the exponent e of each query and its weights: exp(scores) / 2^e, 0 where not seen."""
    scores = jnp.where(seen, scores, MASKED)
    # Of a chunk of which nothing is seen the exponent is low and the weights are all 0.
    exponent = jnp.round(jnp.maximum(jnp.max(scores, axis=-1), LOWEST) * _LOG2_E)
    part = (scores - exponent[..., None] * _LN2_HIGH) - exponent[..., None] * _LN2_LOW
    return exponent, jnp.exp(part)


def power(exponent: Float[Array, "*tile"]) -> Float[Array, "*tile"]:
    """Return 2^e for whole e up to 0, exactly; 0 below 2^-126."""
    biased = jnp.maximum(exponent, -127.0).astype(jnp.int32) + 127
    return jax.lax.bitcast_convert_type(biased << 23, jnp.float32)


def total(weights: Float[Array, "*tile keys"]) -> Float[Array, "*tile"]:
    """Return the sum of a chunk's weights, in an order that does not depend on the compiler."""
    parts, rest = jnp.split(weights, [weights.shape[-1] // 8 * 8], axis=-1)
    parts = jnp.sum(parts.reshape(*parts.shape[:-1], -1, 8), axis=-2)
    for half in (4, 2, 1):
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0] + jnp.sum(rest, axis=-1)


def mix(
    weights: Float[Array, "*chunk queries keys"], values: Float[Array, "*chunk keys head_dim"]
) -> Float[Array, "*chunk queries head_dim"]:
    """Return the sums of a chunk's values: a product in their dtype that sums in float32."""
    # A CPU sums in the order of the keys for few queries, where the compiler writes the loops, and
    # for many if there are multiples of 64 columns; other shapes its library sums in other orders.
    head_dim = values.shape[-1]
    missing = 0 if weights.shape[-2] <= FEW_QUERIES else -head_dim % WIDTH
    padding = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    sums = product("...qc,...cd->...qd", weights, jnp.pad(values, padding))
    return sums[..., :head_dim]


def log_sum(exponent: Float[Array, "*tile"], total: Float[Array, "*tile"]) -> Float[Array, "*tile"]:
    """Return the logarithm of total * 2^e."""
    return jnp.log(total) + exponent * (_LN2_HIGH + _LN2_LOW)


def chunk(scores: Array, seen: Array, values: Array) -> Part:
    """Attend to the keys of one chunk."""
    exponent, weights = chunk_weights(scores, seen)
    return exponent, total(weights), mix(weights, values)


def join(left: Part, right: Part) -> Part:
    """Attend to the keys of two."""
    top = jnp.maximum(left[0], right[0])
    old, new = power(left[0] - top), power(right[0] - top)
    sums = left[2] * old[..., None] + right[2] * new[..., None]
    return top, left[1] * old + right[1] * new, sums
