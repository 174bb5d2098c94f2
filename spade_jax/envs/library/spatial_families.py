"""Three families of Spatial Reasoning: unlabelled commands, a ring of rooms, mirrored cells.

Rover: the goal is told in the rover's own frame; the hint tells which term walks, turns and digs.
Rooms: a ring of rooms with a known door and a hidden key; the hint tells where the key lies, seen
from the door.
Mirror: two hidden cells of a grid; the hint tells that the second mirrors the first.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms

SKILL = "Spatial Reasoning"

ROVER = Template("""import random

class RoverEnv:
    ITEMS = $items
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
$place        self.turn = 0
        return f"Dig at the goal. Commands: {', '.join(self.ITEMS)}. Act like: {self.ITEMS[$first]}. $start", {}
$look
    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
        if action == "$walk":
            self.ahead -= 1
        elif action == "$turn":
            self.ahead, self.side = $turned
        elif action == "$dig":
            if self.ahead == 0 and self.side == 0:
                return "You win.", 1.0, True, False, {}
$wrong$last
    def solution(self):
$plan
""")  # noqa: E501

ROOMS = Template("""import random

class RoomEnv:
    ROOMS = $rooms
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.ring = rng.sample(self.ROOMS, $size)
        spot = rng.randrange($size)
        self.door = self.room = self.ring[spot]
        self.key = self.ring[$shift]
        self.has = False
        self.turn = 0
        return f"Ring: {', '.join(self.ring)}. Get the hidden key, open the door in {self.door}. Act like: $example, take, open.", {}
$look
    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
        if action in self.ring:
            self.room = action
        elif action == "take" and self.room == self.key:
            self.has = True
        elif action == "open" and self.has and self.room == self.door:
            return "You win.", 1.0, True, False, {}
$wrong$last
    def solution(self):
        return [self.key, "take", self.door, "open"]
""")  # noqa: E501

MIRROR = Template("""import random

class MirrorEnv:
    COLS = $cols
    LIMIT = $limit

    def reset(self, seed=None):
        rng = random.Random(seed)
        x = rng.randrange($width)
        y = rng.randint(1, $rows)
        self.goal = [(x, y), ($second)]
        $begin = 0
        return f"Find 2 cells: columns {', '.join(self.COLS)}, rows 1 to $rows. Act like: $example.", {}

    def step(self, action):
        self.turn += 1
        over = self.turn >= self.LIMIT
        name, _, row = action.partition(" ")
        if name not in self.COLS or not row.isdecimal():
            return "Unknown action.", 0.0, False, over, {}
$offset        if x == y == 0:
$found                return "You win.", 1.0, True, False, {}
            return f"{action} is found.", 0.0, False, over, {}
$hints
    def solution(self):
        return [f"{self.COLS[x]} {y}" for x, y in self.goal]
""")  # noqa: E501


class RoverPlayer:
    """Walks while the goal is ahead, else turns, digs at 0, 0; unhinted it tries unknown "
    "commands to learn them."""

    def __init__(self, walk: str, turn: str, dig: str, hinted: bool, rng: random.Random) -> None:
        self.rng = rng
        self.known = {"walk": walk, "turn": turn, "dig": dig} if hinted else {}
        self.unknown: list[str] = []
        self.place = (0, 0)
        self.last = ""

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"Commands: ([^.]+)\.", observation):
            self.unknown = [
                item for item in start[1].split(", ") if item not in self.known.values()
            ]
        seen = re.search(r"(-?\d+) ahead, (-?\d+) right", observation)
        place = (int(seen[1]), int(seen[2])) if seen else self.place
        if self.last in self.unknown:
            self._learn(place)
        self.place = place
        ahead, side = place
        if ahead == 0 and side == 0:
            return self._use("dig", "at the goal, dig")
        if ahead > 0:
            return self._use("walk", f"{ahead} ahead, walk")
        return self._use("turn", "not ahead, turn")

    def _use(self, deed: str, thought: str) -> tuple[str, str]:
        if deed in self.known:
            self.last = self.known[deed]
            return f"{thought} with {self.last}.", self.last
        self.last = self.rng.choice(self.unknown) if self.unknown else "dig"
        return f"{thought}, maybe {self.last} does it.", self.last

    def _learn(self, place: tuple[int, int]) -> None:
        ahead, side = self.place
        self.unknown.remove(self.last)
        if place == (ahead - 1, side):
            self.known["walk"] = self.last
        elif place in ((side, -ahead), (-side, ahead)):
            self.known["turn"] = self.last
        else:
            self.known["dig"] = self.last
        if len(self.unknown) == 1:
            deed = next(deed for deed in ("walk", "turn", "dig") if deed not in self.known)
            self.known[deed] = self.unknown.pop()


