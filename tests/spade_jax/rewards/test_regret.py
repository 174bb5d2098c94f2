"""Paired regret: equal arms, void plays, hand-computed means and standard errors."""

import math

import pytest

from spade_jax.rewards.regret import (
    Regret,
    accumulated_regret,
    paired_regret,
    reference_regret,
    regret,
)


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


def test_reference_compares_the_arms_and_leaves_void_plays_out() -> None:
    regret = reference_regret([1.0, 1.0, 0.0, None], [0.0, 1.0])
    # means 2/3 and 1/2; variances 1/3 of 3 plays and 1/2 of 2
    assert regret is not None
    assert regret.mean == pytest.approx(1 / 6)
    assert regret.standard_error == pytest.approx(math.sqrt(1 / 9 + 1 / 4))
    assert regret.num_pairs == 2
    assert reference_regret([None, 1.0], [None]) is None
    assert reference_regret([1.0], [0.0, 0.0]) == Regret(1.0, None, 1)


def test_accumulated_is_the_larger_sample_where_instances_do_not_differ() -> None:
    hinted = {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 1.0}
    unhinted = {(0, 0): 0.0, (0, 1): 1.0, (1, 0): 0.0, (1, 1): 1.0}
    # slope: h about 3/4 is (1, 1, -3, 1) / 4, u about 1/2 is (-1, 1, -1, 1) / 2, product 1/2 over
    # spread 1; rest h - u / 2 = 1, 1/2, 0, 1/2; epoch mean 1/3
    epoch = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    regret = accumulated_regret(hinted, unhinted, epoch)
    assert regret is not None
    assert regret.mean == pytest.approx(0.5 - 0.5 / 3)
    # s^2(rest) = 0.5 / 3 of 4; s^2(epoch) = (2 - 4/6) / 5 = 4/15 of 6
    assert regret.standard_error == pytest.approx(math.sqrt(0.5 / 12 + 0.25 * (4 / 15) / 6))
    assert regret.num_pairs == 4


def test_accumulated_by_its_slope() -> None:
    keys = [(0, 0), (0, 1), (1, 0), (1, 1)]
    same = dict(zip(keys, [0.0, 1.0, 0.0, 1.0], strict=True))
    other = dict(zip(keys, [1.0, 0.0, 1.0, 0.0], strict=True))
    epoch = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    # slope 1: the pairs alone, whatever came later; slope -1 is cut to 0: the arms' means
    assert accumulated_regret(same, same, epoch) == Regret(0.0, 0.0, 4)
    found = accumulated_regret(other, same, epoch)
    assert found is not None and found.mean == pytest.approx(0.5 - 4 / 6)
    # two pairs have no slope, one has no spread
    two = {key: same[key] for key in keys[:2]}
    found = accumulated_regret(two, two, epoch)
    assert found is not None and found.mean == pytest.approx(0.5 - 4 / 6)
    assert accumulated_regret({(0, 0): 1.0}, {(0, 0): 0.0}, [0.0]) == Regret(1.0, None, 1)
    assert accumulated_regret({(0, 0): None}, {(0, 0): 0.0}, [0.0]) is None


def test_pairs_cancel_what_instances_differ_in() -> None:
    hinted = {(seed, play): float(seed < 2) for seed in range(4) for play in range(4)}
    epoch = list(hinted.values())
    errors = {
        estimator: regret(estimator, hinted, hinted, epoch)
        for estimator in ("reference", "paired", "accumulated")
    }
    assert errors["paired"] == errors["accumulated"] == Regret(0.0, 0.0, 16)
    # 16 plays of variance 4/15 in each arm
    assert errors["reference"].standard_error == pytest.approx(math.sqrt(2 * (4 / 15) / 16))
