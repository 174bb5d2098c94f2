"""GSPO: one ratio for a whole sequence, the geometric mean of its tokens' ratios, clipped as one.

Its clips are narrower than those of GRPO, some 3e-4 and 4e-4, and its mean is `sequence`. A
sequence is a segment: in a packed row, neighbours do not enter each other's ratio.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Terms, Tokens, log_ratio, segment_sum, terms


def gspo(
    tokens: Tokens,
    importance: Float[Array, "rows seq"],
    *,
    clip_low: float,
    clip_high: float,
) -> Terms:
    """Every token of a sequence carries the loss of its sequence.

    ratio = exp(mean over the sequence's tokens of (current - old))
    loss  = importance * max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
    """
    change = log_ratio(tokens.current, jax.lax.stop_gradient(tokens.old), tokens)
    length = segment_sum(jnp.ones_like(change), tokens)
    ratio = jnp.exp(segment_sum(change, tokens) / jnp.maximum(length, 1.0))
    plain = -tokens.advantages * ratio
    bounded = -tokens.advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jax.lax.stop_gradient(importance) * jnp.maximum(plain, bounded)
    return terms(loss, bounded > plain, tokens)
