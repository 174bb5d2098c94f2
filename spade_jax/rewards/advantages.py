"""Group-relative advantages: how much better a trajectory did than the others of its group.

    mean:      A = R - mean(R)                                    (Dr.GRPO)
    mean_std:  A = (R - mean(R)) / (population std(R) + 1e-8)     (GRPO; the paper's agent)
    rloo:      A = R - mean(R of the others) = n / (n - 1) * (R - mean(R))

Groups are formed by the caller: the agent's by environment and seed, the designer's by skill. The
weight of one role against the other is not here but in `scale` and in the weights of their losses.
"""

from typing import Literal

import numpy as np
from jaxtyping import Float

STD_EPSILON = 1e-8
MIN_SPREAD = 1e-6  # rewards this close are equal but for rounding

Norm = Literal["mean", "mean_std", "rloo"]


def has_contrast(rewards: Float[np.ndarray, " group"]) -> bool:
    """Whether the rewards of a group differ by more than rounding."""
    return rewards.size > 0 and float(rewards.max() - rewards.min()) > MIN_SPREAD


def group_advantages(
    rewards: Float[np.ndarray, " group"], norm: Norm
) -> Float[np.ndarray, " group"]:
    """Centre the rewards of one group, and divide by their spread with `mean_std`.

    Rewards without contrast give exact zeros: rounding must not be blown up by the tiny
    denominator. With `mean_std` one win in eight gives +2.65 to the winner and -0.38 to the others.
    """
    if not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards={rewards} must be finite; leave unmeasured trajectories out of their group"
        )
    values = rewards.astype(np.float64)
    if not has_contrast(values):
        return np.zeros_like(values)
    centred = values - values.mean()
    if norm == "mean":
        return centred
    if norm == "rloo":
        return centred * (values.size / (values.size - 1))
    return centred / (values.std() + STD_EPSILON)
