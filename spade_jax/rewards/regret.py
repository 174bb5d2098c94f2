"""Hint-based regret of one environment: what the designer's hint is worth to the agent.

Source: SPADE paper, section 3, equation 3. Three estimators of one quantity, the mean return with
the hint minus the mean return without; h and u are returns of the step that wrote the environment:

    reference:    mean(h) - mean(u), each arm by itself
    paired:       mean of h - u over pairs, the two plays of one instance and play index
    accumulated:  mean(h - b u) - (1 - b) mean(U),   b = slope of h on u over pairs, in [0, 1]
                  U: all unhinted returns until the designer's group came due

Pairs cancel what instances differ in. `accumulated` uses the later plays as a control variate: b is
near 1 where instances differ, which leaves the pairs, and near 0 where they do not, which leaves
the larger sample. The later plays were made by later weights, though: an environment on which the
agent learns fast has its regret understated. And they are of other instances: where these differ
much, its standard error, which takes plays as independent, is too small. So it is not the default.

The reference compares arms of unequal size on different instances and counts a failed hinted play
as 0. Here both arms play the same instances, and a void play is in neither arm: by `reference` it
is left out of its own, else its pair goes. The arms cannot share the sampler's random numbers,
since the hint moves every position that they are drawn by. What is paid for a noisy regret is in
`caution`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

PairKey = tuple[int, int]
"""(environment seed, play index)."""

Estimator = Literal["reference", "paired", "accumulated"]

Returns = Mapping[PairKey, float | None]
"""Returns of one arm; None for a void play."""

MIN_SLOPE_PAIRS = 3
"""A line through two pairs fits them whatever they are."""


@dataclass(frozen=True)
class Regret:
    """A measured regret; positive when the hint helps."""

    mean: float  # in [-2, 2], returns being in [-1, 1]
    standard_error: float | None  # of the mean, from the plays' spread; None with a single pair
    num_pairs: int  # at least 1; plays of the smaller arm with `reference`


def regret(
    estimator: Estimator, hinted: Returns, unhinted: Returns, epoch: Sequence[float]
) -> Regret | None:
    """The regret by the named estimator; `epoch` holds every unhinted return, `unhinted` too."""
    if estimator == "reference":
        return reference_regret(hinted.values(), unhinted.values())
    if estimator == "paired":
        return paired_regret(hinted, unhinted)
    return accumulated_regret(hinted, unhinted, epoch)


def reference_regret(
    hinted: Iterable[float | None], unhinted: Iterable[float | None]
) -> Regret | None:
    """Difference of the arms' means; None when an arm has no valid play.

    standard_error = sqrt(s_h^2 / n_h + s_u^2 / n_u), with sample variances
    """
    with_hint = [value for value in hinted if value is not None]
    without = [value for value in unhinted if value is not None]
    count = min(len(with_hint), len(without))
    if count == 0:
        return None
    mean = _mean(with_hint) - _mean(without)
    if count == 1:
        return Regret(mean, None, 1)
    error = math.sqrt(_variance(with_hint) / len(with_hint) + _variance(without) / len(without))
    return Regret(mean, error, count)


def paired_regret(hinted: Returns, unhinted: Returns) -> Regret | None:
    """Compare the two arms pair by pair; None when no pair is left.

    A play whose return is None (void), or that has no partner in the other arm, removes its pair.

        standard_error = sqrt(sum((d - mean)^2) / (n - 1) / n),  d = hinted - unhinted of a pair
    """
    differences = [with_hint - without for with_hint, without in _pairs(hinted, unhinted)]
    count = len(differences)
    if count == 0:
        return None
    mean = _mean(differences)
    error = None if count == 1 else math.sqrt(_variance(differences) / count)
    return Regret(mean, error, count)


def accumulated_regret(hinted: Returns, unhinted: Returns, epoch: Sequence[float]) -> Regret | None:
    """Compare the hinted plays with all unhinted ones of the epoch; None when no pair is left.

    standard_error = sqrt(s^2(h - b u) / n + (1 - b)^2 s^2(U) / N): the two parts are not
    correlated, b being a least-squares slope.
    """
    pairs = _pairs(hinted, unhinted)
    if not pairs:
        return None
    slope = _slope(pairs)
    rest = [with_hint - slope * without for with_hint, without in pairs]
    mean = _mean(rest) - (1 - slope) * _mean(epoch)
    if len(pairs) == 1:
        return Regret(mean, None, 1)
    variance = _variance(rest) / len(pairs) + (1 - slope) ** 2 * _variance(epoch) / len(epoch)
    return Regret(mean, math.sqrt(variance), len(pairs))


def _pairs(hinted: Returns, unhinted: Returns) -> list[tuple[float, float]]:
    """(hinted, unhinted) returns of the pairs of which both plays are valid, in key order."""
    both = ((hinted[key], unhinted[key]) for key in sorted(hinted.keys() & unhinted.keys()))
    return [
        (with_hint, without)
        for with_hint, without in both
        if with_hint is not None and without is not None
    ]


def _slope(pairs: Sequence[tuple[float, float]]) -> float:
    """Least-squares slope of hinted on unhinted, cut to [0, 1]; 0 where none can be told."""
    if len(pairs) < MIN_SLOPE_PAIRS:
        return 0.0
    level, base = _mean([h for h, _ in pairs]), _mean([u for _, u in pairs])
    spread = math.fsum((u - base) ** 2 for _, u in pairs)
    product = math.fsum((h - level) * (u - base) for h, u in pairs)
    return min(1.0, max(0.0, product / spread)) if spread else 0.0


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """Unbiased sample variance of at least two values."""
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
