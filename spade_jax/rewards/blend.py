"""The designer's reward for an admitted environment: the published blend of anchor and regret.

    reward = anchor_weight * P(win rate) + regret_weight * min(1, max(0, regret) / regret_scale)

Paper: weights 0.6 and 0.4, regret_scale 0.15, P from `anchor`. The reference's other two terms have
weight 0 in its blend recipes and are not here. What a refused design earns is the caller's
(`reward.invalid_reward`).
"""

from spade_jax.rewards.anchor import plateau


def blend(
    win_rate: float | None,
    regret: float | None,
    *,
    anchor_weight: float,
    regret_weight: float,
    band_low: float,
    band_high: float,
    band_ramp: float,
    regret_scale: float,
) -> float | None:
    """Score an environment in [0, anchor_weight + regret_weight].

    None, unscored, when either input was not measured.
    """
    if win_rate is None or regret is None:
        return None
    anchor = plateau(win_rate, band_low, band_high, band_ramp)
    return anchor_weight * anchor + regret_weight * min(1.0, max(0.0, regret) / regret_scale)
