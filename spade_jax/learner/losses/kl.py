"""Estimators of KL(policy || reference) from the sampled token alone, as terms of the loss.

With d = current - reference, cut to +-10:

    k1 = d                  unbiased as a number; as a loss its gradient is zero on average
    k2 = d^2 / 2            its gradient is that of the KL
    k3 = exp(-d) - 1 + d    never negative, unbiased, little variance
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Pair, Tokens, log_ratio, pair

Kind = Literal["k1", "k2", "k3"]
LIMIT = 10.0


def kl(kind: Kind, tokens: Tokens, reference: Float[Array, "rows seq"]) -> Pair:
    """Estimate the KL at each token, given its log-probability under the reference."""
    difference = jnp.clip(log_ratio(tokens.current, reference, tokens), -LIMIT, LIMIT)
    if kind == "k1":
        return pair(difference, tokens)
    if kind == "k2":
        return pair(0.5 * jnp.square(difference), tokens)
    return pair(jnp.expm1(-difference) + difference, tokens)
