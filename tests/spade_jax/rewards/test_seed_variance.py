"""How much of the wins' variance lies within instances, by hand."""

import pytest

from spade_jax.rewards.seed_variance import within_share


def plays(*seeds: tuple[int, int]) -> list[tuple[int, bool]]:
    """(wins, plays) by seed, as single plays."""
    return [
        (seed, play < wins) for seed, (wins, count) in enumerate(seeds) for play in range(count)
    ]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        # half of the instances always won, half never: a win rate of 0.5, and nothing to learn
        ([(4, 4), (0, 4)], 0.0),
        ([(2, 2), (0, 2), (2, 2), (0, 2)], 0.0),
        # v = 3 * 1 / (4 * 3) = 1/4 in both; total = 4 * 4 / (8 * 7) = 2/7
        ([(3, 4), (1, 4)], 0.875),
        # v = 1/4 and 0, of 4 and 2 plays: within = 1/6; total = 5 * 1 / (6 * 5) = 1/6
        ([(3, 4), (2, 2)], 1.0),
        # v = 1/4 and 0: within = 1/8; total = 3 * 5 / (8 * 7) = 15/56
        ([(3, 4), (0, 4)], 7 / 15),
        # the same rate on every instance: v = 1/3, total = 4 * 4 / 56 = 2/7, cut to 1
        ([(2, 4), (2, 4)], 1.0),
        ([(1, 2)], 1.0),  # one instance has nothing between
        ([(4, 4), (4, 4)], 1.0),  # no variance at all
        ([(0, 3), (0, 3)], 1.0),
        # the seed with one play is left out
        ([(3, 4), (1, 4), (1, 1)], 0.875),
    ],
)
def test_table(seeds: list, expected: float) -> None:
    assert within_share(plays(*seeds)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seeds", [[], [(1, 1)], [(1, 1), (0, 1), (1, 1)]])
def test_single_plays_measure_nothing(seeds: list) -> None:
    assert within_share(plays(*seeds)) is None
