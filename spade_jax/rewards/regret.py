"""Hint-based regret of one environment: what the designer's hint is worth to the agent.

Source: SPADE paper, section 3.

    regret = mean over pairs of (hinted return - unhinted return)

A pair is the two plays that share an environment seed and a play index, one in each arm, so the
arms always have the same number of plays on the same instances. The public reference compares arms
of unequal size on different instances and counts a failed hinted play as 0; here a void play
removes its pair. Clipping and weighting are in `blend`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

PairKey = tuple[int, int]
"""(environment seed, play index)."""


@dataclass(frozen=True)
class Regret:
    """A measured regret; positive when the hint helps."""

    mean: float  # in [-2, 2], returns being in [-1, 1]
    standard_error: (
        float | None
    )  # of the mean, from the spread of the pairs; None with a single pair
    num_pairs: int  # at least 1


def paired_regret(
    hinted: Mapping[PairKey, float | None], unhinted: Mapping[PairKey, float | None]
) -> Regret | None:
    """Compare the two arms pair by pair; None when no pair is left.

    A play whose return is None (void), or that has no partner in the other arm, removes its pair.

        standard_error = sqrt(sum((d - mean)^2) / (n - 1) / n),  d = hinted - unhinted of a pair
    """
    pairs = ((hinted[key], unhinted[key]) for key in sorted(hinted.keys() & unhinted.keys()))
    differences = [
        with_hint - without
        for with_hint, without in pairs
        if with_hint is not None and without is not None
    ]
    count = len(differences)
    if count == 0:
        return None
    mean = math.fsum(differences) / count
    if count == 1:
        return Regret(mean, None, 1)
    spread = math.fsum((difference - mean) ** 2 for difference in differences)
    return Regret(mean, math.sqrt(spread / (count - 1) / count), count)
