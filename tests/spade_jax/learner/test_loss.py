"""GRPO terms by hand, gradient signs, mask invariance; log-probabilities against log_softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spade_jax.learner import loss

LIMITS = {"clip_low": 0.2, "clip_high": 0.28, "tis_cap": 2.0}


def terms(
    ratio: float, advantage: float, importance: float = 1.0, mask: bool = True
) -> loss.GrpoTerms:
    """One token with the given current/old and old/sampler ratios."""
    old = -1.5
    array = lambda value: jnp.array([value], jnp.float32)  # noqa: E731
    return loss.grpo(
        array(old + np.log(ratio)),
        array(old),
        array(old - np.log(importance)),
        array(advantage),
        jnp.array([mask]),
        **LIMITS,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "importance", "expected", "clipped", "capped"),
    [
        (1.0, 2.0, 1.0, -2.0, False, False),
        (
            1.2,
            2.0,
            1.0,
            -2.4,
            False,
            False,
        ),  # inside clip-higher, outside a symmetric 0.2 just about
        (1.27, 1.0, 1.0, -1.27, False, False),
        (1.5, 1.0, 1.0, -1.28, True, False),  # too likely already, and good: clipped above at 1.28
        (1.5, -1.0, 1.0, 1.5, False, False),  # too likely and bad: never clipped
        (0.5, -1.0, 1.0, 0.8, True, False),  # unlikely already, and bad: clipped below at 0.8
        (0.5, 1.0, 1.0, -0.5, False, False),  # unlikely and good: never clipped
        (1.0, 1.0, 1.9, -1.9, False, False),
        (1.0, 1.0, 5.0, -2.0, False, True),  # importance weight cut to 2
        (1.0, -3.0, 0.25, 0.75, False, False),  # small weights are not raised
        (1.5, 1.0, 5.0, -2.56, True, True),
        (1.0, 0.0, 5.0, 0.0, False, True),
    ],
)
def test_grpo_by_hand(ratio, advantage, importance, expected, clipped, capped) -> None:
    found = terms(ratio, advantage, importance)
    assert float(found.loss[0]) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert (bool(found.clipped[0]), bool(found.tis_capped[0])) == (clipped, capped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "importance", "slope"),
    [
        (1.0, 2.0, 1.0, -2.0),  # descent raises the log-probability of a good token
        (1.0, -2.0, 1.0, 2.0),  # and lowers that of a bad one
        (1.0, 1.0, 5.0, -2.0),  # scaled by the capped weight, which has no gradient of its own
        (1.5, 1.0, 1.0, 0.0),  # clipped tokens have none
        (0.5, -1.0, 1.0, 0.0),
        (1.5, -1.0, 1.0, 1.5),
    ],
)
def test_gradient_in_current(ratio, advantage, importance, slope) -> None:
    def total(current):
        old = jnp.array([-1.5], jnp.float32)
        sampler = old - jnp.float32(np.log(importance))
        return loss.grpo(
            current, old, sampler, jnp.array([advantage]), jnp.array([True]), **LIMITS
        ).loss.sum()

    current = jnp.array([-1.5 + np.log(ratio)], jnp.float32)
    assert float(jax.grad(total)(current)[0]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_old_is_detached_when_it_is_the_same_forward() -> None:
    def total(current):
        mask = jnp.ones(current.shape, jnp.bool_)
        return loss.grpo(
            current, current, current, jnp.full(current.shape, 3.0), mask, **LIMITS
        ).loss.sum()

    assert jax.grad(total)(jnp.array([-0.7, -2.0])).tolist() == pytest.approx([-3.0, -3.0])


def test_masked_tokens_have_no_loss_no_gradient_and_no_count() -> None:
    def total(current, sampler):
        old = jnp.array([-1.0, 500.0], jnp.float32)  # exp(500) overflows
        found = loss.grpo(
            current, old, sampler, jnp.array([1.0, 1e9]), jnp.array([True, False]), **LIMITS
        )
        return found.loss.sum(), found

    current = jnp.array([-1.0, -500.0], jnp.float32)
    (value, found), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
        current, jnp.zeros(2) - 1.0
    )
    assert float(value) == pytest.approx(-1.0)
    assert grads[0].tolist() == [-1.0, 0.0] and grads[1].tolist() == [0.0, 0.0]
    assert not found.clipped[1] and not found.tis_capped[1]


def test_nll() -> None:
    values = loss.nll(jnp.array([-0.5, -2.0, -9.0]), jnp.array([True, True, False]))
    assert values.tolist() == [0.5, 2.0, 0.0]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_token_logprobs_and_entropy_against_log_softmax(temperature: float) -> None:
    logits = jax.random.normal(jax.random.key(0), (2, 5, 11)) * 3
    targets = jax.random.randint(jax.random.key(1), (2, 5), 0, 11)
    heat = jnp.full((2, 5), temperature)
    table = jax.nn.log_softmax(
        logits / (temperature or 1.0), axis=-1
    )  # greedy counts as temperature 1
    expected = jnp.take_along_axis(table, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss.token_logprobs(logits, targets, heat), expected, atol=2e-6)
    np.testing.assert_allclose(
        loss.entropy(logits, heat), -(jnp.exp(table) * table).sum(-1), atol=2e-6
    )


def test_uniform_logits_have_the_entropy_of_the_vocabulary() -> None:
    assert float(loss.entropy(jnp.zeros((1, 8)), jnp.ones(1))[0]) == pytest.approx(np.log(8))
