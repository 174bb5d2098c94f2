"""CISPO: the clipped ratio is a weight without a gradient, so that no token's gradient is lost to
the clip.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Terms, Tokens, log_ratio, terms


def cispo(
    tokens: Tokens,
    importance: Float[Array, "rows seq"],
    *,
    clip_low: float,
    clip_high: float,
) -> Terms:
    """Weigh the policy gradient.

    weight = stop_gradient(importance * clip(exp(current - old), 1 - clip_low, 1 + clip_high))
    loss   = -weight * A * current

    What is counted as clipped are weights at a limit; these tokens have a gradient all the same.
    """
    ratio = jnp.exp(log_ratio(tokens.current, tokens.old, tokens))
    bounded = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    weight = jax.lax.stop_gradient(importance * bounded)
    current = jnp.where(tokens.mask, tokens.current, 0.0)
    return terms(-weight * tokens.advantages * current, bounded != ratio, tokens)
