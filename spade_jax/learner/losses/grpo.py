"""GRPO: the clipped surrogate with clip-higher (DAPO) and dual clip. No KL, no entropy: these are
terms of their own.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Terms, Tokens, log_ratio, terms


def grpo(
    tokens: Tokens,
    importance: Float[Array, "rows seq"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Terms:
    """With a positive advantage, descent raises `current`.

    ratio = exp(current - old)
    loss  = importance * max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))

    and, with dual_clip = c and A < 0, at most importance * c * -A: a token that became much more
    likely since cannot outweigh all others.
    """
    ratio = jnp.exp(log_ratio(tokens.current, jax.lax.stop_gradient(tokens.old), tokens))
    plain = -tokens.advantages * ratio
    bounded = -tokens.advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss, clipped = jnp.maximum(plain, bounded), bounded > plain
    if dual_clip:
        most = -tokens.advantages * dual_clip
        over = (tokens.advantages < 0) & (loss > most)
        loss, clipped = jnp.where(over, most, loss), clipped | over
    return terms(jax.lax.stop_gradient(importance) * loss, clipped, tokens)