class RoomPlayer:
    """Goes to the key, takes it and goes to the door; unhinted it tries to take in one "
    "room after the other."""

    def __init__(self, shift: int, hinted: bool, rng: random.Random) -> None:
        self.shift = shift
        self.hinted = hinted
        self.rng = rng
        self.rest: list[str] = []
        self.room = self.door = ""

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"Ring: ([^.]+)\. .* door in (\w+)\.", observation):
            ring = start[1].split(", ")
            self.door = start[2]
            key = ring[(ring.index(self.door) + self.shift) % len(ring)]
            self.rest = [key] if self.hinted else [room for room in ring if room != self.door]
            self.rng.shuffle(self.rest)
        if "key True" in observation:
            if self.room == self.door:
                return "at the door with the key, open.", "open"
            self.room = self.door
            return f"have the key, the door is in {self.door}.", self.door
        if self.rest and self.room == self.rest[0]:
            self.rest.pop(0)
            return "try to take the key here.", "take"
        self.room = self.rest[0] if self.rest else self.door
        return f"the key {'is' if self.hinted else 'may be'} in {self.room}, go.", self.room


class MirrorPlayer:
    """Halves the columns and rows that the replies leave; hinted it mirrors the first cell "
    "to get the second."""

    def __init__(self, across: bool, hinted: bool, rng: random.Random) -> None:
        self.across = across
        self.hinted = hinted
        self.names: list[str] = []
        self.rows = 0
        self.cols, self.span = (0, 0), (0, 0)

    def act(self, observation: str) -> tuple[str, str]:
        if start := re.search(r"columns (.+), rows 1 to (\d+)", observation):
            self.names = start[1].split(", ")
            self.rows = int(start[2])
            self._restart()
        elif found := re.search(r"(\w+) (\d+) is found", observation):
            self._restart()
            if self.hinted:
                col = self.names.index(found[1])
                col = len(self.names) - 1 - col if self.across else col
                row = self.rows + 1 - int(found[2])
                return f"the mirror of row {found[2]} is row {row}.", f"{self.names[col]} {row}"
        elif reply := re.search(r"(\w+) (\d+): (.+)\.", observation):
            self._narrow(self.names.index(reply[1]), int(reply[2]), reply[3])
        col = sum(self.cols) // 2
        row = sum(self.span) // 2
        return (
            f"rows {self.span[0]} to {self.span[1]} remain, try {row}.",
            f"{self.names[col]} {row}",
        )

    def _restart(self) -> None:
        self.cols, self.span = (0, len(self.names) - 1), (1, self.rows)

    def _narrow(self, col: int, row: int, words: str) -> None:
        left, right = self.cols
        low, high = self.span
        self.cols = (
            (left, col - 1)
            if "left" in words
            else (col + 1, right)
            if "right" in words
            else (col, col)
        )
        self.span = (
            (low, row - 1)
            if "lower" in words
            else (row + 1, high)
            if "higher" in words
            else (row, row)
        )


