"""Alike is what remains when names, numbers, comments and layout are taken out."""

import random

import pytest

from spade_jax.envs.library import FAMILIES
from spade_jax.envs.similarity import near_duplicate

PROGRAM = '''
class ValveEnv:
    """Open valves."""

    def reset(self, seed):
        self.left = [seed % 3, 4.5]
        return f"Valves {self.left}: turn one.", {}
'''


def similarity(first: str, second: str) -> float:
    return near_duplicate(first, {"other": second}, 1.0)[0]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("left", "remaining"),
        ("ValveEnv", "TapEnv"),
        ("% 3", "% 1000"),
        ("4.5", "0"),
        ("Open valves.", "Something else."),
        ("seed % 3", "(  seed % 3 )  # why not\n"),
    ],
)
def test_the_same_program_in_other_clothes(old: str, new: str):
    assert similarity(PROGRAM, PROGRAM.replace(old, new)) == 1.0


@pytest.mark.parametrize(
    ("old", "new"), [("turn one", "open all"), ("% 3", "// 3"), ("[seed % 3, 4.5]", "[seed % 3]")]
)
def test_other_words_or_other_steps_are_another_program(old: str, new: str):
    assert similarity(PROGRAM, PROGRAM.replace(old, new)) < 0.95


def test_the_nearest_is_named_and_the_threshold_is_refused():
    known = {"far": "x = 1", "near": PROGRAM.replace("left", "right"), "also": PROGRAM}
    found, reason = near_duplicate(PROGRAM, known, 1.0)
    assert found == 1.0 and "near" in reason and "100.0%" in reason
    assert near_duplicate(PROGRAM, {"far": "x = 1"}, 0.95) == (0.0, "")
    assert near_duplicate(PROGRAM, {}, 0.95) == (0.0, "")
    assert near_duplicate("", {"empty": "# nothing"}, 0.95)[1]


def test_a_deep_program_can_be_compared():
    deep = "x = " + "-" * 2000 + "1"
    assert similarity(deep, deep.replace("x", "y")) == 1.0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_one_family_on_other_documents_is_not_a_duplicate(family):
    programs = []
    for seed in range(12):
        rng = random.Random(seed)
        terms = ["".join(rng.choice("abcdefghij") for _ in range(7)) for _ in range(6)]
        programs.append(family.draw(rng, terms, "easy").program)
    known = {str(index): program for index, program in enumerate(programs)}
    for index, program in enumerate(programs):
        others = {name: other for name, other in known.items() if name != str(index)}
        assert near_duplicate(program, others, 0.95)[1] == ""
    assert near_duplicate(programs[0].replace("self.turn", "self.t"), known, 0.95)[1]
