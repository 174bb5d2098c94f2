"""The environment library: parametrised families over the six skills, used to warm-start small
policies.
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

FAMILIES: tuple[Family, ...] = (
    *math_families.FAMILIES,
    *logic_families.FAMILIES,
    *spatial_families.FAMILIES,
    *pattern_families.FAMILIES,
    *optimization_families.FAMILIES,
    *causal_families.FAMILIES,
)
"""Every family; class names are distinct, so that a program tells which family it follows."""

__all__ = ["FAMILIES", "Draw", "Family", "Player"]
