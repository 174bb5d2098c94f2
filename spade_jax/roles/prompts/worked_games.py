"""Complete games that the long prompts show, one for each: what an admitted program looks like.

They are read by models, so they say what they do in few lines. A design that copies the one in its
prompt is refused as a duplicate.
"""

WORKSHOP = '''import random


class WorkshopEnv:
    """Source text: ordering jobs that depend on one another."""

    MAX_TURNS = 16
    MAX_MISTAKES = 2
    JOBS = ["carve", "dry", "etch", "file", "glaze", "hone", "inlay", "join", "lacquer", "mount"]

    def reset(self, seed):
        rng = random.Random(seed)
        self.order = rng.sample(self.JOBS, 6)  # hidden: one order in which all jobs can be done
        self.needs = {}
        for place, job in enumerate(self.order):
            earlier = self.order[:place]
            others = rng.sample(earlier[:-1], min(1, len(earlier[:-1])))
            self.needs[job] = earlier[-1:] + others  # so this order is the only one
        self.done = []
        self.mistakes = 0
        self.turns = 0
        text = (
            "A clock is finished by six jobs: " + ", ".join(sorted(self.order)) + ". Some jobs "
            "need others before them. 'ask JOB' names one job that is missing before it; 'do JOB' "
            f"does it. At {self.MAX_MISTAKES + 1} jobs done too early the clock is ruined."
        )
        return text + self.reminder(), {}

    def reminder(self):
        done = ", ".join(self.done) or "nothing"
        left = self.MAX_TURNS - self.turns
        return f" Done: {done}. {left} turns left. Say 'ask JOB' or 'do JOB'."

    def step(self, action):
        self.turns += 1
        words = action.lower().split()
        lost = False
        if len(words) != 2 or words[0] not in ("ask", "do") or words[1] not in self.needs:
            text = "That is no command for a job of this clock."
        elif words[1] in self.done:
            text = f"{words[1]} is done already."
        else:
            missing = [need for need in self.needs[words[1]] if need not in self.done]
            if words[0] == "ask":
                text = f"Before {words[1]} comes {missing[-1]}." if missing else "It can be done."
            elif missing:
                self.mistakes += 1
                lost = self.mistakes > self.MAX_MISTAKES
                text = f"{words[1]} came too early, mistake {self.mistakes}."
            else:
                self.done.append(words[1])
                text = f"{words[1]} is finished."
        if lost:
            return text + " The clock is ruined.", 0.0, True, False, {}
        if len(self.done) == len(self.order):
            return text + " The clock runs.", 1.0, True, False, {}
        progress = len(self.done) / len(self.order)
        return text + self.reminder(), progress, False, self.turns >= self.MAX_TURNS, {}

    def solution(self):
        return [f"do {job}" for job in self.order]
'''

