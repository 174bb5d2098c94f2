"""Negative log-likelihood: the warm start's loss."""

from spade_jax.learner.losses.tokens import Pair, Tokens, pair


def nll(tokens: Tokens) -> Pair:
    """loss = -current"""
    return pair(-tokens.current, tokens)
