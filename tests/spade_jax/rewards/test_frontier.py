"""The frontier term, by hand."""

import pytest

from spade_jax.rewards.frontier import frontier


@pytest.mark.parametrize(
    ("win_rate", "expected"),
    [(0.5, 0.0), (0.3, -0.5), (0.7, -0.5), (0.1, -2.0), (0.0, -3.125), (1.0, -3.125)],
)
def test_table(win_rate: float, expected: float) -> None:
    assert frontier(win_rate, 0.08) == pytest.approx(expected, abs=1e-12)
