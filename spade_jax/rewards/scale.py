"""What the public reference multiplies the designer's advantages by, so that few designs weigh as
much as many plays.

    scale = min(50, num_agent / num_designer * interval)

32 in the games recipes (192 plays, 24 designs, interval 4); 50, the cap, in tool use (interval 8,
or 256 plays, 16 designs and interval 32). It depends on how many plays failed, and lets one design
outweigh ten plays; by default the roles are balanced by a weight on the mean of each one's loss
instead (`learner.batch`). Source: the reference's `environment scale`.
"""

REFERENCE_CAP = 50.0


def reference_scale(num_agent: int, num_designer: int, interval: int) -> float:
    """The factor by the trajectories of each role in one step; 1 if a role has none."""
    if num_agent == 0 or num_designer == 0:
        return 1.0
    return min(REFERENCE_CAP, num_agent / num_designer * interval)
