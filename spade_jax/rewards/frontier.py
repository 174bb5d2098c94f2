"""The frontier term of the blend: how far an environment is from being won half of the time.

    frontier = -(w - 0.5)^2 / scale,   scale = 0.08

Never positive; -3.125 at a win rate of 0 or 1. Source: the reference's blend, where its weight is 0
in every recipe. Unlike the anchor it has no flat top and still tells a win rate of 0.05 from one of
0.
"""


def frontier(win_rate: float, scale: float) -> float:
    """The term, in [-0.25 / scale, 0]."""
    return -((win_rate - 0.5) ** 2) / scale
