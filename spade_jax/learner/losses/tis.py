"""Truncated importance sampling: what makes tokens of other weights, or of a sampler that rounds
otherwise, count as if `old` had sampled them.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Pair, Tokens, log_ratio, pair, segment_sum

Kind = Literal["token", "sequence", "none"]


class Importance(NamedTuple):
    """Detached weights, and how many were cut to the cap."""

    weight: Float[Array, "rows seq"]
    capped: Pair


def tis(kind: Kind, tokens: Tokens, cap: float) -> Importance:
    """Weigh each token; a weight has no gradient.

    token     min(exp(old - sampler), cap)
    sequence  min(exp(sum over the sequence's tokens of (old - sampler)), cap), for all its tokens
    none      1
    """
    change = jax.lax.stop_gradient(log_ratio(tokens.old, tokens.sampler, tokens))
    if kind == "sequence":
        change = segment_sum(change, tokens)
    elif kind == "none":
        change = jnp.zeros_like(change)
    most = jnp.log(jnp.float32(cap))
    # Cut before the exponential: the sum over a long sequence would overflow.
    weight = jnp.exp(jnp.minimum(change, most))
    return Importance(weight, pair((change > most).astype(jnp.float32), tokens))
