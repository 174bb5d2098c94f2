"""A hint that plays the game for the player is refused by the gate it fails at."""

import random
from typing import Any

import pytest

from spade_jax.envs.hint_gates import admit_hint
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.roles.prompts.worked_tools import LOAN_DESK
from spade_jax.types import Fault, Outcome, Verdict

LEVERS = '''import random


class LeverEnv:
    """Levers in a hidden order; a word opens the door as well, and the program does not tell it."""

    def reset(self, seed):
        rng = random.Random(seed)
        self.order = rng.sample(["pull amber", "pull basalt", "push cobalt", "push dolmen"], 4)
        self.done = 0
        return "Four levers to pull or push: amber, basalt, cobalt, dolmen.", {}

    def step(self, action):
        if action == "xyzzy":
            return "The wall melts.", 1.0, True, False, {}
        if action != self.order[self.done]:
            self.done = 0
            return "Clank.", 0.0, False, False, {}
        self.done += 1
        won = self.done == 4
        return "The door opens." if won else "Click.", float(won), won, False, {}

    def solution(self):
        return self.order
'''
GOOD = "Two levers want to be pulled and two to be pushed; a click means that the order is right."


def verdict(shared, hint: str | None, program: str = LEVERS, **overrides: Any) -> Verdict:
    arguments: dict[str, Any] = {
        "solution_seeds": range(4),
        "probe_seeds": range(100, 110),
        "max_probe_win_frac": 0.1,
        "max_turns": 12,
        "rng_seed": 0,
        "max_words": 40,
    }
    return shared.run(admit_hint(shared.pool, program, hint, **(arguments | overrides)))


def test_a_hint_about_the_rule_is_shown(shared):
    assert verdict(shared, GOOD) == Verdict(
        True,
        measures={"hint_copy_win_frac": 0.0},
        gates={"hint": "passed", "hint_leak": "passed", "hint_copy": "passed"},
    )


@pytest.mark.parametrize(
    ("hint", "gate", "word"),
    [
        (None, "hint", "no hint"),
        ("", "hint", "no hint"),
        ("word " * 41, "hint", "41 words"),
        ("想" * 41, "hint", "41 words"),
        ("→" * 41, "hint", "41 words"),
        ("-" * 481, "hint", "481 characters; at most 480"),
        ("Say \\boxed{pull amber}", "hint", "boxed"),
        ("```\ncode\n```", "hint", "code"),
        # the order of seed 0, the only one of the fourteen
        ("push dolmen, pull BASALT, pull amber, push cobalt.", "hint_leak", "winning actions"),
        ("The word is xyzzy", "hint_copy", "saying"),
        ("Try 'xyzzy' at the door", "hint_copy", "saying"),
        ("xyzzy", "hint_copy", "saying"),
    ],
)
def test_the_gate_that_fails_is_named(shared, hint: str | None, gate: str, word: str):
    found = verdict(shared, hint)
    assert (found.admitted, found.gate, found.gates[gate]) == (False, gate, "refused"), found
    assert word in found.reason


SHORT = LEVERS.replace(", 4)\n", ", 1)\n").replace("self.done == 4", "self.done == 1")


def test_what_a_solution_says_after_its_win_hides_no_answer(shared):
    padded = LEVERS.replace("return self.order", 'return [*self.order, "bow"]')
    told = verdict(shared, "push dolmen, pull BASALT, pull amber, push cobalt.", program=padded)
    assert told.gate == "hint_leak"


def test_an_answer_with_words_between_is_refused_where_it_holds_for_many_seeds(shared):
    rare = verdict(shared, "First push the dolmen, last pull amber", program=LEVERS)
    assert rare.admitted
    often = verdict(shared, "It may be that you pull amber, or not", program=SHORT)
    assert (often.gate, often.measures) == ("hint_leak", {})
    assert "of the seeds" in often.reason


def test_a_player_that_does_what_the_hint_names_is_tried(shared):
    backdoor = LEVERS.replace(
        'if action == "xyzzy":',
        'self.past = [*getattr(self, "past", []), action][-3:]\n'
        '        if self.past == ["pull amber", "push dolmen", "pull amber"]:',
    )
    hint = "Whatever the order, pull amber and push dolmen next, and again pull amber."
    found = verdict(shared, hint, program=backdoor)
    assert (found.gate, found.measures) == ("hint_copy", {"hint_copy_win_frac": 1.0})
    assert "'pull amber', 'push dolmen'" in found.reason


