"""Micro learning potential: what the agent gained on one environment while it was in play.

Source: the reference's `micro_lp` and the second term of its blend (weight 0 in the recipes). The
plays of an environment are spread over several steps, so it needs a designer delay of at least one
step.

    slope:   b (k - 1), where b minimises sum_i n_i (m_i - a - b i)^2 over the steps i = 0 .. k - 1
    halves:  mean return of the later half of the steps - mean return of the earlier half

n_i plays with mean return m_i in step i, in order; the middle one of an odd number of steps is
late. Both are the gain from the first step to the last in units of return, positive when the agent
improves. In a half every play counts the same. One step alone has no gain, where the reference says
0; here it is None.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Literal

Method = Literal["slope", "halves"]


def micro_learning_potential(
    returns: Mapping[int, Sequence[float]], method: Method
) -> float | None:
    """The gain over the steps, by step the returns of its plays; None with fewer than two steps."""
    steps = [list(returns[step]) for step in sorted(returns) if returns[step]]
    if len(steps) < 2:
        return None
    if method == "halves":
        middle = len(steps) // 2
        early, late = chain(*steps[:middle]), chain(*steps[middle:])
        return _mean(list(late)) - _mean(list(early))
    counts = [len(values) for values in steps]
    total = sum(counts)
    centre = sum(count * index for index, count in enumerate(counts)) / total
    level = math.fsum(value for values in steps for value in values) / total
    spread = sum(count * (index - centre) ** 2 for index, count in enumerate(counts))
    product = math.fsum(
        count * (index - centre) * (_mean(values) - level)
        for index, (count, values) in enumerate(zip(counts, steps, strict=True))
    )
    return product / spread * (len(steps) - 1)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
