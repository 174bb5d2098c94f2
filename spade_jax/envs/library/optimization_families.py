"""Two families for "Optimization": buy the good whose price rank pays, tune knobs by narrowing.

What pays (the rank, the gap between best settings) is a constant of the program, so the hint can
tell it; without the hint it costs days or trials to find. Draws text and experts only: no program
runs here.
"""

import json
import random
import re
from collections.abc import Sequence
from string import Template

from spade_jax.envs.library.base import Draw, Family, by_difficulty, pick_terms

SKILL = "Optimization"

MARKET = Template("""import random

class MarketEnv:
    GOODS = $goods
    RANK = $rank
    GOAL = $goal

    def reset(self, seed=None):
        rng = random.Random(seed)
        self.days = [rng.sample(range(1, 10), len(self.GOODS)) for i in range($days)]
        $plan
        self.turn = self.cash = 0
        return f"Earn {self.GOAL} coins$how. Buy one good a day by name. " + self.look(), {}

    def look(self):
        prices = ", ".join(f"{a} {b}" for a, b in zip(self.GOODS, self.days[self.turn]))
        return f"Cash {self.cash}. Prices: {prices}."

    def step(self, action):
        good = self.plan[self.turn]
        self.turn += 1
$judge
        if self.cash == self.GOAL:
            return "Rich enough.", 1.0, True, False, {}
        return text + self.look(), $reward, False, self.turn >= $limit, {}

    def solution(self):
        return self.plan[:self.GOAL]
""")

# Ways to list the good that pays each day.
MARKET_PLANS = [
    "self.plan = [self.GOODS[day.index(sorted(day)[self.RANK])] for day in self.days]",
    "self.plan = [sorted(zip(day, self.GOODS))[self.RANK][1] for day in self.days]",
    "self.plan = []\n        for day in self.days:\n"
    "            self.plan.append(sorted(zip(day, self.GOODS))[self.RANK][1])",
]

TUNE = Template("""import random

class TuneEnv:
    KNOBS = $knobs
    $gap

    def reset(self, seed=None):
        rng = random.Random(seed)
        low = rng.randint(0, 9)
        num = low + rng.randint(1, 15)
        self.best = $best
        self.turn = self.pos = 0
        self.low, self.high = low, low + 16
        return "Set each knob to its best number in few turns. " + self.look(), {}

    def look(self):
        return f"{self.KNOBS[self.pos]}: over {self.low}, under {self.high}. Say a number."

    def step(self, action):
        self.turn += 1
        best = self.best[self.pos]
        num = int(action[:3]) if action.isdecimal() else 0
        if num == best:
            self.pos += 1
            self.low, self.high = best, best + $span
$judge
        if self.pos == len(self.KNOBS):
            return "All tuned.", 1.0, True, False, {}
        return self.look(), $reward, False, self.turn >= $limit, {}

    def solution(self):
        return $solution
""")

RANKS = {
    3: ("cheapest", "middle", "dearest"),
    4: ("cheapest", "second cheapest", "second dearest", "dearest"),
}


class MarketPlayer:
    """Buys the good of one price rank; without the hint it tries the ranks from the cheapest up."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank or 0

    def act(self, observation: str) -> tuple[str, str]:
        if observation.startswith("No gain"):
            self.rank += 1
        shown = re.findall(r"([a-z]+) (\d)", observation.partition("Prices: ")[2])
        prices = sorted((int(price), good) for good, price in shown)
        price, good = prices[self.rank % len(prices)]
        return f"{RANKS[len(prices)][self.rank % len(prices)]} is {good} at {price}.", good


def draw_market(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Prices are new each day and all visible; only the good of one price rank pays."""
    goods = pick_terms(rng, terms, rng.choice([3, min(4, len(set(terms)))]))
    count = len(goods)
    rank = rng.randrange(count)
    fail = rng.choice(["bust", "zero", "drain"])
    goal = by_difficulty(difficulty, 5, 6, 7) - (fail == "bust" and count == 4)
    limit = goal + 1
    if fail == "bust":
        judge = [
            "if action != good:",
            '    return "No gain, you are bust.", 0.0, True, False, {}',
            "self.cash += 1",
            'text = "Gain. "',
        ]
    else:
        judge = [
            'text = "No gain. "',
            "if action == good:",
            "    self.cash += 1",
            '    text = "Gain. "',
        ]
        if fail == "zero":
            judge += ["else:", "    self.cash = 0"]
        else:
            judge += ["elif self.cash:", "    self.cash -= 1"]
    program = MARKET.substitute(
        goods=json.dumps(goods),
        rank=rank,
        goal=goal,
        days=limit + 1,
        plan=rng.choice(MARKET_PLANS),
        how={"bust": " without a loss", "zero": " in a row", "drain": ""}[fail],
        judge="\n".join("        " + line for line in judge),
        reward=rng.choice(["0.0", "self.cash / (2 * self.GOAL)"]),
        limit=limit,
    )
    hint = rng.choice(
        [
            f"Only the {RANKS[count][rank]} good of the day pays: compare the prices and buy it.",
            f"Sort the prices of the day and buy the {RANKS[count][rank]} good every time.",
        ]
    )
    return Draw(
        "market", SKILL, program, hint, lambda hinted, _: MarketPlayer(rank if hinted else None)
    )


