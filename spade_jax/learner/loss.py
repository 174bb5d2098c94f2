"""Per-token losses as pure functions: GRPO with clip-higher and token-level TIS, and plain NLL.

Three log-probabilities of one sampled token, all under the tempered distribution it came from:
  sampler  by the engine when it was sampled, under the weights of that time;
  old      by the learner, under the weights at the start of the step;
  current  by the learner, under the weights being differentiated.
With one optimiser step per batch, which is all this project does, `old` is the current forward
with its gradient stopped: the ratio current/old is 1 in value, clip-higher cannot bind, and all
off-policyness is carried by the truncated importance sampling (TIS) weight old/sampler.

Nothing is reduced here: weights and sums are the step's, so microbatches add exactly. No KL term
and no entropy bonus (both 0 in the paper's games recipe), and no dual clip.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class GrpoTerms(NamedTuple):
    """Per-token loss and which of its two limits were active; zero or false off the mask."""

    loss: Float[Array, "*batch"]
    clipped: Bool[
        Array, "*batch"
    ]  # the clipped branch was the larger loss, so the token has no gradient
    tis_capped: Bool[Array, "*batch"]  # the importance weight was cut to its cap


def temper(
    logits: Float[Array, "*batch vocab"], temperature: Float[Array, "*batch"]
) -> Float[Array, "*batch vocab"]:
    """Divide by the sampling temperature; 0 (greedy) counts as 1, as it does in the sampler."""
    return logits / jnp.where(temperature > 0, temperature, jnp.ones_like(temperature))[..., None]


def token_logprobs(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    temperature: Float[Array, "*batch"],
) -> Float[Array, "*batch"]:
    """Log-probability of each target: log_softmax(logits / temperature)[target]."""
    scaled = temper(logits, temperature)
    # A masked sum instead of a gather, whose gradient would be a scatter.
    hit = jax.nn.one_hot(targets, logits.shape[-1], dtype=jnp.bool_)
    return jnp.where(hit, scaled, 0.0).sum(-1) - jax.nn.logsumexp(scaled, axis=-1)


def entropy(
    logits: Float[Array, "*batch vocab"], temperature: Float[Array, "*batch"]
) -> Float[Array, "*batch"]:
    """Entropy in nats of softmax(logits / temperature): logsumexp(z) - sum(softmax(z) * z)."""
    scaled = temper(logits, temperature)
    return jax.nn.logsumexp(scaled, axis=-1) - (jax.nn.softmax(scaled, axis=-1) * scaled).sum(-1)


def grpo(
    current: Float[Array, "*batch"],
    old: Float[Array, "*batch"],
    sampler: Float[Array, "*batch"],
    advantages: Float[Array, "*batch"],
    mask: Bool[Array, "*batch"],
    *,
    clip_low: float,
    clip_high: float,
    tis_cap: float,
) -> GrpoTerms:
    """Clip-higher policy loss times the detached importance weight.

    With a positive advantage, descent raises `current`.

    ratio = exp(current - old)
    ppo   = max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high))
    tis   = stop_gradient(min(exp(old - sampler), tis_cap))
    loss  = tis * ppo on the mask, 0 elsewhere
    """
    old = jax.lax.stop_gradient(old)
    # Zeroed off the mask before the exponential: an overflow would make 0 * inf in the gradient.
    ratio = jnp.exp(jnp.where(mask, current - old, 0.0))
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    importance = jnp.exp(jnp.where(mask, old - sampler, 0.0))
    tis = jax.lax.stop_gradient(jnp.minimum(importance, tis_cap))
    loss = jnp.where(mask, tis * jnp.maximum(unclipped, clipped), 0.0)
    return GrpoTerms(loss, mask & (clipped > unclipped), mask & (importance > tis_cap))


def nll(current: Float[Array, "*batch"], mask: Bool[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Negative log-likelihood on the mask, 0 elsewhere: the warm start's loss."""
    return jnp.where(mask, -current, 0.0)
