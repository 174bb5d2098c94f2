"""What a design earns that was refused, or that broke in play: a bounded penalty by kind of fault.

    reward = the setting of the fault's kind, in [-1, 0]; the lowest of several
    reward = what it earned + the setting of "duplicate", for a near-duplicate that was played

Source: the reference pays -0.5 for a hang under `regret_based` alone, and redraws refused programs
unseen, which hides that they become more; here every attempt is a training sample. A fault of our
side earns nothing and costs nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from spade_jax.types import Gate, Outcome

Kind = Literal["invalid", "unsound", "duplicate", "hint", "hang", "fault"]

KINDS: dict[str, Kind] = {
    **dict.fromkeys(
        (
            Gate.FENCE,
            Gate.PARSE,
            Gate.IMPORTS,
            Gate.LOAD,
            Gate.CRITERIA,
            Gate.CONTRACT,
            Gate.SCHEMA,
            Gate.DETERMINISM,
        ),
        "invalid",  # no program that runs as the contract says
    ),
    **dict.fromkeys(
        (
            Gate.VARIETY,
            Gate.SOLUTION,
            Gate.OUTCOMES,
            Gate.FEEDBACK,
            Gate.LEAK,
            Gate.NO_OP,
            Gate.CONSTANT,
            Gate.RANDOM,
            Gate.JUDGE,
        ),
        "unsound",  # it runs, but cannot be won, or is won without thought
    ),
    Gate.DUPLICATE: "duplicate",
    **dict.fromkeys((Gate.HINT, Gate.HINT_LEAK, Gate.HINT_COPY), "hint"),
}
"""Kind of fault by the gate that refused; every gate but INFRASTRUCTURE."""


HANG = Outcome.TIMEOUT
"""The outcome of a play whose program missed a deadline."""


def of_refusal(gate: str, rewards: Mapping[Kind, float]) -> float | None:
    """Reward of a design that `gate` refused; None when that was our side's fault."""
    return None if gate == Gate.INFRASTRUCTURE else rewards[KINDS[gate]]


def of_faults(outcomes: Iterable[str], rewards: Mapping[Kind, float]) -> float | None:
    """Reward of an admitted design whose program ended plays with these outcomes; None if none
    did.
    """
    kinds: set[Kind] = {"hang" if outcome == HANG else "fault" for outcome in outcomes}
    return min((rewards[kind] for kind in kinds), default=None)


def of_duplicate(earned: float, rewards: Mapping[Kind, float]) -> float:
    """Reward of a near-duplicate that was played: less than it earned, and no less than -1 unless
    that was."""
    return min(earned, max(-1.0, earned + rewards["duplicate"]))
