"""Learning potential: how far an environment's mean return is from what its skill used to bring.

Source: the reference's `learning_potential`, the paper's control without hinted plays. It is
another quantity than regret.

    potential = |mean return of the environment - slow(skill)|   (+ the variance bonus, an option)
    tracker:    value <- (1 - rate) value + rate r,   r the mean return of the skill's plays
    gap       = |fast - slow| / (2 (fast_rate - slow_rate)),   logged only

The rate weighs the **new** value: with the recipe's 0.98 and 0.85 even the slow tracker is mostly
the newest cycle. The first update sets both to r. When the update comes is the caller's: with a
designer delay before the potential is read, without one after it.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Tracker:
    """Moving averages of one skill's mean return."""

    fast: float
    slow: float


def update(
    tracker: Tracker | None, mean_return: float, *, fast_rate: float, slow_rate: float
) -> Tracker:
    """The tracker after one more cycle; `mean_return` twice when there was none."""
    if tracker is None:
        return Tracker(mean_return, mean_return)
    return Tracker(
        (1 - fast_rate) * tracker.fast + fast_rate * mean_return,
        (1 - slow_rate) * tracker.slow + slow_rate * mean_return,
    )


def learning_potential(mean_return: float, tracker: Tracker | None) -> float | None:
    """|mean return - slow|, in [0, 2]; None before the skill has a tracker."""
    return None if tracker is None else abs(mean_return - tracker.slow)


def variance_bonus(variance: float) -> float:
    """exp(-(variance - 0.25)^2 / 0.02): 1 where half of the plays return 1 and half 0."""
    return math.exp(-((variance - 0.25) ** 2) / 0.02)


def gap(tracker: Tracker, *, fast_rate: float, slow_rate: float) -> float:
    """The distance of the trackers, over twice that of their rates."""
    return abs(tracker.fast - tracker.slow) / (2 * (fast_rate - slow_rate))
