"""Which trajectories have a loss (DAPO's overlong filtering, the paper's compact filter)."""

from typing import Literal

from jaxtyping import Bool
from numpy import ndarray, zeros_like

from spade_jax.types import Trajectory

Overlong = Literal["train", "mask"]


def overlong(kind: Overlong, trajectory: Trajectory) -> Bool[ndarray, " seq"]:
    """Return the trajectory's loss mask, empty if it ran out of tokens and these are masked.

    A masked trajectory keeps its place in the baseline of its group: running out of tokens still
    counts against its siblings, it only is not itself what is learnt from.
    """
    if kind == "mask" and trajectory.truncated:
        return zeros_like(trajectory.loss_mask)
    return trajectory.loss_mask
