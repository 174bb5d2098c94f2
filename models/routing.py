"""The router of a mixture of experts: which experts a token gets, how much of each, and what a
training step and its metrics need to know of that.

Always float32 at the highest precision, whatever the rest of the model computes in. Padding has no
part in any number here. Sending tokens to their experts is `models.dispatch`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer


class Routing(NamedTuple):
    """What one layer's router did; with a leading axis of layers when `forward` returns it.

    Everything but `chosen` is a sum over live tokens, so parts of a batch add exactly.
    """

    chosen: Int[Array, "*layers rows seq chosen"]  # int32, experts best first; 0 in padding
    load: Float[Array, "*layers experts"]  # tokens each expert was given
    tokens: Float[Array, "*layers"]  # live tokens
    dropped: Float[Array, "*layers"]  # of `load`, those no expert computed: counted, always 0
    balance: Float[Array, "*layers"]  # of each token, the balance loss of its row
    router_z: Float[Array, "*layers"]  # of each token, logsumexp(scores)^2


class Routes(NamedTuple):
    """Where the tokens of some rows go."""

    chosen: Int[Array, "rows seq chosen"]  # int32, experts best first; 0 in padding
    weights: Float[Array, "rows seq chosen"]  # float32, of each chosen expert's output
    load: Float[Array, " experts"]
    balance: Float[Array, ""]
    router_z: Float[Array, ""]


def route(
    x: Float[Array, "rows seq embed"],
    live: Bool[Array, "rows seq"],
    router: Float[Array, "embed experts"],
    experts_per_token: int,
    *,
    normalize: bool,
    replay: Integer[Array, "rows seq chosen"] | None = None,
) -> Routes:
    """Choose the experts of each token, or take those of `replay`, and weigh them.

    The weights are the router's probabilities, a softmax over all experts; `normalize` makes those
    of a token sum to one. A single expert's weight stays as it is, or it would have no gradient.
    """
    scores = jnp.einsum(
        "rse,en->rsn",
        x.astype(jnp.float32),
        router.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    if replay is None:
        _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores), experts_per_token)
    else:
        chosen = replay.astype(jnp.int32)
    chosen = jnp.where(live[:, :, None], chosen, jnp.zeros_like(chosen))
    # Picked by comparison: the gradient of a gather would be a scatter.
    experts = jnp.arange(router.shape[1], dtype=chosen.dtype)
    picked = chosen[:, :, :, None] == experts[None, None, None, :]
    picked_scores = jnp.sum(jnp.where(picked, scores[:, :, None, :], 0.0), axis=-1)
    log_total = jax.nn.logsumexp(scores, axis=-1)
    if normalize and experts_per_token > 1:
        weights = _softmax_of_few(picked_scores)  # their probabilities over their sum
    else:
        weights = jnp.exp(picked_scores - log_total[:, :, None])
    probs = jnp.exp(scores - log_total[:, :, None])
    counted = picked & live[:, :, None, None]
    row_load = jnp.sum(counted, axis=(1, 2), dtype=jnp.float32)
    return Routes(
        chosen,
        weights,
        load=jnp.sum(row_load, axis=0),
        balance=_balance(probs, live, row_load),
        router_z=jnp.sum(jnp.where(live, jnp.square(log_total), 0.0)),
    )


def _softmax_of_few(scores: Float[Array, "rows seq chosen"]) -> Float[Array, "rows seq chosen"]:
    """Softmax over the last axis, an entry of all tokens at a time.

    A loop along the short axis a CPU computes with another exponential than one along the tokens,
    depending on how many rows there are: decode and training would differ in the last bit.
    """
    entries = [scores[..., index] for index in range(scores.shape[-1])]
    peak = functools.reduce(jnp.maximum, entries)
    powers = [jnp.exp(entry - peak) for entry in entries]
    total = sum(powers[1:], start=powers[0])
    return jnp.stack([power / total for power in powers], axis=-1)


def _balance(
    probs: Float[Array, "rows seq experts"],
    live: Bool[Array, "rows seq"],
    row_load: Float[Array, "rows experts"],
) -> Float[Array, ""]:
    """Sum over rows of tokens * experts * sum_e(share of the row's load * mean probability).

    The balance loss of GShard and Switch, with a row of the batch as the group. It is 1 a token
    when a row's load is even. With the whole batch as the group, a microbatch could not compute
    its part of the gradient without the loads of all the others.
    """
    probs_sum = jnp.sum(jnp.where(live[:, :, None], probs, 0.0), axis=1)
    share = row_load / jnp.maximum(jnp.sum(row_load, axis=-1, keepdims=True), 1.0)
    return probs.shape[-1] * jnp.sum(share * probs_sum)
