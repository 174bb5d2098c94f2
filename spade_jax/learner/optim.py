"""The optimiser: global-norm clip, then AdamW, with warm-up and an optional cosine decay to zero.

Source: the paper's settings (Adam 0.9/0.98, weight decay 0.1, gradient norm 1.0, constant learning
rate); the decay is for the warm start, whose length is known beforehand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spade_jax.config import LearnerConfig


def learning_rate(
    config: LearnerConfig, total_steps: int | None = None
) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Learning rate of the update after `count` updates.

        rate = lr * min(1, (count + 1) / warmup_steps)      above 0 from the first update on

    and, with `total_steps`, times

        (1 + cos(pi * (count - warmup_steps) / (total_steps - warmup_steps))) / 2
    """
    warmup = max(config.warmup_steps, 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.asarray(count, jnp.float32)
        rate = config.lr * jnp.minimum(1.0, (done + 1.0) / warmup)
        if total_steps is None:
            return rate
        progress = (done - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
        return rate * 0.5 * (1.0 + jnp.cos(jnp.pi * jnp.clip(progress, 0.0, 1.0)))

    return schedule


def make_optimizer(
    config: LearnerConfig, total_steps: int | None = None
) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; only matrices decay, not norm scales and biases."""
    inner = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate(config, total_steps),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_decaying,
        ),
    )

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # Optax raises a float to the power of its integer count
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def _decaying(params: optax.Params) -> optax.Params:
    """Mark what is a matrix: told by the logical axes, since the scales of a stack of layers have
    two axes as well.
    """

    def is_matrix(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return node.replace("embed" in node.get_metadata("axes"))
        return node.ndim >= 2

    return jax.tree.map(is_matrix, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
