"""The families of tool tasks: admitted with their hints, varied, of the document, and played by an
expert whom the hint helps.
"""

import random

import pytest

from spade_jax.config import SKILLS
from spade_jax.envs.admit import admit
from spade_jax.envs.hint_gates import admit_hint
from spade_jax.envs.library import FAMILIES, TOOL_FAMILIES
from spade_jax.envs.library.base import Draw
from spade_jax.types import Fault

TERMS = ["cheby", "ripple", "passband", "eigen", "stencil", "kurtosis", "simplex", "quadrature"]
DIFFICULTIES = ("easy", "medium", "hard")
HOW = {
    "solution_seeds": range(4),
    "probe_seeds": range(100, 112),
    "max_probe_win_frac": 0.1,
    "max_turns": 12,
    "rng_seed": 0,
}


def draws(family, count):
    for index in range(count):
        rng = random.Random(index)
        terms = rng.sample(TERMS, rng.randint(3, len(TERMS)))
        yield terms, family.draw(rng, terms, DIFFICULTIES[index % 3])


async def play(pool, draw: Draw, hinted: bool, seed: int) -> bool:
    instance = await pool.open(draw.program, seed)
    assert not isinstance(instance, Fault), instance
    player, observation, won = draw.player(hinted, random.Random(seed)), instance.observation, False
    for _ in range(12):
        _, action = player.act(observation)
        reply = await instance.step(action)
        assert not isinstance(reply, Fault), reply
        won, observation = reply.terminated and reply.reward == 1.0, reply.observation
        if reply.terminated or reply.truncated:
            break
    await instance.close()
    return won


def test_a_skill_a_family_under_names_of_its_own():
    assert len({family.skill for family in TOOL_FAMILIES}) == len(TOOL_FAMILIES) == 6
    assert not {family.skill for family in TOOL_FAMILIES} & set(SKILLS)
    everyone = (*FAMILIES, *TOOL_FAMILIES)
    assert len({family.class_name for family in everyone}) == len(everyone)


@pytest.mark.parametrize("family", TOOL_FAMILIES, ids=lambda family: family.name)
class TestFamily:
    def test_text_is_short_varied_and_of_the_document(self, family, harness):
        skeletons = set()
        for terms, draw in draws(family, 60):
            assert (draw.family, draw.skill) == (family.name, family.skill)
            assert f"class {family.class_name}(ToolTask):" in draw.program
            assert 1000 <= len(draw.program) <= 2000, len(draw.program)
            assert 3 <= sum(f'"{term}"' in draw.program for term in terms) <= 4
            assert 8 <= len(draw.hint.split()) <= 25, draw.hint
            skeletons.add(harness.skeleton(draw.program))
        assert len(skeletons) >= 8

    def test_programs_and_hints_are_admitted(self, family, shared):
        for _, draw in draws(family, 3):
            found = admit(shared.pool, draw.program, **HOW, known={}, duplicate_similarity=0.95)
            verdict = shared.run(found)
            assert verdict.admitted, verdict
            asked = admit_hint(shared.pool, draw.program, draw.hint, **HOW, max_words=100)
            verdict = shared.run(asked)
            assert verdict.admitted, verdict

    def test_the_hint_helps_the_expert(self, family, shared):
        async def both():
            drawn = [(draw, seed) for _, draw in draws(family, 3) for seed in range(8)]
            return [
                [await play(shared.pool, draw, hinted, seed) for draw, seed in drawn]
                for hinted in (True, False)
            ]

        hinted, unhinted = shared.run(both())
        assert all(hinted) and 4 <= sum(unhinted) <= 20
