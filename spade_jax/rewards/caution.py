"""What a noisy regret is worth: as measured, shrunk towards 0, or its lower confidence bound.

    none:         r
    shrunk:       r * prior^2 / (prior^2 + e^2)     posterior mean under r ~ N(0, prior^2)
    lower_bound:  r - errors * e

With 16 plays in each arm and win rates near 0.5 the standard error of the regret is 0.18, more than
the 0.15 at which its term saturates: as measured, a useless hint earns a third of the maximum.

    e^2 = (n (n - 1) standard_error^2 + 0.5) / n^2

is the squared standard error with one pseudo-pair of variance 0.5, that of two fair coins: plays
that happened to agree, or a single pair, are no certainty.

`benchmarks/regret.py` measures what each pays, and the default is chosen on its table: shrinking
pays a useless hint at most 0.10 of the maximum and ranks a true gap of 0.15 above it at least as
often as the regret as measured, since a term that seldom saturates has few ties. The lower bound
pays the true gap more in proportion, but nothing for half of the true gaps. Both are ours: the
reference takes the regret as measured.
"""

import math
from typing import Literal

from spade_jax.rewards.regret import Regret

Caution = Literal["none", "shrunk", "lower_bound"]

PSEUDO_VARIANCE = 0.5


def cautious_error(regret: Regret) -> float:
    """The error `e`; sqrt(0.5) with a single pair."""
    count = regret.num_pairs
    squares = 0.0 if regret.standard_error is None else regret.standard_error**2
    return math.sqrt(count * (count - 1) * squares + PSEUDO_VARIANCE) / count


def credited(regret: Regret, caution: Caution, *, prior: float, errors: float) -> float:
    """The regret that the designer is paid for."""
    if caution == "none":
        return regret.mean
    error = cautious_error(regret)
    if caution == "lower_bound":
        return regret.mean - errors * error
    return regret.mean * prior**2 / (prior**2 + error**2)
