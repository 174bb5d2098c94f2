"""What every loss is given, and the sums it returns.

Entry t of each array speaks of one predicted token. Three log-probabilities of it, all under the
tempered distribution it came from:
  sampler  by the engine when it was sampled, under the weights of that time;
  old      by the learner, under the weights at the start of the rollout's updates;
  current  by the learner, under the weights being differentiated.
With one optimiser step per rollout, `old` is the current forward with its gradient stopped: the
ratio current/old is 1 in value, no clip can bind, and all off-policyness is carried by the
truncated importance weight old/sampler (`tis`).

How tokens are averaged is not the losses' affair: `weights` holds each token's share (`reduction`),
so a plain weighted sum, over any split into microbatches, is exactly the loss of the batch.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from spade_jax.types import Role


class Tokens(NamedTuple):
    """The tokens of one microbatch; off the mask, log-probabilities and advantages are noise."""

    current: Float[Array, "rows seq"]
    old: Float[Array, "rows seq"]
    sampler: Float[Array, "rows seq"]
    advantages: Float[Array, "rows seq"]
    mask: Bool[Array, "rows seq"]
    weights: Float[Array, "rows seq"]  # share of the loss; 0 off the mask
    segment_ids: Int[Array, "rows seq"]  # of the predicted token; 0 is padding
    roles: Int[Array, "rows seq"]


class Pair(NamedTuple):
    """A sum with what it is a sum over: pairs of parts add up to the pair of the whole."""

    total: Float[Array, ""]  # weighted by each token's share: what is differentiated
    sum: Float[Array, " roles"]
    count: Int[Array, " roles"]


class Terms(NamedTuple):
    """A policy loss, and how many of its tokens were clipped and so have no gradient."""

    loss: Pair
    clipped: Pair


NUM_ROLES = len(Role)


def per_role(values: Shaped[Array, "rows seq"], tokens: Tokens) -> Shaped[Array, " roles"]:
    """Sum over the masked tokens of each role."""
    return jnp.stack(
        [
            jnp.where(tokens.mask & (tokens.roles == role), values, jnp.zeros_like(values)).sum()
            for role in range(NUM_ROLES)
        ]
    )


def pair(values: Float[Array, "rows seq"], tokens: Tokens) -> Pair:
    """Add up one value of each masked token."""
    # Not 0 * value: what is off the mask may be infinite.
    values = jnp.where(tokens.mask, values, 0.0)
    ones = tokens.mask.astype(jnp.int32)
    return Pair((tokens.weights * values).sum(), per_role(values, tokens), per_role(ones, tokens))


def terms(
    loss: Float[Array, "rows seq"], clipped: Bool[Array, "rows seq"], tokens: Tokens
) -> Terms:
    """Add up a loss, and count what was clipped."""
    counted = pair(clipped.astype(jnp.float32), tokens)
    return Terms(pair(loss, tokens), jax.lax.stop_gradient(counted))


def log_ratio(
    upper: Float[Array, "rows seq"], lower: Float[Array, "rows seq"], tokens: Tokens
) -> Float[Array, "rows seq"]:
    """Subtract on the mask, 0 elsewhere: an overflow there would make 0 * inf in the gradient."""
    return jnp.where(tokens.mask, upper - lower, 0.0)


def segment_sum(values: Float[Array, "rows seq"], tokens: Tokens) -> Float[Array, "rows seq"]:
    """Give each token the sum over the masked tokens of its own segment."""
    values = jnp.where(tokens.mask, values, 0.0)
    size = values.shape[1] + 1  # a row has at most as many segments as tokens

    def row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, num_segments=size)[segments]

    return jax.vmap(row)(values, tokens.segment_ids)
