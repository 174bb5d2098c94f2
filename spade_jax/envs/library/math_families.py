"""Two families of Mathematical Reasoning: hidden multiples, and a total with hidden amounts.

Dials: every secret is a multiple of one constant. The hint tells it; without it the search is
often too slow.
Tally: terms take hidden amounts off a number and one of them spoils the work. The hint tells which.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms

SKILL = "Mathematical Reasoning"

DIALS = Template("""import random

class DialEnv:
    ITEMS = $items
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
$secret        self.stage = 0
        self.turn = 0
        return f"Tune dials {', '.join(self.ITEMS)} to hidden values 1 to $top in turn, then lock. Act like: $example.", {}

    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
        if self.stage == 2 and action == "lock":
            return "You win.", 1.0, True, False, {}
        name, _, value = action.partition(" ")
        if self.stage == 2 or name != self.ITEMS[self.stage] or not value.isdecimal():
            return "Unknown action.", 0.0, False, over, {}
        goal = self.goal[self.stage]
        if int(value) == goal:
            self.stage += 1
            return f"{name} is set.", $gain, False, over, {}
$reply
    def solution(self):
$plan
""")  # noqa: E501

TALLY = Template("""import random

class TallyEnv:
    TAKES = $takes
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
$plan        self.goal = sum(self.TAKES[name] for name in self.plan)
        self.left = self.goal
        self.turn = 0
        return f"Bring {self.goal} to 0 with {', '.join(self.TAKES)}, then say done. Act like: $first.", {}

    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
        if action == "done":
$done
        if action not in self.TAKES:
            return "Unknown action.", 0.0, False, over, {}
        self.left -= self.TAKES[action]
$below        return f"{self.left} left.", $gain, False, over, {}

    def solution(self):
        return self.plan + ["done"]
""")  # noqa: E501


class DialPlayer:
    """Halves the range of one dial after the other, hinted over multiples of the step alone."""

    def __init__(self, step: int, hinted: bool, rng: random.Random) -> None:
        self.step = step if hinted else 1
        self.names: list[str] = []
        self.low, self.high = 1, 0
        self.top = 0

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"dials (.+) to hidden values 1 to (\d+)", observation):
            self.names = start[1].split(", ")
            self.top = int(start[2])
            self.low, self.high = 1, self.top
        elif observation.endswith("is set."):
            self.names = self.names[1:]
            self.low, self.high = 1, self.top
        elif reply := re.search(r"(\d+) is too (low|high)", observation):
            if reply[2] == "low":
                self.low = int(reply[1]) + 1
            else:
                self.high = int(reply[1]) - 1
        if not self.names:
            return "all dials are set, lock.", "lock"
        values = [value for value in range(self.low, self.high + 1) if value % self.step == 0]
        guess = values[len(values) // 2]
        return (
            f"{self.names[0]} is {self.low} to {self.high}, try {guess}.",
            f"{self.names[0]} {guess}",
        )


class TallyPlayer:
    """Takes the largest amount that leaves a payable rest; unhinted it tries terms to "
    "learn theirs."""

    def __init__(self, takes: dict[str, int | None], hinted: bool, rng: random.Random) -> None:
        self.rng = rng
        self.takes: dict[str, int | None] = dict(takes) if hinted else {}  # None: spoils the work
        self.unknown: list[str] = []
        self.left = self.start = 0
        self.last = ""

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"Bring (\d+) to 0 with (.+), then say done", observation):
            self.start = self.left = int(start[1])
            self.unknown = [name for name in start[2].split(", ") if name not in self.takes]
        elif reply := re.search(r"(\d+) left", observation):
            self._learn(int(reply[1]))
        if self.left == 0:
            return "nothing is left, finish.", self._choose("done")
        amounts = [amount for amount in self.takes.values() if amount]
        for name, amount in sorted(self.takes.items(), key=lambda item: -(item[1] or 0)):
            if amount and _payable(self.left - amount, amounts):
                return f"{self.left} left, take {amount}.", self._choose(name)
        if self.unknown:
            name = self.rng.choice(self.unknown)
            return f"the amount of {name} is unknown, try it.", self._choose(name)
        return "these amounts do not fit, go back.", self._choose(self._spoiler())

    def _choose(self, name: str) -> str:
        self.last = name
        return name

    def _learn(self, left: int) -> None:
        if self.last in self.unknown:
            self.unknown.remove(self.last)
            self.takes[self.last] = self.left - left if left < self.left else None
        self.left = left

    def _spoiler(self) -> str:
        return next(
            (name for name, amount in self.takes.items() if amount is None), next(iter(self.takes))
        )