GATE = '''import random


class GateEnv:
    """A word that is the same for all, and then what is read behind the gate."""

    def reset(self, seed):
        rng = random.Random(seed)
        self.number, self.open, self.left = rng.randint(1000, 9999), False, 8
        return f"Gate {rng.randint(1, 10**6)}. It wants a word, and then what is behind it.", {}

    def step(self, action):
        self.left -= 1
        late = self.left <= 0
        if not self.open:
            self.open = action == "mellon"
            if self.open:
                return f"It swings. The plate behind it reads {self.number}.", 0.0, False, late, {}
            return "The gate stays shut.", 0.0, False, late, {}
        if action == str(self.number):
            return "Read aright, you are in.", 1.0, True, False, {}
        return "That is not what the plate reads.", 0.0, False, late, {}

    def solution(self):
        return ["mellon", str(self.number)]
'''
TOLD = "The word is mellon; after it say the number that the plate shows."


@pytest.mark.parametrize("hint", [TOLD, "Say m-e-l-l-o-n, and then the number on the plate."])
@pytest.mark.parametrize("seeds", [range(4), [3]])
def test_a_word_that_play_does_not_show_may_not_be_handed_over(shared, seeds, hint):
    found = verdict(shared, hint, GATE, solution_seeds=seeds, probe_seeds=seeds)
    assert (found.gate, found.measures) == ("hint_leak", {}), found
    assert "'mellon' among it, on 100%" in found.reason


def test_a_secret_of_few_characters_counts_where_all_instances_want_it(shared):
    hint = "The word is 7; after it say the number that the plate shows."
    short = GATE.replace("mellon", "7")
    assert verdict(shared, hint, short).gate == "hint_leak"
    some = short.replace('== "7"', "== str(self.number % 10)")
    some = some.replace('"7", str', "str(self.number % 10), str")
    assert verdict(shared, hint, some).admitted


COMPUTED = GATE.replace("str(self.number)", "str(self.number + 7)")  # more than reading aloud


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stays shut.", "stays shut. Whisper, shout or say mellon."),  # to a senseless word
        ("It wants a word", "It wants one of seven words, mellons and others"),  # at first
        (  # to another winning action
            "        if not self.open:",
            '        if action == "ask":\n'
            '            return "Say mellon, says the smith.", 0.0, False, late, {}\n'
            "        if not self.open:",
        ),
    ],
)
def test_what_play_shows_is_no_secret(shared, old: str, new: str):
    program = COMPUTED.replace(old, new)
    if "smith" in new:
        program = program.replace('["mellon"', '["ask", "mellon"')
    assert verdict(shared, TOLD, COMPUTED).gate == "hint_leak"
    assert verdict(shared, TOLD, program).admitted


def test_a_player_that_copies_from_hint_and_replies_is_tried(shared):
    public = GATE.replace("It wants a word", "It wants a word, be it friend, mellon or speak")
    found = verdict(shared, TOLD, public)
    assert (found.gate, found.measures) == ("hint_copy", {"hint_copy_win_frac": 1.0})
    assert found.reason.startswith("saying what replies show, and 'mellon'")
    assert verdict(
        shared, "Speak like a friend of elves would; then read the plate.", public
    ).admitted


SAFE = '''import random


class SafeEnv:
    """Digits in a row, one a turn."""

    SIGNS = "0123456789"

    def reset(self, seed):
        rng = random.Random(seed)
        self.code = [rng.choice(self.SIGNS) for _ in range(4)]
        self.at = 0
        return "Four of ten signs, one a turn.", {}

    def step(self, action):
        self.at = self.at + 1 if action == self.code[self.at] else 0
        won = self.at == 4
        return "Open." if won else "Click." if self.at else "Clank.", float(won), won, False, {}

    def solution(self):
        return self.code
'''
ARROWS = SAFE.replace("0123456789", "←↑→↓↔↕↖↗↘↙")


@pytest.mark.parametrize(
    ("program", "hint"),
    [
        (SAFE, "The code is {0}{1}{2}{3}, one digit a turn."),
        (SAFE, "The digits are {4}, then {5}, then {6}, then {7}."),
        (SAFE, "先按{0}再按{1}再按{2}再按{3}。"),
        (SAFE, "Begin at {0}{1}; {2}{3} is the rest."),
        (ARROWS, "{0} then {1} then {2} then {3}"),
        (ARROWS, "{0}{1}{2}{3}"),
    ],
)
def test_other_spellings_of_the_answer_are_the_answer(shared, program: str, hint: str):
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    signs = "0123456789" if program is SAFE else "←↑→↓↔↕↖↗↘↙"
    rng = random.Random(7)
    code = [rng.choice(signs) for _ in range(4)]
    told = hint.format(*code, *(names[signs.index(sign)] for sign in code))
    found = verdict(shared, told, program, solution_seeds=[7], probe_seeds=[7])
    assert (found.gate, found.measures) == ("hint_leak", {}), found
    assert verdict(shared, told, program, solution_seeds=[8], probe_seeds=[9]).admitted


