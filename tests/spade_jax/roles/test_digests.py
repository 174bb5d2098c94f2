"""What is read from a program's text, and how much of it at most."""

import pytest

from spade_jax.roles.digests import MAX_TEXTS, digest, rules

PROGRAM = '''
import random

class LampEnv:
    """Light every   lamp
    of the row.
    """

    def reset(self, seed):
        self.lamps = [False] * 5
        self.turn = self.left = 0
        name = "ok"
        return f"Row {seed} of five lamps{'!'}: which lamp?", {}

    def step(self, action):
        self.turn += 1
        other.field = action
        return "No such lamp, try again.", 0.0, False, self.turn > 9, {}
'''


def test_rules_are_all_texts_in_order():
    assert rules(PROGRAM).split("\n") == [
        "Light every lamp of the row.",
        "ok",
        "Row {} of five lamps{}: which lamp?",
        "No such lamp, try again.",
    ]
    assert rules("x = 1") == ""
    with pytest.raises(SyntaxError):
        rules("class (")


def test_a_digest_says_what_a_program_is():
    assert digest(PROGRAM).split("\n") == [
        "LampEnv, 18 lines",
        "about: Light every lamp of the row.",
        "keeps: lamps, turn, left",
        "says: Row {} of five lamps{}: which lamp?",
        "says: No such lamp, try again.",
    ]
    assert digest("x = 1") == "a module, 1 lines"


def test_a_digest_is_bounded_and_keeps_the_longest_sentences():
    texts = [" ".join([f"w{index}"] * (index + 3)) for index in range(9)]
    found = digest("class " + "A" * 500 + "Env:\n    x = " + repr([*texts, "y " * 5000]))
    lines = found.split("\n")
    assert len(lines) == 1 + MAX_TEXTS and max(map(len, lines)) <= 130
    assert lines[1] == f"says: {texts[4]}" and lines[-1].startswith("says: y y")
