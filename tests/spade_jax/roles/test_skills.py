"""The catalogue holds every skill that the settings know."""

import random

import pytest

from spade_jax.config import DesignerConfig
from spade_jax.errors import ConfigError
from spade_jax.roles import skills
from spade_jax.roles_config import GAME_SKILLS, SKILLS, TOOL_SKILLS


def test_every_skill_is_described():
    assert set(skills.GAMES) == set(GAME_SKILLS) and len(GAME_SKILLS) == 9
    assert set(skills.TOOLS) == set(TOOL_SKILLS) and len(TOOL_SKILLS) == 6
    assert GAME_SKILLS[: len(SKILLS)] == SKILLS
    fields = [
        text
        for skill in skills.CATALOGUE.values()
        for text in (skill.category, skill.summary, skill.description, skill.complexity)
    ]
    examples = [text for skill in skills.CATALOGUE.values() for text in skill.examples]
    assert all(text.strip() for text in fields + examples)
    assert len(set(examples)) == 4 * 15 and len(set(fields)) == len(fields)


def test_ideas_are_drawn_without_repetition():
    drawn = skills.ideas("Optimization", 3, random.Random(0))
    assert len(set(drawn)) == 3 and set(drawn) <= set(skills.GAMES["Optimization"].examples)
    assert skills.ideas("Optimization", 0, random.Random(0)) == ()
    assert len({skills.ideas("Optimization", 3, random.Random(seed)) for seed in range(20)}) > 5


def test_active_skills_are_a_wrapping_window():
    names = ("a", "b", "c", "d")
    assert skills.active(names, 3, 0) == ("a", "b", "c")
    assert skills.active(names, 3, 1) == ("d", "a", "b")
    assert skills.active(names, 9, 5) == names


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"skills": ("Juggling",)}, r"designer\.skills=\['Juggling'\].*Memory Recall"),
        ({"skills": ()}, r"designer\.skills=\(\)"),
        ({"skills": SKILLS, "prompt": "tools"}, r"designer\.prompt=tools: API Orchestration"),
        ({"skills": TOOL_SKILLS, "prompt": "corpus"}, r"'Tool Selection'.*prompt=corpus"),
        ({"skills": ("Optimization", "Optimization")}, "each skill once"),
        ({"attempts": 0}, r"designer\.attempts=0"),
        ({"repair_turns": -1}, r"designer\.repair_turns=-1"),
    ],
)
def test_a_setting_that_is_not_there_is_one_clear_line(changes, said):
    with pytest.raises(ConfigError, match=said) as error:
        DesignerConfig(**changes)
    assert "\n" not in str(error.value)


def test_skills_of_either_setting_are_taken():
    assert DesignerConfig(prompt="tools", skills=TOOL_SKILLS).skills == TOOL_SKILLS
    assert DesignerConfig(prompt="corpus", skills=GAME_SKILLS, skills_per_cycle=9, designs=9)
