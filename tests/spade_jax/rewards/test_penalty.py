"""Every way to fail has its kind and its price; ours cost nobody anything."""

import pytest

from spade_jax.rewards import penalty
from spade_jax.types import Gate, Outcome

AMOUNTS: dict[penalty.Kind, float] = {
    "invalid": -0.1,
    "unsound": -0.2,
    "duplicate": -0.3,
    "hint": -0.4,
    "hang": -0.5,
    "fault": -0.6,
}


def test_every_gate_of_the_designers_has_a_kind() -> None:
    assert set(penalty.KINDS) == set(Gate) - {Gate.INFRASTRUCTURE}


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        ("fence", -0.1),
        ("load", -0.1),
        ("determinism", -0.1),
        ("solution", -0.2),
        ("random", -0.2),
        ("duplicate", -0.3),
        ("hint_leak", -0.4),
        ("infrastructure", None),
    ],
)
def test_refusals(gate: str, expected: float | None) -> None:
    assert penalty.of_refusal(gate, AMOUNTS) == expected


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], None),
        (["timeout"], -0.5),
        ([Outcome.TIMEOUT, Outcome.TIMEOUT], -0.5),
        (["env_error"], -0.6),
        (["timeout", "schema"], -0.6),  # the lower one
    ],
)
def test_faults_in_play(outcomes: list[str], expected: float | None) -> None:
    assert penalty.of_faults(outcomes, AMOUNTS) == expected


@pytest.mark.parametrize(
    ("earned", "expected"),
    [(1.0, 0.7), (0.0, -0.3), (-0.5, -0.8), (-0.9, -1.0), (-1.5, -1.5)],
)
def test_a_duplicate_that_was_played(earned: float, expected: float) -> None:
    assert penalty.of_duplicate(earned, AMOUNTS) == pytest.approx(expected)
