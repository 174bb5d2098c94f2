"""The reference's factor on the designer's advantages, under the recipes' numbers."""

import pytest

from spade_jax.rewards.scale import reference_scale


@pytest.mark.parametrize(
    ("num_agent", "num_designer", "interval", "scale"),
    [
        (192, 24, 4, 32.0),  # games: 8 * 4
        (192, 24, 8, 50.0),  # tool use at 8B and 30B: 64, capped
        (256, 16, 32, 50.0),  # tool use at 4B: 512, capped
        (96, 24, 4, 16.0),  # half of the plays failed: half of the scale
        (0, 24, 4, 1.0),
        (192, 0, 4, 1.0),
    ],
)
def test_table(num_agent: int, num_designer: int, interval: int, scale: float) -> None:
    assert reference_scale(num_agent, num_designer, interval) == scale