CAULDRON = """import random


class CauldronEnv:
    MAX_TURNS = 14
    LIMIT = 4
    HERBS = ["arnica", "borage", "comfrey", "dill", "elder", "fennel", "hyssop", "lovage", "nettle"]

    def reset(self, seed):
        rng = random.Random(seed)
        self.herbs = rng.sample(self.HERBS, 5)
        self.plan = []  # hidden: a brewing that ends at the goal
        while len(self.plan) < 6:
            if not self.plan or rng.random() < 0.1:  # begin again: a draw of effects can be stuck
                self.plan, brew = [], [0, 0, 0]
                self.effect = {h: [rng.randint(-2, 2) for _ in range(3)] for h in self.herbs}
            herb = rng.choice(self.herbs)
            after = [a + b for a, b in zip(brew, self.effect[herb])]
            if max(map(abs, after)) <= self.LIMIT and self.plan.count(herb) < 3 and any(after):
                self.plan.append(herb)
                brew = after
        self.goal = brew
        self.brew = [0, 0, 0]
        self.stock = {herb: 3 for herb in self.herbs}
        self.turns = 0
        text = (
            "You brew a remedy for a customer who wants " + self.tell(self.goal) + ". Nobody knows "
            "any more what these herbs do; a pinch of one always does the same. Beyond "
            f"{self.LIMIT} or -{self.LIMIT} the cauldron bursts, and a wrong bottle ruins you. "
        )
        return text + self.status(), {}

    def tell(self, values):
        return "heat {}, sweetness {}, depth {}".format(*values)

    def status(self):
        stock = ", ".join(f"{herb} {count}" for herb, count in self.stock.items())
        left = self.MAX_TURNS - self.turns
        return (
            f"The brew has {self.tell(self.brew)}. Pinches left: {stock}. {left} turns left. "
            "Say 'add HERB', 'pour' to begin with an empty cauldron, or 'bottle' to finish."
        )

    def step(self, action):
        self.turns += 1
        words = action.lower().split()
        if words == ["bottle"]:
            won = self.brew == self.goal
            text = "The customer is healed." if won else "The customer storms out: not the remedy."
            return text, 1.0 if won else 0.0, True, False, {}
        if words == ["pour"]:
            self.brew = [0, 0, 0]
            text = "The cauldron is empty; what was in it is lost. "
        elif len(words) == 2 and words[0] == "add" and self.stock.get(words[1], 0) > 0:
            self.stock[words[1]] -= 1
            self.brew = [a + b for a, b in zip(self.brew, self.effect[words[1]])]
            if max(map(abs, self.brew)) > self.LIMIT:
                return "The cauldron bursts.", 0.0, True, False, {}
            text = f"You stir in {words[1]}. "
        else:
            text = "Nothing of that kind can be done here. "
        return text + self.status(), 0.0, False, self.turns >= self.MAX_TURNS, {}

    def solution(self):
        return [f"add {herb}" for herb in self.plan] + ["bottle"]
"""

ROUNDS = """import random


class RoundsEnv:
    MAX_TURNS = 4

    def reset(self, seed):
        rng = random.Random(seed)
        self.names = rng.sample(["Ada", "Bea", "Cy", "Dov", "Eve", "Fay", "Gil"], 4)
        self.coins = {name: rng.randint(30, 99) for name in self.names}
        self.rules = []  # (giver, taker, part): the giver hands over a part of what it has then
        for index in range(4):
            giver = self.names[index]
            taker = rng.choice([name for name in self.names if name != giver])
            self.rules.append((giver, taker, rng.randint(2, 4)))
        rng.shuffle(self.rules)
        self.rounds = rng.randint(3, 5)
        self.asked = rng.choice(self.names[:2])
        held = dict(self.coins)
        self.after_first = None
        for _ in range(self.rounds):
            for giver, taker, part in self.rules:
                given = held[giver] // part
                held[giver] -= given
                held[taker] += given
            self.after_first = self.after_first or dict(held)
        self.total = 1000 * held[self.asked] + 7 * held[self.names[2]] + held[self.names[3]]
        self.turns = 0
        return self.task(), {}

    def task(self):
        start = ", ".join(f"{name} {count}" for name, count in self.coins.items())
        rules = "; ".join(f"{g} gives {t} one part in {p} of its own" for g, t, p in self.rules)
        a, b, c = self.asked, self.names[2], self.names[3]
        return (
            f"Coins at first: {start}. A round is, in this order: {rules}. Parts are rounded "
            f"down. After {self.rounds} rounds, what is 1000 times the coins of {a} plus 7 times "
            f"those of {b} plus those of {c}? Answer with the number alone."
        )

    def step(self, action):
        self.turns += 1
        text = action.strip().replace(",", "")
        if text.isascii() and text.isdecimal() and len(text) < 12 and int(text) == self.total:
            return "Correct.", 1.0, True, False, {}
        if self.turns >= self.MAX_TURNS:
            return f"Wrong, and no attempts are left. It was {self.total}.", 0.0, False, True, {}
        if text.isascii() and text.isdecimal():
            held = ", ".join(f"{name} {count}" for name, count in self.after_first.items())
            said = f"Wrong. To check your first round: it ends with {held}."
        else:
            said = "That is no whole number."
        left = self.MAX_TURNS - self.turns
        return f"{said} {left} attempts left. {self.task()}", 0.0, False, False, {}

    def solution(self):
        return [str(self.total)]
"""
