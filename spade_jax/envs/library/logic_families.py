"""Two families of Logical Deduction: guides of whom one kind lies, and a code found from a count.

Guides: each room a guide names a door; a liar names the one before the right one.
The hint tells who lies.
Slots: the reply counts the slots that are right. The hint tells a rule that every code obeys.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms

SKILL = "Logical Deduction"

GUIDES = Template("""import random

class GuideEnv:
    DOORS = $doors
    GUIDES = $guides
    $liar_name = $liar
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
$rooms        self.room = 0
        self.turn = 0
        return f"Pass $need rooms by naming doors: {', '.join(self.DOORS)}. Act like: $example. {self.look()}", {}

    def look(self):
        guide = self.guide[self.room]
        spot = self.DOORS.index(self.goal[self.room]) - (guide $test)
        return f"Room {self.room + 1}: {guide} says {self.DOORS[spot]}."

    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
$body        if self.room == $need:
            return "You win.", 1.0, True, False, {}
        return f"Right. {self.look()}", $reward, False, over, {}

    def solution(self):
        return self.goal
""")  # noqa: E501

SLOTS = Template("""import random

class SlotEnv:
    ITEMS = $items
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
$code        self.row = ["none"] * 3
        self.turn = 0
        return f"Fill slots 1 to 3 from {', '.join(self.ITEMS)}, then say open. Act like: $slot {self.ITEMS[$first]}.", {}

    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
        if action == "open":
            if self.row == self.code:
                return "You win.", 1.0, True, False, {}
$wrong
        words = action.split()
        if len(words) == 2 and words[0] in ("1", "2", "3") and words[1] in self.ITEMS:
            self.row[int(words[0]) - 1] = words[1]
$count$last
    def solution(self):
        return [f"{i + 1} {self.code[i]}" for i in range(3)] + ["open"]
""")  # noqa: E501

ANIMALS = ("owl", "fox", "crow", "hare", "wolf", "toad")


class GuidePlayer:
    """Takes an honest guide's door and the one after a liar's; unhinted it finds out who lies."""

    def __init__(self, liars: Sequence[str], hinted: bool, rng: random.Random) -> None:
        self.rng = rng
        self.liars = list(liars)
        self.hinted = hinted
        self.trust: dict[str, bool] = {}
        self.doors: list[str] = []
        self.last = ("", "", "")

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"naming doors: ([^.]+)\.", observation):
            self.doors = start[1].split(", ")
        else:
            self._learn("Right" in observation)
        said = re.search(r"Room \d+: (\w+) says (\w+)\.", observation)
        guide, door = said.groups() if said else ("", "")
        after = self.doors[(self.doors.index(door) + 1) % len(self.doors)]
        if self.hinted:
            honest = guide not in self.liars
        else:
            honest = self.trust.get(guide, self.rng.random() < 0.5)
        action = door if honest else after
        self.last = (guide, door, action)
        if honest:
            return f"{guide} is honest, take {action}.", action
        return f"{guide} lies, after {door} comes {action}.", action

    def _learn(self, right: bool) -> None:
        guide, door, action = self.last
        self.trust[guide] = (action == door) == right


class SlotPlayer:
    """Fills slots in turn and keeps what raises the count; hinted it leaves out the forbidden."""

    def __init__(self, decoy: str | None, hinted: bool, rng: random.Random) -> None:
        self.decoy = decoy
        self.hinted = hinted
        self.items: list[str] = []
        self.options: list[str] = []
        self.code: list[str] = []
        self.right = 0
        self.last = ""

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"from (.+), then say open", observation):
            self.items = start[1].split(", ")
            self.options = self._allowed()
        elif reply := re.search(r"(\d) right", observation):
            gained = int(reply[1]) > self.right
            self.right = int(reply[1])
            if gained:
                self.code.append(self.last)
                self.options = self._allowed()
        if len(self.code) == 3:
            return "all 3 are right, open it.", "open"
        self.last = self.options.pop(0) if self.options else self.items[0]
        slot = len(self.code) + 1
        return f"{self.right} right, slot {slot} may be {self.last}.", f"{slot} {self.last}"

    def _allowed(self) -> list[str]:
        if not self.hinted:
            return list(self.items)
        if self.decoy is None:
            return [item for item in self.items if item not in self.code]
        return [item for item in self.items if item != self.decoy]


def draw_guides(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a GuideEnv: three or four doors named by terms, two or three guides."""
    doors = pick_terms(rng, terms, 4 if difficulty != "easy" and len(set(terms)) > 3 else 3)
    guides = rng.sample(ANIMALS, by_difficulty(difficulty, 2, 2, 3))
    need = 5
    lose, several, whole, pay, guard = (rng.random() < 0.5 for _ in range(5))
    liars = rng.sample(guides, len(guides) - 1) if several else rng.sample(guides, 1)
    guard = guard or not lose
    limit = need + (0 if lose else 2)
    draws = f"rng.sample(self.DOORS, 3) + rng.sample(self.DOORS, {need - 3})"
    rooms = (
        f"        self.goal = {draws}\n        self.guide = rng.choices(self.GUIDES, k={need})\n"
        if whole
        else f"        self.goal = {draws}\n"
        f"        self.guide = [rng.choice(self.GUIDES) for _ in self.goal]\n"
    )
    reward = "0.05 * self.room" if pay else "0.0"
    wrong = (
        '            return "Wrong, you lose.", 0.0, True, False, {}\n'
        if lose
        else "            self.room = 0\n"
        '            return f"Wrong, start again. {self.look()}", 0.0, False, over, {}\n'
    )
    body = (
        "        if action != self.goal[self.room]:\n" + wrong + "        self.room += 1\n"
        if guard
        else "        if action == self.goal[self.room]:\n            self.room += 1\n"
        "        else:\n" + wrong
    )
    program = GUIDES.substitute(
        doors=json.dumps(doors),
        guides=json.dumps(guides),
        liar_name="LIARS" if several else "LIAR",
        liar=json.dumps(liars if several else liars[0]),
        test="in self.LIARS" if several else "== self.LIAR",
        need=need,
        limit=limit,
        rooms=rooms,
        example=rng.choice(doors),
        body=body,
        reward=reward,
    )
    names = " and ".join(liars)
    hint = (
        f"Only {names} {'lie' if len(liars) > 1 else 'lies'}: then take the door after "
        f"the named one in the list, else trust."
    )
    return Draw("guides", SKILL, program, hint, partial(GuidePlayer, liars))


