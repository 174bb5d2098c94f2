"""The optimiser: global-norm clip, then AdamW, with warm-up and an optional decay to zero.

Source: the paper's settings (Adam 0.9/0.98, weight decay 0.1, gradient norm 1.0, constant learning
rate). Where the moments lie between updates is the step's.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from spade_jax.config import LearnerConfig


def learning_rate(config: LearnerConfig) -> Callable[[jax.typing.ArrayLike], jax.Array]:
    """Learning rate of the update after `count` updates.

        rate = lr * min(1, (count + 1) / warmup_steps)      above 0 from the first update on

    and, with progress = (count - warmup_steps) / (decay_steps - warmup_steps) cut to 0..1, times

        linear  1 - progress
        cosine  (1 + cos(pi * progress)) / 2
    """
    warmup = max(config.warmup_steps, 1)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        done = jnp.asarray(count, jnp.float32)
        rate = config.lr * jnp.minimum(1.0, (done + 1.0) / warmup)
        if config.schedule == "constant":
            return rate
        progress = (done - config.warmup_steps) / (config.decay_steps - config.warmup_steps)
        progress = jnp.clip(progress, 0.0, 1.0)
        if config.schedule == "linear":
            return rate * (1.0 - progress)
        return rate * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))

    return schedule


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip; only matrices decay, not norm scales and biases."""
    inner = optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_decaying,
        ),
    )

    def init(params: optax.Params) -> optax.OptState:
        return _moments_as(config.moments_dtype, inner.init(params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion(
            "standard"
        ):  # Optax raises a float to the power of its integer count
            state = _moments_as("float32", state)  # whatever they are stored in
            updates, state = inner.update(updates, state, params)
        return updates, _moments_as(config.moments_dtype, state)

    return optax.GradientTransformation(init, update)


def _moments_as(dtype: str, state: optax.OptState) -> optax.OptState:
    """Bring both moments to a dtype."""
    target = jnp.dtype(dtype)

    def convert(node: Any) -> Any:
        if not isinstance(node, optax.ScaleByAdamState):
            return node
        cast = lambda leaf: leaf.astype(target)  # noqa: E731
        return node._replace(mu=jax.tree.map(cast, node.mu), nu=jax.tree.map(cast, node.nu))

    return jax.tree.map(
        convert, state, is_leaf=lambda node: isinstance(node, optax.ScaleByAdamState)
    )


def _decaying(params: optax.Params) -> optax.Params:
    """Mark what is a matrix: told by the logical axes, since the scales of a stack of layers have
    two axes as well.
    """

    def is_matrix(node: Any) -> Any:
        if isinstance(node, nnx.Variable):
            return node.replace(bool({"embed", "lora"} & set(node.get_metadata("axes"))))
        return node.ndim >= 2

    return jax.tree.map(is_matrix, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