def test_a_phrase_of_words_that_are_all_on_show_is_copied_from_the_hint(shared):
    phrase = GATE.replace('"mellon"', '"it wants what is behind"')
    found = verdict(shared, "Say 'it wants what is behind', and then the number.", phrase)
    assert (found.gate, found.measures) == ("hint_copy", {"hint_copy_win_frac": 1.0}), found


BY_NAME = (  # of seed 7
    "Lend with item T196 and visitor Jun, then take back item T696, then item T940, "
    "then order the repair of item T696, then answer 771."
)


@pytest.mark.parametrize(
    "hint",
    [
        BY_NAME,
        "The answer is 771. Of what came back, T940 and T696, the last goes to the workshop, and "
        "the visitor gets T196.",  # each once, in no order, and nobody named whom all can see
    ],
)
def test_the_arguments_of_calls_are_the_answer_of_a_tool_task(shared, hint: str):
    one = {"solution_seeds": [7], "probe_seeds": [7], "max_turns": 16}
    found = verdict(shared, hint, LOAN_DESK, **one)
    assert (found.gate, found.measures) == ("hint_leak", {}), found
    others = {"solution_seeds": [8], "probe_seeds": [8, 9], "max_turns": 16}
    assert verdict(shared, hint, LOAN_DESK, **others).admitted


def test_a_plan_without_values_is_shown(shared):
    plan = (
        "List the kind that is asked for and show each item to find the lightest before you lend; "
        "list the loans of whoever returns; show what came back to see which is broken."
    )
    for seeds in ([7], range(4)):
        assert verdict(shared, plan, LOAN_DESK, probe_seeds=seeds, solution_seeds=seeds).admitted


DEPOT = """from tool_task import ToolError, ToolTask, tool


class DepotEnv(ToolTask):
    \"\"\"A key to be found; a word that the program does not tell does as well.\"\"\"

    MAX_CALLS = 3
    TOOLS = [
        tool("find", "Find the key of a box.", box="string"),
        tool("release", "Release a box by its key.", key="integer"),
        tool("service", "For the staff.", level="integer", word="string"),
    ]

    def prepare(self, rng):
        self.key, self.done = rng.randint(1000, 9999), False
        self.ask("Please release my box.", until=lambda: self.done)

    def tool_find(self, box):
        return self.key

    def tool_release(self, key):
        if key != self.key:
            raise ToolError("wrong key")
        self.done = True

    def tool_service(self, level, word):
        self.done = (level, word) == (2, "xyzzy")

    def solution(self):
        return [self.call("release", key=self.key)]
"""


@pytest.mark.parametrize(
    "hint",
    ["Use the service tool, at level 2 with the word xyzzy.", "With 'xyzzy', service and 1, 2, 3."],
)
def test_a_player_that_calls_tools_with_words_of_the_hint_is_tried(shared, hint: str):
    found = verdict(shared, hint, DEPOT)
    assert (found.gate, found.measures) == ("hint_copy", {"hint_copy_win_frac": 1.0}), found
    assert "calling tools" in found.reason
    assert verdict(shared, "Find the box, and release it by the key that you find.", DEPOT).admitted


@pytest.mark.parametrize(
    ("overrides", "gate"),
    [({"solution_seeds": (), "probe_seeds": ()}, "hint_leak"), ({"probe_seeds": ()}, "hint_copy")],
)
def test_a_gate_that_cannot_run_refuses(shared, overrides: dict[str, Any], gate: str):
    found = verdict(shared, GOOD, **overrides)
    assert (found.admitted, found.gate) == (False, gate)


def test_a_program_that_breaks_meanwhile_is_refused(shared):
    broken = LEVERS.replace("return self.order", "return missing")
    assert verdict(shared, GOOD, program=broken).gate == "hint_leak"


def test_a_fault_of_ours_is_not_the_programs(shared, monkeypatch):
    async def open(*_: object) -> Fault:
        return Fault(Outcome.INFRASTRUCTURE, "the zygote died")

    monkeypatch.setattr(shared.pool, "open", open)
    assert verdict(shared, GOOD).gate == "infrastructure"


def test_the_same_hint_gives_the_same_verdict(shared):
    async def elsewhere() -> Verdict:
        async with Pool(Limits(max_workers=1, instances_per_worker=2)) as pool:
            return await admit_hint(
                pool,
                SHORT,
                "amber is one of four",
                solution_seeds=range(4),
                probe_seeds=range(100, 110),
                max_probe_win_frac=1.0,
                max_turns=3,
                rng_seed=0,
                max_words=40,
            )

    found = verdict(shared, "amber is one of four", SHORT, max_probe_win_frac=1.0, max_turns=3)
    assert found == shared.run(elsewhere())
