"""Group advantages: the reference's golden numbers, zero variance, sums."""

import numpy as np
import pytest

from spade_jax.rewards.advantages import group_advantages


def test_one_win_in_eight() -> None:
    advantages = group_advantages(np.array([0, 0, 0, 1, 0, 0, 0, 0], np.float64), "mean_std")
    assert advantages[3] == pytest.approx(2.6458, abs=1e-4)
    assert np.delete(advantages, 3) == pytest.approx(-0.37796, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "norm", "expected"),
    [
        ([1.0, 0.0], "mean", [0.5, -0.5]),
        ([1.0, 0.0], "mean_std", [1.0, -1.0]),
        ([0.8, -0.5, 0.0], "mean", [0.7, -0.6, -0.1]),
        ([1.0, 1.0, -1.0, -1.0], "mean_std", [1.0, 1.0, -1.0, -1.0]),
        # each against the mean of the others: 0.8 - (-0.25), -0.5 - 0.4, 0 - 0.15
        ([0.8, -0.5, 0.0], "rloo", [1.05, -0.9, -0.15]),
        ([1.0, 0.0], "rloo", [1.0, -1.0]),
        ([0.4], "mean", [0.0]),
        ([0.4], "rloo", [0.0]),
        ([], "mean_std", []),
    ],
)
def test_table(rewards: list, norm: str, expected: list) -> None:
    assert group_advantages(np.array(rewards, np.float64), norm) == pytest.approx(
        expected, abs=1e-7
    )


@pytest.mark.parametrize("norm", ["mean", "mean_std", "rloo"])
@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -1 / 3])
def test_equal_rewards_give_exact_zeros(norm: str, value: float) -> None:
    assert np.array_equal(group_advantages(np.full(7, value), norm), np.zeros(7))


@pytest.mark.parametrize("norm", ["mean", "mean_std", "rloo"])
def test_rounding_is_no_contrast(norm: str) -> None:
    rewards = np.array([0.75 - 0.6, 0.6 - 0.45, 0.3 / 2])
    assert len(set(rewards.tolist())) > 1
    assert np.array_equal(group_advantages(rewards, norm), np.zeros(3))


def test_float32_rewards_are_centred_in_double() -> None:
    advantages = group_advantages(np.array([0.1, 0.2, 0.4], np.float32), "mean")
    assert advantages.dtype == np.float64
    assert abs(advantages.sum()) < 1e-15


def test_an_unmeasured_reward_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([1.0, np.nan]), "mean")
