"""The environment library: parametrised families over the six skills of games and the six of tool
use, used to warm-start small policies.
"""

from spade_jax.envs.library import (
    causal_families,
    logic_families,
    math_families,
    optimization_families,
    pattern_families,
    spatial_families,
)
from spade_jax.envs.library.base import Draw, Family, Player
from spade_jax.envs.library.tool_families import TOOL_FAMILIES

FAMILIES: tuple[Family, ...] = (
    *math_families.FAMILIES,
    *logic_families.FAMILIES,
    *spatial_families.FAMILIES,
    *pattern_families.FAMILIES,
    *optimization_families.FAMILIES,
    *causal_families.FAMILIES,
)
"""Every family of games; class names, also of TOOL_FAMILIES, are distinct: a program tells which
family it follows.
"""

__all__ = ["FAMILIES", "TOOL_FAMILIES", "Draw", "Family", "Player"]
