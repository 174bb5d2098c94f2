"""Every family of the library: its programs pass the gates of admission, its texts suit the warm
start, and its hint helps.
"""

import random
import re
from collections import Counter

import pytest

from spade_jax.config import SKILLS
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.library.base import Draw, Family

TERMS = ["cheby", "ripple", "passband", "eigen", "stencil", "kurtosis", "simplex", "quadrature"]
DIFFICULTIES = ("easy", "medium", "hard")


def draws(family: Family, count: int) -> list[tuple[list[str], Draw]]:
    """`count` draws over all difficulties and numbers of terms, with the terms each was given."""
    out = []
    for index in range(count):
        rng = random.Random(index)
        terms = rng.sample(TERMS, rng.randint(3, len(TERMS)))
        out.append((terms, family.draw(rng, terms, DIFFICULTIES[index % 3])))
    return out


def test_families_cover_the_skills_under_distinct_names():
    assert Counter(family.skill for family in FAMILIES).keys() == set(SKILLS)
    assert min(Counter(family.skill for family in FAMILIES).values()) >= 2
    assert len({family.class_name for family in FAMILIES}) == len(FAMILIES) >= 12
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
class TestFamily:
    def test_text_is_short_varied_and_of_the_document(self, family, harness):
        skeletons = set()
        for terms, draw in draws(family, 60):
            assert (draw.family, draw.skill) == (family.name, family.skill)
            assert f"class {family.class_name}:" in draw.program
            assert 700 <= len(draw.program) <= 1250, len(draw.program)
            assert 22 <= draw.program.count("\n") <= 35, draw.program
            assert "#" not in draw.program and '"""' not in draw.program
            used = {term for term in terms if f'"{term}' in draw.program}
            assert 2 <= len(used) <= 4, draw.program
            assert 8 <= len(draw.hint.split()) <= 25, draw.hint
            skeletons.add(harness.skeleton(draw.program))
        assert len(skeletons) >= 8

    def test_the_same_rng_draws_the_same(self, family):
        first, second = (family.draw(random.Random(5), TERMS, "medium") for _ in range(2))
        assert (first.program, first.hint) == (second.program, second.hint)

    def test_another_document_changes_the_program(self, family):
        others = [term[::-1] for term in TERMS]
        first = family.draw(random.Random(5), TERMS, "easy").program
        second = family.draw(random.Random(5), others, "easy").program
        assert not set(re.findall(r"\w+", second)) & set(TERMS)
        assert first != second

    def test_programs_pass_the_gates(self, family, programs):
        lucky = []
        for index, (_, draw) in enumerate(draws(family, 15)):
            found = programs.ask(op="probe", program=draw.program, seeds=24)
            assert found["solved"] == 1, draw.program
            assert min(found["lengths"]) >= 2
            assert max(found["lengths"]) <= (8 if index % 3 == 0 else 10)
            assert found["answers"] >= 3
            assert found["deaf"] == 0, draw.program
            assert found["constant"] <= 0.05, draw.program
            assert max(found["random"]) <= 0.1, draw.program
            lucky.append(max(found["constant"], *found["random"]))
        assert sum(lucky) / len(lucky) <= 0.025

    def test_the_hint_makes_the_expert_win_more(self, family, programs):
        wins = {True: 0, False: 0}
        plays = 0
        for index, (_, draw) in enumerate(draws(family, 30)):
            for seed in range(index, index + 3):
                plays += 1
                for hinted in wins:
                    won, turns = programs.play(draw, seed, hinted)
                    wins[hinted] += won
                    assert turns <= 10
        assert wins[True] / plays > 0.8
        assert 0.2 <= wins[False] / plays <= 0.8