def draw_slots(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a SlotEnv: three slots filled from three terms under a hidden rule."""
    items = pick_terms(rng, terms, 3)
    limit = by_difficulty(difficulty, 7, 7, 6)
    decoy = rng.choice(items) if rng.random() < 0.5 else None
    lose, loop, pay, inline = (rng.random() < 0.5 for _ in range(4))
    if decoy is None:
        code = (
            "        self.code = list(self.ITEMS)\n        rng.shuffle(self.code)\n"
            if loop
            else "        self.code = rng.sample(self.ITEMS, 3)\n"
        )
        hint = (
            f"No term is used twice: once {items[0]} is placed right, leave it out of "
            f"the other slots."
        )
    else:
        good = [item for item in items if item != decoy]
        code = (
            f"        good = {json.dumps(good)}\n        self.code = []\n"
            f"        for _ in range(3):\n"
            "            self.code.append(rng.choice(good))\n"
            if loop
            else f"        self.code = [rng.choice({json.dumps(good)}) for _ in range(3)]\n"
        )
        hint = (
            f"The term {decoy} is never in the code: try only {good[0]} and {good[1]} "
            f"and watch the count."
        )
    wrong = (
        '            return "Wrong code, you lose.", 0.0, True, False, {}'
        if lose
        else '            return "Wrong code.", 0.0, False, over, {}'
    )
    count = (
        "        right = sum(a == b for a, b in zip(self.row, self.code))\n"
        if inline
        else "        right = 0\n        for i in range(3):\n"
        "            if self.row[i] == self.code[i]:\n"
        "                right += 1\n"
    )
    reward = "0.1 * right" if pay else "0.0"
    last = (
        f"        return f\"{{' '.join(self.row)}}: {{right}} right.\", {reward}, False, "
        f"over, {{}}\n"
    )
    program = SLOTS.substitute(
        items=json.dumps(items),
        limit=limit,
        code=code,
        slot=rng.randint(1, 3),
        first=rng.randrange(3),
        wrong=wrong,
        count=count,
        last=last,
    )
    return Draw("slots", SKILL, program, hint, partial(SlotPlayer, decoy))


FAMILIES: tuple[Family, ...] = (
    Family("guides", SKILL, "GuideEnv", draw_guides),
    Family("slots", SKILL, "SlotEnv", draw_slots),
)
