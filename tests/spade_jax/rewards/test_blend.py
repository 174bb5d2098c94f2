"""The published blend, by hand, and its refusal to score what was not measured."""

import pytest

from spade_jax.rewards.anchor import plateau
from spade_jax.rewards.blend import blend, regret_term

PAPER = {"anchor_weight": 0.6, "regret_weight": 0.4, "regret_scale": 0.15}


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
    anchor = plateau(win_rate, 0.4, 0.6, 0.25)
    assert blend(anchor, regret, **PAPER) == pytest.approx(expected, abs=1e-12)


def test_all_four_terms() -> None:
    # 0.5 * 0.2 + 0.5 * (0.03 / 0.15) + 0.25 * (-0.04 / 0.1) + 2 * (-0.5)
    weights = {"anchor_weight": 0.5, "regret_weight": 0.5, "micro_weight": 0.25}
    found = blend(0.2, 0.03, -0.04, -0.5, **weights, frontier_weight=2.0, regret_scale=0.15)
    assert found == pytest.approx(0.1 + 0.1 - 0.1 - 1.0)


@pytest.mark.parametrize(
    ("regret", "clip", "expected"),
    [(0.3, True, 1.0), (0.3, False, 2.0), (-0.3, True, 0.0), (-0.3, False, -2.0)],
)
def test_the_clip_of_the_regret(regret: float, clip: bool, expected: float) -> None:
    assert regret_term(regret, 0.15, clip=clip) == pytest.approx(expected)
    weights = {"anchor_weight": 0.0, "regret_weight": 1.0, "regret_scale": 0.15}
    assert blend(None, regret, **weights, clip=clip) == pytest.approx(expected)


@pytest.mark.parametrize(("anchor", "regret"), [(None, 0.1), (0.5, None), (None, None)])
def test_unmeasured_is_unscored(anchor: float | None, regret: float | None) -> None:
    assert blend(anchor, regret, **PAPER) is None


def test_a_term_without_weight_need_not_be_measured() -> None:
    assert blend(0.7, None, anchor_weight=1.0, regret_weight=0.0, regret_scale=0.15) == 0.7
    assert blend(0.7, 0.1, None, 0.0, **PAPER, micro_weight=0.1) is None
