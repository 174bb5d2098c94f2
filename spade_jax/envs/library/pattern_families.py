"""Two families for "Pattern Recognition": a ring read with a hidden stride, hidden steps to add.

The rule is a constant of the program, so the hint can tell it; the player without the hint has to
find it by being wrong. Draws text and experts only: no program runs here.
"""

import json
import random
import re
from collections.abc import Sequence
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms

SKILL = "Pattern Recognition"

RING = Template("""import random

class RingEnv:
    ITEMS = $items
    STEP = $step
    GOAL = $goal

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.ring = rng.sample(self.ITEMS, len(self.ITEMS))
$start        self.turn = self.score = 0
        return f"Go on {self.GOAL} times$how. Ring: {', '.join(self.ring)}. " + self.look(), {}

    def look(self):
        return f"Score {self.score} of {self.GOAL}. Last: {$last}. Say the next word."

    def step(self, action):
        self.turn += 1
$judge
        if self.score == self.GOAL:
            return "The ring is read.", 1.0, True, False, {}
$end

    def solution(self):
        return $solution
""")

# How the place on the ring is kept: start lines, last word, next word, the move, winning actions.
RING_STATES = {
    "index": (
        "        self.pos = rng.randrange(len(self.ITEMS))\n",
        "self.ring[self.pos]",
        "self.ring[(self.pos + self.STEP) % len(self.ring)]",
        "self.pos = (self.pos + self.STEP) % len(self.ring)",
        "[self.ring[(self.pos + i * self.STEP) % len(self.ring)] for i in range(1, self.GOAL + 1)]",
    ),
    "rotate": (
        "",
        "self.ring[0]",
        "self.ring[self.STEP]",
        "self.ring = self.ring[self.STEP:] + self.ring[:self.STEP]",
        "[self.ring[i * self.STEP % len(self.ring)] for i in range(1, self.GOAL + 1)]",
    ),
    "plan": (
        "        pos = rng.randrange(len(self.ITEMS))\n"
        "        self.plan = [self.ring[(pos + i * self.STEP) % len(self.ring)] "
        "for i in range(self.GOAL + 1)]\n",
        "self.plan[self.score]",
        "self.plan[self.score + 1]",
        "",
        "self.plan[1:]",
    ),
}

SERIES = Template("""import random

class SeriesEnv:
    STEPS = $steps
    GOAL = $goal

    def reset(self, seed=None):
        rng = random.Random(seed)
$draw
        self.num = rng.randint(10, 19)
        self.turn = self.score = 0
        return f"Add the hidden step of the word. Get {self.GOAL} right$how. " + self.look(), {}

    def look(self):
        return f"Score {self.score}. {self.num} with {self.plan[self.turn]}. Say the sum."

    def step(self, action):
        goal = self.num + self.STEPS[self.plan[self.turn]]
        self.turn += 1
$judge
        if self.score == self.GOAL:
            return "Series done.", 1.0, True, False, {}
$end

    def solution(self):
$solution
""")


def _end(limit: int, partial: bool) -> str:
    """The line that ends a turn without a win; `partial` pays up to a half for what is done."""
    reward = "self.score / (2 * self.GOAL)" if partial else "0.0"
    return f"        return text + self.look(), {reward}, False, self.turn >= {limit}, {{}}"


class RingPlayer:
    """Counts words forward from the last one; without the hint it tries the strides from 1 up."""

    def __init__(self, step: int | None) -> None:
        self.step = step or 1
        self.ring: list[str] = []

    def act(self, observation: str) -> tuple[str, str]:
        if found := re.search(r"Ring: ([a-z, ]+)\.", observation):
            self.ring = found[1].split(", ")
        if observation.startswith("Wrong"):
            self.step += 1
        last = re.search(r"Last: ([a-z]+)", observation)
        assert last is not None
        word = self.ring[(self.ring.index(last[1]) + self.step) % len(self.ring)]
        return f"{self.step} after {last[1]} is {word}.", word


