"""What each skill asks of an environment, and which skills a cycle works on (reference section
1.1).
"""

from collections.abc import Sequence

DESCRIPTIONS = {
    "Mathematical Reasoning": "reach a quantity by arithmetic the player must work out",
    "Logical Deduction": "narrow hidden facts down from consistent answers",
    "Spatial Reasoning": "move through positions whose layout matters",
    "Pattern Recognition": "find the rule behind what is shown and continue it",
    "Optimization": "spend a limited budget where it gains most",
    "Causal Inference": "learn by trying which cause brings which effect",
}
"""One line a skill, in our own words; the keys are `config.SKILLS`."""


def active(skills: Sequence[str], skills_per_cycle: int, cycle: int) -> tuple[str, ...]:
    """Window of `skills_per_cycle` consecutive skills starting at (cycle * skills_per_cycle) mod K,
    wrapping.
    """
    count = min(skills_per_cycle, len(skills))
    start = cycle * count % len(skills)
    return tuple(skills[(start + offset) % len(skills)] for offset in range(count))
