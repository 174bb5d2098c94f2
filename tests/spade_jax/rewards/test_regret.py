"""Paired regret: equal arms, void plays, hand-computed means and standard errors."""

import math

import pytest

from spade_jax.rewards.regret import paired_regret


def test_mean_and_standard_error_by_hand() -> None:
    hinted = {(7, 0): 1.0, (7, 1): 1.0, (9, 0): 0.0, (9, 1): 1.0}
    unhinted = {(7, 0): 0.0, (7, 1): 1.0, (9, 0): 0.0, (9, 1): -1.0}
    regret = paired_regret(hinted, unhinted)  # differences 1, 0, 0, 2
    assert regret is not None
    assert regret.mean == 0.75
    assert regret.standard_error is not None
    assert math.isclose(regret.standard_error, math.sqrt((0.0625 + 0.5625 * 2 + 1.5625) / 3 / 4))
    assert regret.num_pairs == 4


@pytest.mark.parametrize(
    ("hinted", "unhinted", "mean", "pairs"),
    [
        (
            {(0, 0): 1.0, (0, 1): None},
            {(0, 0): 0.5, (0, 1): 1.0},
            0.5,
            1,
        ),  # void hinted play takes its pair along
        ({(0, 0): 1.0, (0, 1): 1.0}, {(0, 0): None, (0, 1): 1.0}, 0.0, 1),  # void unhinted play too
        (
            {(0, 0): 1.0},
            {(0, 0): 0.0, (1, 0): -1.0},
            1.0,
            1,
        ),  # a play without partner does not count
        (
            {(0, 0): -1.0},
            {(0, 0): 1.0},
            -2.0,
            1,
        ),  # a harmful hint is negative: nothing is clipped here
    ],
)
def test_pairs(hinted: dict, unhinted: dict, mean: float, pairs: int) -> None:
    regret = paired_regret(hinted, unhinted)
    assert regret is not None
    assert (regret.mean, regret.num_pairs) == (mean, pairs)
    assert regret.standard_error is None  # one pair has no spread


@pytest.mark.parametrize(
    ("hinted", "unhinted"),
    [
        ({}, {}),
        ({(0, 0): None}, {(0, 0): 1.0}),
        ({(0, 0): 1.0}, {(0, 1): 1.0}),
        ({(0, 0): None, (0, 1): 1.0}, {(0, 0): 1.0, (0, 1): None}),
    ],
)
def test_no_pair_is_none_never_zero(hinted: dict, unhinted: dict) -> None:
    assert paired_regret(hinted, unhinted) is None


def test_order_of_the_plays_does_not_matter() -> None:
    keys = [(seed, play) for seed in range(3) for play in range(3)]
    hinted = {key: 0.1 * index for index, key in enumerate(keys)}
    unhinted = {key: 0.3 - 0.07 * index for index, key in enumerate(keys)}
    shuffled = {key: hinted[key] for key in reversed(keys)}
    assert paired_regret(hinted, unhinted) == paired_regret(shuffled, unhinted)
