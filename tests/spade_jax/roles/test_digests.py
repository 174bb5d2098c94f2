"""What is read from a program's text, and how much of it at most."""

import random

import pytest

from spade_jax.envs.library import FAMILIES
from spade_jax.roles.digests import MAX_TEXTS, code, digest, rules

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


SAID = '''#!/usr/bin/env python
"""A module."""
import random  # drawn

# A line.
class LampEnv:
    "One string" "and its rest"
    é = "ü"; "loose, after é"  # and a remark on ü
    def reset(self, seed):
        """Only this."""

    def step(self, action):
        """Of two
        lines."""  # with a remark
        text = """kept # no comment
        "nor this" """
        if action:  # why
            "a"
            b"b"
        else: "one line"
        return (text,
                # between
                0.0)
'''

LEFT = '''import random

class LampEnv:
    é = "ü"; pass
    def reset(self, seed):
        pass

    def step(self, action):
        text = """kept # no comment
        "nor this" """
        if action:
            pass
            pass
        else: pass
        return (text,
                0.0)
'''


def test_code_is_what_does_something():
    assert code(SAID) == LEFT
    assert code(SAID.replace("\n", "\r\n")) == LEFT
    assert code(LEFT) == LEFT
    assert code("x = 'no # comment'\n") == "x = 'no # comment'\n"
    assert code("# a remark") == ""
    assert code("class (  # whole") == "class (  # whole"
    assert code("x = '\0'  # whole") == "x = '\0'  # whole"
    deep = f"x = {'-' * 9999}1  # whole"
    assert code(deep) in (deep, deep.removesuffix("  # whole"))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_code_of_the_library_stays_and_remarks_put_into_it_go(family):
    program = family.draw(random.Random(0), ("amber", "basalt", "cobalt", "dolmen"), "easy").program
    assert code(program) == program
    remarked = program.replace("):\n", "):  # remark\n        # another\n")
    assert "remark" in remarked and code(remarked) == program
