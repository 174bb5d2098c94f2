"""Every prompt carries what it must, and the arms differ by the hint alone."""

from spade_jax.config import SKILLS
from spade_jax.roles import prompts, skills


def test_designer_prompt_carries_skill_difficulty_document_and_memory():
    text = prompts.designer(
        "Optimization",
        "hard",
        "numpy.kron\nKronecker {product}",
        ["kron"],
        ["AEnv of x was too easy"],
    )
    for part in (
        "Optimization",
        skills.DESCRIPTIONS["Optimization"],
        "hard",
        "Kronecker {product}",
        "AEnv of x",
        'Terms: "kron"',
    ):
        assert part in text
    assert "Memory: none" in prompts.designer("Optimization", "easy", "text", [], [])
    assert prompts.designer("Optimization", "easy", "t", [], []) != prompts.designer(
        "Optimization", "hard", "t", [], []
    )


def test_arms_differ_by_the_hint_line_alone():
    plain = prompts.first_observation("Room 1: {key}", None)
    hinted = prompts.first_observation("Room 1: {key}", "the key is near")
    assert hinted == plain + "\nHINT: the key is near"
    assert "\\boxed{}" in plain


def test_every_skill_is_described():
    assert set(skills.DESCRIPTIONS) == set(SKILLS)


def test_active_skills_are_a_wrapping_window():
    names = ("a", "b", "c", "d")
    assert skills.active(names, 3, 0) == ("a", "b", "c")
    assert skills.active(names, 3, 1) == ("d", "a", "b")
    assert skills.active(names, 9, 5) == names