def _payable(rest: int, amounts: Sequence[int]) -> bool:
    return rest == 0 or (rest > 0 and any(_payable(rest - amount, amounts) for amount in amounts))


def draw_dials(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a DialEnv: two dials named by terms, each hiding one of a few multiples of a step."""
    items = pick_terms(rng, terms, 2)
    step = rng.randint(3, 4) + (difficulty == "hard" and rng.random() < 0.5)
    count = 7
    loop, chain, pay, listed = (rng.random() < 0.5 for _ in range(4))
    secret = (
        "        self.goal = []\n        for _ in self.ITEMS:\n"
        f"            self.goal.append({step} * rng.randint(1, {count}))\n"
        if loop
        else f"        self.goal = [{step} * rng.randint(1, {count}) for _ in self.ITEMS]\n"
    )
    gain = "0.2 * self.stage" if pay else "0.0"
    reply = (
        '        word = "low"\n        if int(value) > goal:\n            word = "high"\n'
        if chain
        else '        word = "low" if int(value) < goal else "high"\n'
    )
    reply += f'        return f"{{action}} is too {{word}}.", {gain}, False, over, {{}}\n'
    plan = (
        '        return [f"{name} {goal}" for name, goal in zip(self.ITEMS, self.goal)] + ["lock"]'
        if listed
        else f'        return [f"{items[0]} {{self.goal[0]}}", f"{items[1]} '
        f'{{self.goal[1]}}", "lock"]'
    )
    program = DIALS.substitute(
        items=json.dumps(items),
        limit=8,
        secret=secret,
        top=step * count,
        example=f"{items[0]} {rng.randint(1, step * count)}",
        gain=gain,
        reply=reply,
        plan=plan,
    )
    hint = (
        f"Both {items[0]} and {items[1]} hide a multiple of {step}, so halve the range "
        f"over multiples of {step} only."
    )
    return Draw("dials", SKILL, program, hint, partial(DialPlayer, step))


def draw_tally(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a TallyEnv: two terms take different amounts, a third spoils the work."""
    items = pick_terms(rng, terms, 3)
    big, small, trap = rng.sample(items, 3)
    amounts = {big: rng.randint(5, 9), small: rng.randint(2, 4)}
    size = by_difficulty(difficulty, 6, 6, 7)
    loop, bust, back, pay, early = (rng.random() < 0.5 for _ in range(5))
    good = json.dumps([name for name in items if name != trap])
    takes = {name: amounts.get(name, -rng.randint(2, 5) if back else 0) for name in items}
    plan = (
        f"        self.plan = []\n        for _ in range(rng.randint({size - 1}, {size})):\n"
        f"            self.plan.append(rng.choice({good}))\n"
        if loop
        else f"        self.plan = rng.choices({good}, k=rng.randint({size - 1}, {size}))\n"
    )
    done = (
        '            if self.left == 0:\n                return "You win.", 1.0, True, False, {}\n'
        '            return "Not 0, you lose.", 0.0, True, False, {}'
        if early
        else '            return f"Ended with {self.left} left.", float(self.left == 0), '
        "True, False, {}"
    )
    spoil = f'action == "{trap}"'
    below = (
        ("" if back else f"        if {spoil}:\n            self.left = self.goal\n")
        + "        if self.left < 0:\n"
        '            return "Too far, you lose.", 0.0, True, False, {}\n'
        if bust
        else f"        if self.left < 0{'' if back else f' or {spoil}'}:\n"
        f"            self.left = self.goal\n"
    )
    program = TALLY.substitute(
        takes=json.dumps(takes),
        limit=size + 2,
        plan=plan,
        first=rng.choice(items),
        done=done,
        below=below,
        gain="0.2 * (self.left == 0)" if pay else "0.0",
    )
    ruin = "adds to it" if back else "starts over"
    hint = (
        f"{big} takes {amounts[big]} and {small} takes {amounts[small]}, but {trap} "
        f"{ruin}; land on 0 exactly."
    )
    return Draw("tally", SKILL, program, hint, partial(TallyPlayer, {**amounts, trap: None}))


FAMILIES: tuple[Family, ...] = (
    Family("dials", SKILL, "DialEnv", draw_dials),
    Family("tally", SKILL, "TallyEnv", draw_tally),
)
