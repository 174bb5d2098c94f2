"""Trackers, potential and bonus with the recipe's rates, by hand."""

import math

import pytest

from spade_jax.rewards.learning_potential import (
    Tracker,
    gap,
    learning_potential,
    update,
    variance_bonus,
)

RATES = {"fast_rate": 0.98, "slow_rate": 0.85}


def test_the_rate_weighs_the_new_value() -> None:
    first = update(None, 0.2, **RATES)
    assert first == Tracker(0.2, 0.2)
    second = update(first, 0.6, **RATES)
    assert second.fast == pytest.approx(0.02 * 0.2 + 0.98 * 0.6)  # 0.592
    assert second.slow == pytest.approx(0.15 * 0.2 + 0.85 * 0.6)  # 0.54
    assert gap(second, **RATES) == pytest.approx(0.052 / 0.26)
    assert gap(first, **RATES) == 0.0


@pytest.mark.parametrize(
    ("mean_return", "tracker", "expected"),
    [(0.9, Tracker(0.592, 0.54), 0.36), (0.1, Tracker(0.0, 0.54), 0.44), (0.5, None, None)],
)
def test_potential_is_the_distance_from_the_slow_tracker(
    mean_return: float, tracker: Tracker | None, expected: float | None
) -> None:
    found = learning_potential(mean_return, tracker)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("variance", "expected"),
    [(0.25, 1.0), (0.15, math.exp(-0.5)), (0.35, math.exp(-0.5)), (0.0, math.exp(-3.125))],
)
def test_variance_bonus(variance: float, expected: float) -> None:
    assert variance_bonus(variance) == pytest.approx(expected)
