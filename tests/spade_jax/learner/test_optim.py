"""AdamW against a hand-written one, the clip, decay on matrices only, and both schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from spade_jax.config import LearnerConfig
from spade_jax.learner.optim import learning_rate, make_optimizer


def adamw_by_hand(value: float, grads: list[float], config: LearnerConfig, decay: float) -> float:
    mean = square = 0.0
    for count, grad in enumerate(grads, start=1):
        mean = config.beta1 * mean + (1 - config.beta1) * grad
        square = config.beta2 * square + (1 - config.beta2) * grad**2
        direction = (
            mean / (1 - config.beta1**count) / (np.sqrt(square / (1 - config.beta2**count)) + 1e-8)
        )
        value -= config.lr * (direction + decay * value)
    return value


def updated(params: Any, grads: list[Any], config: LearnerConfig) -> Any:
    optimizer = make_optimizer(config)
    state = optimizer.init(params)
    for grad in grads:
        updates, state = optimizer.update(grad, state, params)
        params = optax.apply_updates(params, updates)  # type: ignore[assignment]
    return params


def test_steps_of_a_matrix_and_of_a_norm_by_hand() -> None:
    config = LearnerConfig(lr=0.1, max_grad_norm=1e6)
    params = {"matrix": jnp.array([[2.0]]), "norm": jnp.array([2.0])}
    slopes = [0.3, -0.1, 0.7]
    grads = [{"matrix": jnp.array([[slope]]), "norm": jnp.array([slope])} for slope in slopes]
    found = updated(params, grads, config)
    assert float(found["matrix"][0, 0]) == pytest.approx(
        adamw_by_hand(2.0, slopes, config, 0.1), rel=1e-5
    )
    assert float(found["norm"][0]) == pytest.approx(
        adamw_by_hand(2.0, slopes, config, 0.0), rel=1e-5
    )
    assert float(found["matrix"][0, 0]) != pytest.approx(float(found["norm"][0]), rel=1e-3)


def test_stacked_norms_and_biases_do_not_decay() -> None:
    """The scales of a stack have two axes, as a matrix has, and so has a bias of heads."""
    axes = {
        "matrix": ("layers", "embed", "mlp"),
        "table": ("vocab", "embed"),
        "norm": ("layers", "norm"),
        "bias": ("layers", "heads", "head_dim"),
    }
    params = nnx.State(
        {name: nnx.Param(jnp.ones((2,) * len(named)), axes=named) for name, named in axes.items()}
    )
    still = jax.tree.map(jnp.zeros_like, params)
    moved = updated(params, [still], LearnerConfig(lr=0.1))
    decayed = {name for name in axes if float(moved[name][...].max()) < 1}
    assert decayed == {"matrix", "table"}


def test_the_clip_is_of_the_global_norm() -> None:
    config = LearnerConfig(lr=0.1, weight_decay=0.0, max_grad_norm=1.0)
    params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
    grads = [
        {"a": jnp.array([3.0]), "b": jnp.array([4.0])},
        {"a": jnp.array([0.3]), "b": jnp.array([0.4])},
    ]
    found = updated(
        params, grads, config
    )  # norms 5 and 0.5: only the first is scaled, to (0.6, 0.8)
    assert float(found["a"][0]) == pytest.approx(
        adamw_by_hand(0.0, [0.6, 0.3], config, 0.0), rel=1e-5
    )
    assert float(found["b"][0]) == pytest.approx(
        adamw_by_hand(0.0, [0.8, 0.4], config, 0.0), rel=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "warmup", "total", "rates"),
    [
        ("constant", 0, 0, {0: 2.0, 1: 2.0, 1000: 2.0}),
        ("constant", 4, 0, {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 1000: 2.0}),
        ("cosine", 0, 8, {0: 2.0, 2: 1.0 + 0.5**0.5, 4: 1.0, 8: 0.0, 9: 0.0}),
        ("cosine", 2, 6, {0: 1.0, 1: 2.0, 2: 2.0, 4: 1.0, 6: 0.0}),
        ("linear", 0, 8, {0: 2.0, 2: 1.5, 4: 1.0, 8: 0.0, 9: 0.0}),
        ("linear", 2, 6, {0: 1.0, 1: 2.0, 2: 2.0, 3: 1.5, 6: 0.0}),
    ],
)
def test_schedules(kind: Any, warmup: int, total: int, rates: dict[int, float]) -> None:
    config = LearnerConfig(lr=2.0, schedule=kind, warmup_steps=warmup, decay_steps=total)
    schedule = learning_rate(config)
    assert {count: float(schedule(count)) for count in rates} == pytest.approx(rates, abs=1e-6)
