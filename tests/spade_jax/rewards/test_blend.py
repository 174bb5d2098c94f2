"""The published blend, by hand, and its refusal to score what was not measured."""

import pytest

from spade_jax.rewards.blend import blend

PAPER = {
    "anchor_weight": 0.6,
    "regret_weight": 0.4,
    "band_low": 0.4,
    "band_high": 0.6,
    "band_ramp": 0.25,
    "regret_scale": 0.15,
}


@pytest.mark.parametrize(
    ("win_rate", "regret", "expected"),
    [
        (0.5, 0.15, 1.0),
        (0.5, 0.9, 1.0),  # regret saturates at its scale
        (0.5, 0.075, 0.8),
        (0.5, -0.5, 0.6),  # a harmful hint is worth nothing, not less
        (0.2, 0.0, 0.12),
        (0.3, 0.03, 0.44),
        (0.0, 0.0, 0.0),  # measured, and worth zero
        (1.0, 0.0, 0.0),
        (0.0, 0.15, 0.4),
    ],
)
def test_paper_weights(win_rate: float, regret: float, expected: float) -> None:
    assert blend(win_rate, regret, **PAPER) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("win_rate", "regret"), [(None, 0.1), (0.5, None), (None, None)])
def test_unmeasured_is_unscored(win_rate: float | None, regret: float | None) -> None:
    assert blend(win_rate, regret, **PAPER) is None
