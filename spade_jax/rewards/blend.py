"""The designer's reward for an admitted environment: the published blend of four terms.

    reward = anchor_weight * anchor
           + regret_weight * clip(regret / regret_scale, 0, 1)
           + micro_weight * micro / micro_scale
           + frontier_weight * frontier

Paper: weights 0.6, 0.4, 0 and 0, regret_scale 0.15; micro_scale 0.10 is the reference's. The terms
are made in the modules of their names. Without `clip` the regret is only divided, as in the
reference's library default. What a refused or broken design earns instead is in `penalty`.
"""


def blend(
    anchor: float | None = None,
    regret: float | None = None,
    micro: float | None = None,
    frontier: float | None = None,
    *,
    anchor_weight: float,
    regret_weight: float,
    micro_weight: float = 0.0,
    frontier_weight: float = 0.0,
    regret_scale: float,
    micro_scale: float = 0.1,
    clip: bool = True,
) -> float | None:
    """Score an environment; None, unscored, when a term that has a weight was not measured."""
    terms = (
        (anchor_weight, anchor),
        (regret_weight, None if regret is None else regret_term(regret, regret_scale, clip=clip)),
        (micro_weight, None if micro is None else micro / micro_scale),
        (frontier_weight, frontier),
    )
    total = 0.0
    for weight, value in terms:
        if weight == 0:
            continue
        if value is None:
            return None
        total += weight * value
    return total


def regret_term(regret: float, scale: float, *, clip: bool = True) -> float:
    """clip(regret / scale, 0, 1): a harmful hint is worth nothing, and a gap of `scale` all."""
    return min(1.0, max(0.0, regret) / scale) if clip else regret / scale
