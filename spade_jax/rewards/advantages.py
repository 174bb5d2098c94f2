"""Group-relative advantages (GRPO): how much better a trajectory did than the others of its group.

    mean:      A = R - mean(R)                                    (Dr.GRPO)
    mean_std:  A = (R - mean(R)) / (population std(R) + 1e-8)     (paper recipes)

Groups are formed by the caller: the agent's by environment and seed, the designer's by skill. There
is no scale between roles here; an explicit weight on their losses balances them (`learner.batch`).
"""

from typing import Literal

import numpy as np
from jaxtyping import Float

STD_EPSILON = 1e-8


def group_advantages(
    rewards: Float[np.ndarray, " group"], norm: Literal["mean", "mean_std"]
) -> Float[np.ndarray, " group"]:
    """Centre the rewards of one group, and divide by their spread with `mean_std`.

    Equal rewards give exact zeros: rounding in the mean must not be blown up by the tiny
    denominator. One win in eight gives +2.65 to the winner and -0.38 to the others.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards={rewards} must be finite; leave unmeasured trajectories out of their group"
        )
    values = rewards.astype(np.float64)
    if values.size == 0 or values.min() == values.max():
        return np.zeros_like(values)
    centred = values - values.mean()
    return centred if norm == "mean" else centred / (values.std() + STD_EPSILON)
