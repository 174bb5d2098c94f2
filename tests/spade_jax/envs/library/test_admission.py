"""Admission lets every family of the library through, program and hint."""

import random

import pytest

from spade_jax.envs.admit import admit
from spade_jax.envs.hint_gates import admit_hint
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.library.base import Family

TERMS = ("cheby", "ripple", "window", "taper", "stencil")
HOW = {
    "solution_seeds": range(4),
    "probe_seeds": range(100, 112),
    "max_probe_win_frac": 0.1,
    "max_turns": 12,
    "rng_seed": 0,
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_admitted(shared, family: Family):
    draw = family.draw(random.Random(2), TERMS, "medium")
    found = shared.run(admit(shared.pool, draw.program, **HOW, known={}, duplicate_similarity=0.95))
    assert found.admitted, found
    hint = shared.run(admit_hint(shared.pool, draw.program, draw.hint, **HOW, max_words=100))
    assert hint.admitted, hint
