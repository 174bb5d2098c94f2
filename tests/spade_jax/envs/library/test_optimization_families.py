"""Every gate of a teaching program, held over draws of the Optimization families."""

import random
import re

import pytest

from spade_jax.envs.library.base import Draw, Family
from spade_jax.envs.library.optimization_families import FAMILIES

TERMS = ["cheby", "ripple", "passband", "taps", "prolate", "fresnel", "airy", "jacobi"]
DIFFICULTIES = ("easy", "medium", "hard")


def draws(family: Family, count: int) -> list[Draw]:
    """`count` draws over all difficulties and numbers of terms."""
    out = []
    for seed in range(count):
        rng = random.Random(seed)
        terms = rng.sample(TERMS, rng.randint(3, len(TERMS)))
        out.append(family.draw(rng, terms, DIFFICULTIES[seed % 3]))
    return out


def test_skill_and_number_of_families():
    assert [family.skill for family in FAMILIES] == ["Optimization"] * 2


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_text_of_the_draws(family, harness):
    drawn = draws(family, 60)
    assert [(d.program, d.hint) for d in drawn] == [(d.program, d.hint) for d in draws(family, 60)]
    assert len({harness.skeleton(draw.program) for draw in drawn}) >= 8
    for draw in drawn:
        assert (draw.family, draw.skill) == (family.name, family.skill)
        assert 700 <= len(draw.program) <= 1250, len(draw.program)
        assert 22 <= draw.program.count("\n") <= 35, draw.program
        assert f"class {family.class_name}:" in draw.program
        assert 8 <= len(draw.hint.split()) <= 25, draw.hint
        quoted = set(re.findall(r'"([a-z]+)"', draw.program)) & set(TERMS)
        assert 2 <= len(quoted) <= 4, draw.program


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_another_document_changes_the_program(family):
    one, other = (
        family.draw(random.Random(3), terms, "easy").program for terms in (TERMS[:4], TERMS[4:])
    )
    assert one != other and not any(term in other for term in TERMS[:4])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_gates(family, programs):
    rates = []
    for draw in draws(family, 12):
        found = programs.ask(op="probe", program=draw.program, seeds=40)
        assert found["solved"] == 1, draw.program
        assert min(found["lengths"]) >= 3 and max(found["lengths"]) <= 8
        assert len(set(found["firsts"])) >= 3 and found["answers"] >= 3
        assert found["deaf"] == 0
        assert found["constant"] <= 0.05 and max(found["random"]) <= 0.04, draw.program
        rates.append(max(found["constant"], *found["random"]))
    assert sum(rates) / len(rates) <= 0.02


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_hint_makes_the_expert_win_more(family, programs):
    hinted, unhinted = [], []
    for seed, draw in enumerate(draws(family, 45)):
        hinted += [programs.play(draw, seed + i, hinted=True)[0] for i in range(2)]
        unhinted += [programs.play(draw, seed + i, hinted=False)[0] for i in range(2)]
    assert sum(hinted) / len(hinted) > 0.95
    assert 0.2 <= sum(unhinted) / len(unhinted) <= 0.8
