"""The plateau's published golden values and the binary win rate."""

import pytest

from spade_jax.rewards.anchor import plateau


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        (0.0, 0),
        (0.15, 0),
        (0.2, 0.2),
        (0.3, 0.6),
        (0.4, 1),
        (0.5, 1),
        (0.6, 1),
        (0.7, 0.6),
        (0.85, 0),
        (1.0, 0),
    ],
)
def test_plateau_of_the_paper(rate: float, expected: float) -> None:
    assert plateau(rate, 0.4, 0.6, 0.25) == pytest.approx(expected, abs=1e-12)
    assert plateau(rate, 0.4, 0.6, 0.25) >= 0


def test_plateau_is_lopsided_with_a_lopsided_band() -> None:
    assert plateau(0.1, 0.2, 0.4, 0.2) == pytest.approx(0.5)
    assert plateau(0.5, 0.2, 0.4, 0.2) == pytest.approx(0.5)
    assert plateau(0.9, 0.2, 0.4, 0.2) == 0.0
