"""The win-rate anchor: a designer is paid for environments the agent wins about half of the time.

Source: the plateau term of the published blend (band [0.4, 0.6], ramp 0.25), alone in the paper's
solve-rate control. The reference feeds it the mean return, so an environment that always ends at
0.5, or tosses a coin, earns all of it. By default it is fed the fraction of binary wins, and
multiplied by the share of their variance that is within instances (`seed_variance`).
"""


def plateau(win_rate: float, low: float, high: float, ramp: float) -> float:
    """Reward 1 on the band [low, high], falling linearly to 0 at distance `ramp` outside it.

        P(w) = max(0, 1 - distance(w, [low, high]) / ramp)

    With (0.4, 0.6, 0.25): 0 at w <= 0.15 and w >= 0.85; P(0.2) = 0.2, P(0.3) = 0.6.
    """
    distance = max(low - win_rate, win_rate - high, 0.0)
    return max(0.0, 1.0 - distance / ramp)
