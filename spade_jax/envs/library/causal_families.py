"""Three families for "Causal Inference": causes of lights, a fault that moves on, stages to warm.

The causal law (links, shift, needs) is a constant of the program, so the hint can tell it; the
player without the hint learns it from what its own actions bring about. Draws text and experts
only: no program runs here.
"""

import json
import random
import re
from collections.abc import Sequence
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms

SKILL = "Causal Inference"
LIGHTS = ["red", "blue", "green", "white"]
TIMES = {1: "once", 2: "twice", 3: "three times"}

SIGNAL = Template("""import random

class SignalEnv:
    $links
    GOAL = $goal

    def reset(self, seed=None):
        rng = random.Random(seed)
$draw
        self.turn = self.score = 0
        return f"Make {self.GOAL} wanted lights$how. Causes: $listing. " + self.look(), {}

    def look(self):
        return f"Score {self.score}. Wanted: {self.plan[self.$at]}. Say a cause."

    def step(self, action):
        goal = self.plan[self.$at]
        self.turn += 1
$judge
        if self.score == self.GOAL:
            return "All signals given.", 1.0, True, False, {}
$end

    def solution(self):
$solution
""")

FAULT = Template("""import random

class FaultEnv:
    PARTS = $parts
    SHIFT = $shift
    GOAL = $goal

    def reset(self, seed=None):
        rng = random.Random(seed)
$draw
        self.turn = self.score = 0
        return f"Fix {self.GOAL} faults in {', '.join(self.line)}. Say test or fix and a part.", {}

    def step(self, action):
        self.turn += 1
        if action[:5] == "test ":
$test
$judge
        if self.score == self.GOAL:
            return "The line runs.", 1.0, True, False, {}
$end

    def solution(self):
        return $solution
""")

WARM = Template("""import random

class WarmEnv:
$need

    def reset(self, seed=None):
        rng = random.Random(seed)
$draw
        self.turn = self.pos = 0
        return f"Heat each stage enough, in order: {', '.join(self.order)}. Say a stage.", {}

    def step(self, action):
        self.turn += 1
        stage = self.plan[self.pos]
$judge
        if self.pos == len(self.plan):
            return "The machine runs.", 1.0, True, False, {}
$end

    def solution(self):
        return $solution
""")


def _end(text: str, limit: int, reward: str) -> str:
    """The line that ends a turn without a win."""
    return f"        return {text}, {reward}, False, self.turn >= {limit}, {{}}"


def _indent(lines: Sequence[str]) -> str:
    return "\n".join("        " + line for line in lines)


class SignalPlayer:
    """Uses the cause of the wanted light, or else the first cause it has not seen at work."""

    def __init__(self, links: dict[str, str]) -> None:
        self.links = dict(links)
        self.causes: list[str] = []
        self.action = ""

    def act(self, observation: str) -> tuple[str, str]:
        if found := re.search(r"Causes: ([a-z, ]+)\.", observation):
            self.causes = found[1].split(", ")
        if found := re.search(r"made (\w+)\.", observation):
            self.links[self.action] = found[1]
        wanted = re.search(r"Wanted: (\w+)", observation)
        assert wanted is not None
        for cause, light in self.links.items():
            if light == wanted[1]:
                self.action = cause
                return f"{cause} makes {light}.", cause
        self.action = next(cause for cause in self.causes if cause not in self.links)
        return f"{self.action} is not known, try it.", self.action