def draw_ring(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Words on a ring in an order of the seed, read with a stride of the program."""
    items = pick_terms(rng, terms, min(4, len(set(terms))))
    step = rng.randrange(1, len(items))
    fail = rng.choice(["lose", "zero", "keep"])
    goal = (
        by_difficulty(difficulty, 4, 5, 6) if fail == "lose" else by_difficulty(difficulty, 5, 6, 7)
    )
    start, last, following, move, solution = RING_STATES[rng.choice(list(RING_STATES))]
    if fail == "lose":
        lines = [
            f"if action != {following}:",
            '    return "Wrong, the ring breaks.", 0.0, True, False, {}',
            move,
            "self.score += 1",
            'text = "Right. "',
        ]
    else:
        lines = [
            'text = "Wrong. "',
            f"if action == {following}:",
            "    " + move if move else "",
            "    self.score += 1",
            '    text = "Right. "',
        ]
        if fail == "zero":
            lines += ["else:", "    self.score = 0"]
    program = RING.substitute(
        items=json.dumps(items),
        step=step,
        goal=goal,
        start=start,
        how={"lose": " without a mistake", "zero": " in a row", "keep": ""}[fail],
        last=last,
        judge="\n".join("        " + line for line in lines if line),
        end=_end(goal + 1, partial=rng.random() < 0.5),
        solution=solution,
    )
    hint = rng.choice(
        [
            f"The next word stands {step} after the last one in the ring, wrapping around.",
            f"Count {step} forward in the ring from the last word and start over at the end.",
        ]
    )
    return Draw(
        "ring", SKILL, program, hint, lambda hinted, _: RingPlayer(step if hinted else None)
    )


class SeriesPlayer:
    """Adds the step of the word; without the hint it guesses 3 and learns from the answers."""

    def __init__(self, steps: dict[str, int]) -> None:
        self.steps = dict(steps)
        self.word, self.number = "", 0

    def act(self, observation: str) -> tuple[str, str]:
        if found := re.search(r"It was (\d+)\.", observation):
            self.steps[self.word] = int(found[1]) - self.number
        shown = re.search(r"(\d+) with ([a-z]+)", observation)
        assert shown is not None
        self.number, self.word = int(shown[1]), shown[2]
        step = self.steps.get(self.word, 3)
        return f"{self.word} adds {step}, so {self.number + step}.", str(self.number + step)


def draw_series(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Each word adds its own step; the right sum is shown after every answer."""
    items = pick_terms(rng, terms, rng.choice([2, 3]))
    steps = dict(zip(items, rng.sample(range(2, 7), len(items)), strict=True))
    goal = by_difficulty(difficulty, 4, 5, 6)
    carry, zero = rng.random() < 0.5, rng.random() < 0.5
    limit = goal + len(items) - 1 + zero
    size = limit + 1  # look() also reads the turn after the last answer
    draws = [
        f"        self.plan = [rng.choice(list(self.STEPS)) for i in range({size})]",
        f"        self.plan = rng.choices(list(self.STEPS), k={size})",
    ]
    judge = [
        'text = f"It was {goal}. "',
        "if action == str(goal):",
        "    self.score += 1",
    ]
    if zero:
        judge += ["else:", "    self.score = 0"]
    if carry:
        judge += ["self.num = goal"]
        solution = [
            "num, plan = self.num, []",
            "for word in self.plan[:self.GOAL]:",
            "    num += self.STEPS[word]",
            "    plan.append(str(num))",
            "return plan",
        ]
    else:
        judge += ["self.num += 1"]
        solution = [
            "return [str(self.num + i + self.STEPS[self.plan[i]]) for i in range(self.GOAL)]"
        ]
    program = SERIES.substitute(
        steps=json.dumps(steps),
        goal=goal,
        draw=rng.choice(draws),
        how=" in a row" if zero else "",
        judge="\n".join("        " + line for line in judge),
        end=_end(limit, partial=rng.random() < 0.5),
        solution="\n".join("        " + line for line in solution),
    )
    told = ", ".join(f"{word} adds {step}" for word, step in steps.items())
    hint = f"Each word has a fixed step: {told}. Add it to the number shown."
    return Draw(
        "series", SKILL, program, hint, lambda hinted, _: SeriesPlayer(steps if hinted else {})
    )


FAMILIES: tuple[Family, ...] = (
    Family("ring", SKILL, "RingEnv", draw_ring),
    Family("series", SKILL, "SeriesEnv", draw_series),
)
