"""The entropy bonus: descent on it raises the entropy of the policy at the trained tokens."""

from jaxtyping import Array, Float

from spade_jax.learner.losses.tokens import Pair, Tokens, pair


def bonus(tokens: Tokens, entropies: Float[Array, "rows seq"]) -> Pair:
    """loss = -entropy, of the tempered distribution, in nats"""
    return pair(-entropies, tokens)
