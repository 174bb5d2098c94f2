"""Mathematical Reasoning: programs pass the gates of admission, and texts suit the warm start."""

import random
import re

import pytest

from spade_jax.envs.library.math_families import FAMILIES

TERMS = ["cheby", "ripple", "passband", "eigen", "stencil", "kurtosis", "simplex", "quadrature"]
DIFFICULTIES = ("easy", "medium", "hard")


def draws(family, count):
    for index in range(count):
        rng = random.Random(index)
        terms = rng.sample(TERMS, rng.randint(3, len(TERMS)))
        yield terms, family.draw(rng, terms, DIFFICULTIES[index % 3])


def test_families_are_of_the_skill():
    assert len(FAMILIES) == 2
    assert {family.skill for family in FAMILIES} == {"Mathematical Reasoning"}
    assert len({family.class_name for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
class TestFamily:
    def test_text_is_short_varied_and_of_the_document(self, family, harness):
        skeletons = set()
        for terms, draw in draws(family, 60):
            assert draw.family == family.name and draw.skill == family.skill
            assert f"class {family.class_name}:" in draw.program
            assert 700 <= len(draw.program) <= 1250 and 22 <= draw.program.count("\n") <= 34
            assert "#" not in draw.program and '"""' not in draw.program
            used = {term for term in terms if f'"{term}' in draw.program}
            assert 2 <= len(used) <= 4
            assert 8 <= len(draw.hint.split()) <= 25
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
        lucky, tried = 0.0, 0
        for index, (_, draw) in enumerate(draws(family, 18)):
            measured = programs.ask(op="probe", program=draw.program, seeds=12)
            assert measured["solved"] == 1, draw.program
            assert min(measured["lengths"]) >= 2
            assert max(measured["lengths"]) <= (8 if index % 3 == 0 else 10)
            assert measured["answers"] >= 4
            assert measured["deaf"] == 0, draw.program
            assert measured["constant"] == 0, draw.program
            assert max(measured["random"]) <= 0.1, draw.program
            lucky += max(measured["random"])
            tried += 1
        assert lucky / tried <= 0.025

    def test_the_hint_helps_the_expert(self, family, programs):
        wins = {True: 0, False: 0}
        plays = 0
        for index, (_, draw) in enumerate(draws(family, 24)):
            for seed in range(index, index + 5):
                plays += 1
                for hinted in (True, False):
                    won, turns = programs.play(draw, seed, hinted)
                    wins[hinted] += won
                    assert turns <= 10
        assert wins[True] / plays > 0.8
        assert 0.2 <= wins[False] / plays <= 0.8