def draw_signal(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Each cause makes one light; wanted lights follow one another."""
    causes = pick_terms(rng, terms, rng.choice([3, min(4, len(set(terms)))]))
    count = len(causes)
    links = dict(zip(causes, rng.sample(LIGHTS, count), strict=True))
    zero, wait, table = (rng.random() < 0.5 for _ in range(3))
    goal = by_difficulty(difficulty, 5, 5, 6) + (not zero or count == 3)
    limit = goal + (1 if count == 3 else 2)
    listing = "{', '.join(self.LINKS)}" if table else "{', '.join(self.CAUSES)}"
    lights = "list(self.LINKS.values())" if table else "self.LIGHTS"
    if table:
        constants = f"LINKS = {json.dumps(links)}"
        made = ['made = self.LINKS.get(action, "nothing")']
        solution = [
            "names = {light: name for name, light in self.LINKS.items()}",
            "return [names[light] for light in self.plan[:self.GOAL]]",
        ]
    else:
        constants = (
            f"CAUSES = {json.dumps(causes)}\n    LIGHTS = {json.dumps(list(links.values()))}"
        )
        made = [
            'made = "nothing"',
            "if action in self.CAUSES:",
            "    made = self.LIGHTS[self.CAUSES.index(action)]",
        ]
        solution = [
            "return [self.CAUSES[self.LIGHTS.index(x)] for x in self.plan[:self.GOAL]]",
        ]
    judge = [*made, 'text = f"That made {made}. "', "if made == goal:", "    self.score += 1"]
    if zero:
        judge += ["else:", "    self.score = 0"]
    elif rng.random() < 0.5:
        judge += ["elif self.score:", "    self.score -= 1"]
    draws = [
        [f"self.plan = [rng.choice({lights}) for i in range({limit + 1})]"],
        [f"self.plan = rng.choices({lights}, k={limit + 1})"],
    ]
    program = SIGNAL.substitute(
        links=constants,
        goal=goal,
        draw=_indent(rng.choice(draws)),
        how=" in a row" if zero else "",
        listing=listing,
        at="score" if wait and not zero else "turn",
        judge=_indent(judge),
        end=_end("text + self.look()", limit, rng.choice(["0.0", "self.score / (2 * self.GOAL)"])),
        solution=_indent(solution),
    )
    told = ", ".join(f"{cause} makes {light}" for cause, light in links.items())
    return Draw(
        "signal",
        SKILL,
        program,
        f"Fire the cause of the wanted light: {told}.",
        lambda hinted, _: SignalPlayer(links if hinted else {}),
    )


class FaultPlayer:
    """Halves the line with tests; once it knows the shift, it fixes that far on from the last."""

    def __init__(self, shift: int | None) -> None:
        self.shift = shift
        self.line: list[str] = []
        self.low, self.high = 0, 0  # the fault is at one of the parts low .. high
        self.fixed: list[int] = []
        self.spot = 0

    def act(self, observation: str) -> tuple[str, str]:
        if found := re.search(r"faults in ([a-z, ]+)\.", observation):
            self.line = found[1].split(", ")
            self.high = len(self.line) - 1
        elif "fixed" in observation:
            self._repaired()
        elif "good" in observation:
            self.low = self.spot + 1
        elif "bad" in observation:
            self.high = self.spot
        if self.low == self.high:
            self.spot = self.low
            part = self.line[self.spot]
            return f"the fault must be at {part}.", f"fix {part}"
        self.spot = (self.low + self.high) // 2
        part = self.line[self.spot]
        return (
            f"between {self.line[self.low]} and {self.line[self.high]}, test {part}.",
            f"test {part}",
        )

    def _repaired(self) -> None:
        count = len(self.line)
        if self.fixed and self.shift is None:
            self.shift = (self.spot - self.fixed[-1]) % count
        self.fixed.append(self.spot)
        if self.shift is None:
            self.low, self.high = 0, count - 1
        else:
            self.low = self.high = (self.spot + self.shift) % count


def draw_fault(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """A part behind the fault tests bad; every repair moves the fault on by a fixed shift."""
    parts = pick_terms(rng, terms, min(4, len(set(terms))))
    count = len(parts)
    shift = rng.randrange(1, count)
    goal = 5 if count == 4 else 6
    limit = goal + (rng.choice([3, 4]) if count == 4 and difficulty != "hard" else 3)
    if rng.random() < 0.5:
        draw = [
            f"pos = rng.randrange({count})",
            f"self.plan = [self.line[(pos + i * self.SHIFT) % {count}] for i in range(self.GOAL)]",
        ]
        fault, move = "self.plan[self.score]", []
        behind = "self.line.index(self.plan[self.score])"
        solution = '["fix " + part for part in self.plan]'
        fail = rng.choice(["lose", "slow"])  # repairs cannot be lost: the plan must not start again
    else:
        draw = [f"self.pos = rng.randrange({count})"]
        fault, behind = "self.line[self.pos]", "self.pos"
        move = [f"    self.pos = (self.pos + self.SHIFT) % {count}"]
        solution = (
            f'["fix " + self.line[(self.pos + i * self.SHIFT) % {count}] for i in range(self.GOAL)]'
        )
        fail = rng.choice(["lose", "zero", "slow"])
    if rng.random() < 0.5:
        test = [
            f"    bad = action[5:] in self.line[{behind}:]",
            "    text = f\"The test is {'bad' if bad else 'good'}.\"",
        ]
    else:
        test = [
            '    text = "The test is good."',
            f"    if action[5:] in self.line[{behind}:]:",
            '        text = "The test is bad."',
        ]
    judge = [
        f'elif action == "fix " + {fault}:',
        *move,
        "    self.score += 1",
        '    text = "It is fixed, the fault moved."',
        "else:",
    ]
    judge += {
        "lose": ['    return "That was fine, you lose.", 0.0, True, False, {}'],
        "zero": ["    self.score = 0", '    text = "That was fine, all repairs are lost."'],
        "slow": ["    self.turn += 2", '    text = "That was fine, time is lost."'],
    }[fail]
    program = FAULT.substitute(
        parts=json.dumps(parts),
        shift=shift,
        goal=goal,
        draw=_indent([f"self.line = rng.sample(self.PARTS, {count})", *draw]),
        test=_indent(test),
        judge=_indent(judge),
        end=_end("text", limit, rng.choice(["0.0", "self.score / (2 * self.GOAL)"])),
        solution=solution,
    )
    places = "1 place" if shift == 1 else f"{shift} places"
    hint = (
        "Parts from the fault on test bad. "
        f"After each repair the fault moves {places} on along the line, wrapping around."
    )
    return Draw(
        "fault", SKILL, program, hint, lambda hinted, _: FaultPlayer(shift if hinted else None)
    )


class WarmPlayer:
    """Heats a stage as often as it needs; without the hint twice, unless told what is next."""

    def __init__(self, need: dict[str, int]) -> None:
        self.need = dict(need)
        self.order: list[str] = []
        self.pos, self.heat = 0, 0
        self.action = ""

    def act(self, observation: str) -> tuple[str, str]:
        if found := re.search(r"order: ([a-z, ]+)\.", observation):
            self.order = found[1].split(", ")
        elif "is warmer" in observation:
            if self.order[self.pos] != self.action:
                self.pos, self.heat = self.pos + 1, 0
            self.heat += 1
        elif found := re.search(r"([a-z]+) is next", observation):
            self.need[self.order[self.pos]] = self.heat + (found[1] == self.order[self.pos])
            return self._press(found[1], "is next")
        stage = self.order[self.pos]
        if self.heat >= self.need.get(stage, 2) and self.pos + 1 < len(self.order):
            return self._press(self.order[self.pos + 1], f"comes, {stage} has {self.heat}")
        return self._press(stage, f"needs more than {self.heat}")

    def _press(self, stage: str, reason: str) -> tuple[str, str]:
        self.action = stage
        return f"{stage} {reason}.", stage


def draw_warm(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Stages in an order of the seed; each must have all its heat before the next takes any."""
    stages = pick_terms(rng, terms, 3)
    total = by_difficulty(difficulty, 6, 6, 7)
    need = [rng.randint(1, 3) for _ in stages]
    while sum(need) != total:
        need = [rng.randint(1, 3) for _ in stages]
    table = rng.random() < 0.5
    if table:
        constants = f"    NEED = {json.dumps(dict(zip(stages, need, strict=True)))}"
        draw = ["self.order = rng.sample(list(self.NEED), 3)"]
        count = "self.NEED[x]"
    else:
        constants = f"    STAGES = {json.dumps(stages)}\n    NEED = {json.dumps(need)}"
        draw = ["self.order = rng.sample(self.STAGES, 3)"]
        count = "self.NEED[self.STAGES.index(x)]"
    draw += rng.choice(
        [
            [f"self.plan = [x for x in self.order for i in range({count})]"],
            ["self.plan = []", "for x in self.order:", f"    self.plan += [x] * {count}"],
        ]
    )
    if rng.random() < 0.4:
        judge = [
            "if action != stage:",
            '    return "The machine jams.", 0.0, True, False, {}',
            "self.pos += 1",
            'text = stage + " is warmer."',
        ]
    else:
        judge = ["if action == stage:", "    self.pos += 1", '    text = stage + " is warmer."']
        judge += ["else:", '    text = f"No, {stage} is next."']
    limit = total + 1
    program = WARM.substitute(
        need=constants,
        draw=_indent(draw),
        judge=_indent(judge),
        end=_end("text", limit, rng.choice(["0.0", "self.pos / 20"])),
        solution=rng.choice(["self.plan", "list(self.plan)"]),
    )
    told = ", ".join(f"{stage} {TIMES[times]}" for stage, times in zip(stages, need, strict=True))
    hint = f"Keep to the order shown and heat {told} before you go on."
    return Draw(
        "warm",
        SKILL,
        program,
        hint,
        lambda hinted, _: WarmPlayer(dict(zip(stages, need, strict=True)) if hinted else {}),
    )


FAMILIES: tuple[Family, ...] = (
    Family("signal", SKILL, "SignalEnv", draw_signal),
    Family("fault", SKILL, "FaultEnv", draw_fault),
    Family("warm", SKILL, "WarmEnv", draw_warm),
)
