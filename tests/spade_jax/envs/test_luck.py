"""What chance decides is refused however an action has to look; where one thing is right, or
anything is, nothing is chance.
"""

from pathlib import Path

import pytest

from spade_jax.envs import luck
from spade_jax.envs.admit import admit
from spade_jax.roles.prompts import worked_games, worked_tools
from spade_jax.types import Verdict

WHEEL = '''import random


class WheelEnv:
    """A choice and the table's number; a number that is drawn from both decides."""

    NAMES = (
        "red blue green black white gold grey pink brown teal amber beige coral ivory jade khaki "
        "lilac mauve ochre plum ruby sand umber violet"
    ).split()

    def reset(self, seed):
        rng = random.Random(seed)
        self.code, self.left = rng.randint(10000, 99999), 6
        return f"Table {self.code} is open. Say a colour and then the table's number.", {}

    def wins(self, name):
        return random.Random(f"{self.code}/{name}").random() < 0.5

    def wanted(self):
        return str(self.code)

    def step(self, action):
        words = action.lower().split()
        self.left -= 1
        if len(words) != 2 or words[1] != self.wanted() or not self.takes(words[0]):
            return "A colour and the table's number, please.", 0.0, False, self.left <= 0, {}
        if self.wins(words[0]):
            return f"The wheel stops: yours, {words[0]}.", 1.0, True, False, {}
        return f"The wheel stops: not yours, {words[0]}.", 0.0, True, False, {}

    def takes(self, name):
        return True

    def names(self):
        return self.NAMES

    def solution(self):
        return [f"{next(name for name in self.names() if self.wins(name))} {self.wanted()}"]
'''
OF_A_LIST = WHEEL.replace("return True", "return name in self.NAMES")
ANY_NUMBER = WHEEL.replace("return True", "return name.isdecimal()")
OWN = "rng = random.Random(self.code)\n        return "
OWN_WORDS = OWN + "[''.join(rng.sample('abcdefghijk', 7)) for _ in range(40)]"
OWN_NUMBERS = OWN + "[str(rng.randint(1000, 9999)) for _ in range(40)]"
WHEELS = {
    "any word": WHEEL,
    "a word of a list": OF_A_LIST,
    "one in three": OF_A_LIST.replace("< 0.5", "< 0.35"),
    "and a sum": OF_A_LIST.replace("return str(self.code)", "return str(self.code + 1)"),
    "a word that is never said again": WHEEL.replace("return self.NAMES", OWN_WORDS),
    "a number": ANY_NUMBER.replace("return self.NAMES", "return map(str, range(99))"),
    "a number that is never said again": ANY_NUMBER.replace("return self.NAMES", OWN_NUMBERS),
}
IN_A_RANGE = ANY_NUMBER.replace('/{name}").random() < 0.5', '").randint(100, 990) <= int(name)')
IN_A_RANGE = IN_A_RANGE.replace("return random", "return int(name) < 1000 and random")
IN_A_RANGE = IN_A_RANGE.replace("return self.NAMES", "return map(str, range(1000))")
HONEST = {
    "one right word": OF_A_LIST.replace("< 0.5", "* 10 // 1 == self.NAMES.index(name)").replace(
        "{self.code}/{name}", "{self.code}"
    ),
    "a word that does not matter": OF_A_LIST.replace("return name in self.NAMES", "return True")
    .replace('random.Random(f"{self.code}/{name}").random() < 0.5', "True")
    .replace("return str(self.code)", "return str(self.code * 7 % 9999)")
    .replace(
        "next(name for name in self.names()", "next(name for name in self.names()[self.code % 9 :]"
    ),
    "a range": IN_A_RANGE.replace("return str(self.code)", "return str(self.code * 7 % 9999)"),
    **{name: program for name, program in vars(worked_games).items() if name.isupper()},
    **{name: program for name, program in vars(worked_tools).items() if name == "SEED_BANK"},
    **{
        path.stem: path.read_text()
        for path in (Path(__file__).parent / "tool_programs").glob("[rl]*.py")
    },
}


def verdict(shared, program: str) -> Verdict:
    return shared.run(
        admit(
            shared.pool,
            program,
            solution_seeds=range(5),
            probe_seeds=range(100, 120),
            max_probe_win_frac=0.1,
            max_turns=20,
            rng_seed=0,
            known={},
            duplicate_similarity=0.95,
        )
    )


@pytest.mark.parametrize("name", WHEELS)
def test_chance_is_refused(shared, name: str):
    found = verdict(shared, WHEELS[name])
    assert (found.admitted, found.gate) == (False, "random"), found
    assert "by chance" in found.reason


@pytest.mark.parametrize("name", HONEST)
def test_what_is_not_chance_is_admitted(shared, name: str):
    found = verdict(shared, HONEST[name])
    assert found.admitted, found


def test_a_guess_keeps_what_is_the_instances_own():
    known = frozenset({"red", "blue", "do"})
    assert luck._guess(["Red 17", "do"], ["blue 25", "do"], known) == ("blue 17", "do")
    assert luck._guess(["red 17"], ["red 25"], known) is None  # nothing is changed
    assert luck._guess(["red"], ["blue"], known) is None  # nothing is kept
    assert luck._guess(["red 17"], ["blue"], known) is None
    assert luck._guess(["red 17"], ["blue 25", "do"], known) is None


@pytest.mark.parametrize(
    ("won", "words", "numbers"),
    [
        ([False, False, False], False, False),
        ([True, True, True], False, False),
        ([True, False, False], True, False),
        ([False, True, True], True, True),
        ([True, False, True], True, True),
        ([], False, False),
    ],
)
def test_chance_is_that_some_win_and_others_not(won: list[bool], words: bool, numbers: bool):
    assert luck._by_chance(won, is_number=False) == words
    assert luck._by_chance(won, is_number=True) == numbers
