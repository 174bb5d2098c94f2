"""RLOO: the plain policy gradient (REINFORCE) on leave-one-out advantages, without ratio or clip.

The baseline of a trajectory is the mean reward of the others of its group: the settings hold
`reward.agent_norm` to "rloo".
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Terms, Tokens, terms


def rloo(tokens: Tokens, importance: Float[Array, "rows seq"]) -> Terms:
    """loss = -importance * A * current"""
    current = jnp.where(tokens.mask, tokens.current, 0.0)
    loss = -jax.lax.stop_gradient(importance) * tokens.advantages * current
    return terms(loss, jnp.zeros_like(tokens.mask), tokens)