def draw_rover(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a RoverEnv: three terms are the commands walk, turn and dig, in an order that "
    "is not told."""
    items = pick_terms(rng, terms, 3)
    walk, turn, dig = rng.sample(items, 3)
    far = by_difficulty(difficulty, 3, 4, 4)
    wide = by_difficulty(difficulty, 2, 2, 3)
    right, lose, helper, pay, loop = (rng.random() < 0.5 for _ in range(5))
    loop = loop and not helper
    sign = "" if right else "-"
    place = (
        f"        self.ahead = rng.randint(1, {far})\n"
        f"        self.side = {sign}rng.randint(1, {wide})\n"
    )
    if not lose:
        place += "        self.start = (self.ahead, self.side)\n"
    look = "{self.ahead} ahead, {self.side} right."
    wrong = (
        '            return "Wrong place, you lose.", 0.0, True, False, {}\n'
        if lose
        else "            self.ahead, self.side = self.start\n"
    )
    shown = "self.look()" if helper else f'f"Goal {look}"'
    gain = "0.2 * (self.side == 0)" if pay else "0.0"
    last = f"        return {shown}, {gain}, False, over, {{}}\n"
    moves = f'["{walk}"] * self.ahead + ["{turn}"] + ["{walk}"] * abs(self.side) + ["{dig}"]'
    plan = (
        f'        plan = ["{walk}"] * self.ahead + ["{turn}"]\n'
        f"        for _ in range(abs(self.side)):\n"
        f'            plan.append("{walk}")\n        return plan + ["{dig}"]'
        if loop
        else f"        return {moves}"
    )
    program = ROVER.substitute(
        items=json.dumps(items),
        limit=far + wide + 3,
        place=place,
        first=rng.randrange(3),
        start="{self.look()}" if helper else f"Goal {look}",
        look=f'\n    def look(self):\n        return f"Goal {look}"\n' if helper else "",
        walk=walk,
        turn=turn,
        dig=dig,
        turned="self.side, -self.ahead" if right else "-self.side, self.ahead",
        wrong=wrong,
        last=last,
        plan=plan,
    )
    hint = (
        f"{walk} walks ahead, {turn} turns {'right' if right else 'left'}, {dig} digs; "
        f"dig only at 0 ahead, 0 right."
    )
    return Draw("rover", SKILL, program, hint, partial(RoverPlayer, walk, turn, dig))


def draw_rooms(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a RoomEnv: a shuffled ring of rooms named by terms, the key a fixed number of "
    "rooms from the door."""
    rooms = pick_terms(rng, terms, 4 if len(set(terms)) > 3 else 3)
    if len(rooms) == 3 or difficulty == "hard":
        rooms.insert(rng.randrange(len(rooms) + 1), "hall")
    size = len(rooms)
    back, lose, helper, pay, guard = (rng.random() < 0.5 for _ in range(5))
    guard = guard and not helper
    step = rng.randint(1, 2)
    here = "In {self.room}, key {self.has}."
    wrong = (
        '        elif action == "take":\n'
        '            return "Trapped, you lose.", 0.0, True, False, {}\n'
        if lose
        else ""
    )
    if guard:
        wrong += '        else:\n            return "No effect.", 0.0, False, over, {}\n'
    gain = "0.2 * self.has" if pay else "0.0"
    last = (
        f"        return self.look(), {gain}, False, over, {{}}\n"
        if helper
        else f'        return f"{here}", {gain}, False, over, {{}}\n'
    )
    program = ROOMS.substitute(
        rooms=json.dumps(rooms),
        limit=6,
        size=size,
        shift=f"spot - {step}" if back else f"(spot + {step}) % {size}",
        example=rng.choice(rooms),
        look=f'\n    def look(self):\n        return f"{here}"\n' if helper else "",
        wrong=wrong,
        last=last,
    )
    count = "1 room" if step == 1 else "2 rooms"
    hint = (
        f"The key lies {count} {'before' if back else 'after'} the door in the ring, "
        f"which closes on itself; take it there."
    )
    return Draw("rooms", SKILL, program, hint, partial(RoomPlayer, -step if back else step))


def draw_mirror(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Draw a MirrorEnv: columns named by terms, the second cell mirrors the first."""
    cols = pick_terms(rng, terms, 3)
    rows = 8  # even: with a middle row, a cell could be its own mirror
    across, chain, count, split, short = (rng.random() < 0.5 for _ in range(5))
    spot = "self.found" if count else "0"
    split = split and not count
    offset = (
        f"        x = self.COLS.index(name) - self.goal[{spot}][0]\n"
        f"        y = int(row) - self.goal[{spot}][1]\n"
        if split
        else f"        x, y = self.goal[{spot}]\n        x -= self.COLS.index(name)\n"
        f"        y -= int(row)\n"
    )
    less = ">" if split else "<"
    sides = ("right", "left") if split else ("left", "right")
    rises = ("higher", "lower") if split else ("lower", "higher")
    hints = (
        f'        side = "left" if x {less} 0 else "right" if x else "same"\n'
        f'        rise = "lower" if y {less} 0 else "higher" if y else "same"\n'
        if chain
        else f'        side = ["{sides[0]}", "same", "{sides[1]}"][(x > 0) - (x < 0) + 1]\n'
        f'        rise = ["{rises[0]}", "same", "{rises[1]}"][(y > 0) - (y < 0) + 1]\n'
    )
    gain = "0.2 * self.found" if count else "0.0"
    found = (
        "            self.found += 1\n            if self.found == 2:\n"
        if count
        else "            self.goal.pop(0)\n            if not self.goal:\n"
    )
    hints += f'        return f"{{action}}: go {{side}}, {{rise}}.", {gain}, False, over, {{}}\n'
    program = MIRROR.substitute(
        cols=json.dumps(cols),
        limit=4 if short and difficulty == "hard" else 5,
        width=len(cols),
        rows=rows,
        second=f"{len(cols) - 1} - x, {rows + 1} - y" if across else f"x, {rows + 1} - y",
        example=f"{rng.choice(cols)} {rng.randint(1, rows)}",
        begin="self.found = self.turn" if count else "self.turn",
        found=found,
        offset=offset,
        hints=hints,
    )
    side = "the mirrored column" if across else "the same column"
    hint = (
        f"The second cell mirrors the first: {side}, and its row is {rows + 1} minus the "
        f"row of the first."
    )
    return Draw("mirror", SKILL, program, hint, partial(MirrorPlayer, across))


FAMILIES: tuple[Family, ...] = (
    Family("rover", SKILL, "RoverEnv", draw_rover),
    Family("rooms", SKILL, "RoomEnv", draw_rooms),
    Family("mirror", SKILL, "MirrorEnv", draw_mirror),
)
