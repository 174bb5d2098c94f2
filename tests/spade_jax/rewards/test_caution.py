"""Shrinkage and lower bound by hand, and what a useless hint earns over many tries."""

import math

import numpy as np
import pytest

from spade_jax.rewards.caution import cautious_error, credited
from spade_jax.rewards.regret import Regret, paired_regret

NUMBERS = {"prior": 0.08, "errors": 1.0}


def test_by_hand() -> None:
    # differences 1, 0, 0, 2: squares about the mean 2.75, so e^2 = (2.75 + 0.5) / 16
    hinted = {(7, 0): 1.0, (7, 1): 1.0, (9, 0): 0.0, (9, 1): 1.0}
    unhinted = {(7, 0): 0.0, (7, 1): 1.0, (9, 0): 0.0, (9, 1): -1.0}
    regret = paired_regret(hinted, unhinted)
    assert regret is not None
    assert cautious_error(regret) == pytest.approx(math.sqrt(3.25 / 16))  # 0.4507
    assert credited(regret, "none", **NUMBERS) == 0.75
    assert credited(regret, "lower_bound", **NUMBERS) == pytest.approx(0.75 - 0.45069, abs=1e-5)
    assert credited(regret, "lower_bound", prior=1, errors=2.0) == pytest.approx(-0.15139, abs=1e-5)
    # 0.75 * 0.0064 / (0.0064 + 0.203125)
    assert credited(regret, "shrunk", **NUMBERS) == pytest.approx(0.022909, abs=1e-6)


@pytest.mark.parametrize(
    ("regret", "error"),
    [
        (Regret(1.0, None, 1), math.sqrt(0.5)),
        (Regret(1.0, 0.0, 2), math.sqrt(0.5) / 2),  # two plays that agree are no certainty
        (Regret(1.0, 0.0, 16), math.sqrt(0.5) / 16),
    ],
)
def test_agreement_is_no_certainty(regret: Regret, error: float) -> None:
    assert cautious_error(regret) == pytest.approx(error)
    assert credited(regret, "lower_bound", **NUMBERS) == pytest.approx(1 - error)


def test_a_harmful_hint_stays_harmful_and_a_clear_one_is_paid_in_full() -> None:
    harmful = Regret(-0.4, 0.1, 16)
    assert all(credited(harmful, caution, **NUMBERS) < 0 for caution in ("shrunk", "lower_bound"))
    # always won with the hint, never without, 16 times: 0.0064 / (0.0064 + 0.5 / 256)
    assert credited(Regret(1.0, 0.0, 16), "shrunk", **NUMBERS) == pytest.approx(0.7662, abs=1e-4)


@pytest.mark.parametrize(
    ("caution", "least", "most"),
    [("none", 0.30, 0.37), ("shrunk", 0.05, 0.11), ("lower_bound", 0.05, 0.11)],
)
def test_what_a_useless_hint_earns_at_half(caution: str, least: float, most: float) -> None:
    rng = np.random.default_rng(0)
    paid = []
    for _ in range(2000):
        arms = (rng.random((2, 16)) < 0.5).astype(float)
        hinted, unhinted = ({(play, 0): float(arm[play]) for play in range(16)} for arm in arms)
        regret = paired_regret(hinted, unhinted)
        assert regret is not None
        paid.append(min(1.0, max(0.0, credited(regret, caution, **NUMBERS)) / 0.15))
    assert least < np.mean(paid) < most