class TunePlayer:
    """Halves the interval shown; hinted, it adds the known gap for every knob but the first."""

    def __init__(self, gaps: Sequence[int]) -> None:
        self.gaps = list(gaps)
        self.knobs: list[str] = []
        self.best = 0

    def act(self, observation: str) -> tuple[str, str]:
        shown = re.search(r"([a-z]+): over (\d+), under (\d+)", observation)
        assert shown is not None
        knob, low, high = shown[1], int(shown[2]), int(shown[3])
        if knob not in self.knobs:
            self.knobs.append(knob)
            if len(self.knobs) > 1 and len(self.gaps) >= len(self.knobs) - 1:
                num = low + self.gaps[len(self.knobs) - 2]
                return f"{knob} is {num - low} above {low}, so {num}.", str(num)
        num = (low + high) // 2
        return f"Between {low} and {high} lies {num}.", str(num)


def draw_tune(rng: random.Random, terms: Sequence[str], difficulty: str) -> Draw:
    """Each knob has a best number; it lies a fixed gap above that of the knob before."""
    knobs = pick_terms(rng, terms, 3)
    span = by_difficulty(difficulty, 6, 8, 8)
    several = rng.random() < 0.5
    gaps = [rng.randrange(1, span) for _ in range(2)] if several else [rng.randrange(1, span)] * 2
    limit = by_difficulty(difficulty, 8, 7, 7)
    if several:
        gap = f"GAPS = {json.dumps([0, gaps[0], sum(gaps)])}"
        best = ["[num + gap for gap in self.GAPS]", "[num + self.GAPS[i] for i in range(3)]"]
    else:
        gap = f"GAP = {gaps[0]}"
        best = [
            "[num + i * self.GAP for i in range(3)]",
            "list(range(num, num + 3 * self.GAP, self.GAP))",
        ]
    if rng.random() < 0.5:
        judge = [
            "elif num < best:",
            "    self.low = max(self.low, num)",
            "else:",
            "    self.high = min(self.high, num)",
        ]
    else:
        judge = [
            "elif self.low < num < best:",
            "    self.low = num",
            "elif best < num < self.high:",
            "    self.high = num",
        ]
    program = TUNE.substitute(
        knobs=json.dumps(knobs),
        gap=gap,
        span=span,
        best=rng.choice(best),
        judge="\n".join("        " + line for line in judge),
        reward=rng.choice(["0.0", "self.pos / 6"]),
        limit=limit,
        solution=rng.choice(["[str(num) for num in self.best]", "list(map(str, self.best))"]),
    )
    if several:
        hint = (
            f"Halve the interval for {knobs[0]}; {knobs[1]} is best {gaps[0]} above it "
            f"and {knobs[2]} {gaps[1]} above {knobs[1]}."
        )
    else:
        hint = (
            f"Halve the interval for {knobs[0]}; "
            f"each later knob is best {gaps[0]} above the one before."
        )
    return Draw("tune", SKILL, program, hint, lambda hinted, _: TunePlayer(gaps if hinted else []))


FAMILIES: tuple[Family, ...] = (
    Family("market", SKILL, "MarketEnv", draw_market),
    Family("tune", SKILL, "TuneEnv", draw_tune),
)
