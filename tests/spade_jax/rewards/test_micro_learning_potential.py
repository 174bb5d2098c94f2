"""The gain over steps, by a line and by halves, by hand."""

import numpy as np
import pytest

from spade_jax.rewards.micro_learning_potential import micro_learning_potential


@pytest.mark.parametrize(
    ("returns", "slope", "halves"),
    [
        ({0: [0.0, 0.0], 1: [1.0, 0.0]}, 0.5, 0.5),
        ({4: [1.0], 5: [0.0]}, -1.0, -1.0),  # signed: the agent got worse
        ({0: [0.0], 1: [0.5], 2: [1.0]}, 1.0, 0.75),  # the middle step is late: 0.75 - 0
        ({0: [0.25], 1: [0.25], 2: [0.25], 3: [0.25]}, 0.0, 0.0),
        # steps are ranked: a missing one leaves no gap; order of the keys is no matter
        ({9: [1.0], 2: [0.0]}, 1.0, 1.0),
        ({0: [0.0], 1: [], 2: [1.0]}, 1.0, 1.0),
        # weighted by plays, 1, 1 and 2 of means 0, 1 and 1: centre (0 + 1 + 4) / 4 = 1.25, mean
        # 0.75; b = (1.25 * 0.75 - 0.25 * 0.25 + 2 * 0.75 * 0.25) / (1.25^2 + 0.25^2 + 2 * 0.75^2)
        #   = (0.9375 - 0.0625 + 0.375) / 2.75 = 1.25 / 2.75, times 2 steps
        ({0: [0.0], 1: [1.0], 2: [1.0, 1.0]}, 2.5 / 2.75, 1.0),
        # halves count plays, not steps: late (0 + 1 + 1 + 1) / 4
        ({0: [0.0], 1: [0.0], 2: [1.0, 1.0, 1.0]}, None, 0.75),
    ],
)
def test_table(returns: dict, slope: float | None, halves: float) -> None:
    if slope is not None:
        assert micro_learning_potential(returns, "slope") == pytest.approx(slope, abs=1e-12)
    assert micro_learning_potential(returns, "halves") == pytest.approx(halves, abs=1e-12)


def test_slope_is_numpys_weighted_fit() -> None:
    """`polyfit` multiplies residuals by its weights: the square roots of the counts."""
    returns = {0: [0.1] * 3, 1: [0.5, 0.3], 2: [0.2], 3: [0.9, 0.8, 1.0, 0.4]}
    means = [np.mean(values) for values in returns.values()]
    weights = np.sqrt([len(values) for values in returns.values()])
    fitted = np.polyfit(range(4), means, 1, w=weights)[0]
    assert micro_learning_potential(returns, "slope") == pytest.approx(3 * fitted, abs=1e-12)


@pytest.mark.parametrize("returns", [{}, {3: [1.0, 0.0]}, {3: [1.0], 4: []}])
def test_one_step_has_no_gain(returns: dict) -> None:
    assert micro_learning_potential(returns, "slope") is None
    assert micro_learning_potential(returns, "halves") is None
