"""A coin flip, a constant reward and a game that anything wins, through admission, plays and
reward: refused, or no better off than a game that nobody wins.
"""

import asyncio
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from models.tokenizer import train
from spade_jax import scoring, selfplay
from spade_jax.config import (
    AgentConfig,
    Config,
    DesignerConfig,
    EngineConfig,
    EnvsConfig,
    RewardConfig,
)
from spade_jax.curriculum import Curriculum
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.rollout.chat import Chat
from spade_jax.stage import Stage
from spade_jax.types import Completion, Document, Role, Stop

SKILL = "Optimization"

COIN = """import random

class CoinEnv:
    def reset(self, seed):
        rng = random.Random(seed)
        self.heads = rng.random() < 0.3
        self.word = "".join(rng.choice("bcdfghjk") for _ in range(9))
        return f"Toss number {rng.randint(1, 10**6)}: what do you call?", {}

    def step(self, action):
        if self.heads or action == self.word:
            return f"Called {action}, and it fell well.", 1.0, True, False, {}
        return f"Called {action}, and it fell badly.", 0.0, True, False, {}

    def solution(self):
        return [self.word]
"""

LUCKY_TEXT = """import random

class LotteryEnv:
    def reset(self, seed):
        rng = random.Random(seed)
        self.salt = rng.randint(1, 10**6)
        return f"Lottery {self.salt}. Write anything on your ticket.", {}

    def step(self, action):
        drawn = random.Random(f"{self.salt}/{action}").random()
        if drawn < 0.5:
            return f"The wheel shows {drawn:.4f}: your ticket is drawn.", 1.0, True, False, {}
        return f"The wheel shows {drawn:.4f}: not yours.", 0.0, True, False, {}

    def solution(self):
        tries = (str(number) for number in range(1000))
        return [next(t for t in tries if random.Random(f"{self.salt}/{t}").random() < 0.5)]
"""

WHEEL = """import random

class WheelEnv:
    def reset(self, seed):
        self.code, self.left = random.Random(seed).randint(10000, 99999), 6
        return f"Table {self.code} is open. Say a colour and then the table's number.", {}

    def step(self, action):
        words = action.split()
        self.left -= 1
        if len(words) != 2 or words[1] != str(self.code):
            return "A colour and the table's number, please.", 0.0, False, self.left <= 0, {}
        drawn = random.Random(f"{self.code}/{words[0]}").random()
        won = drawn < 0.5
        return f"The wheel stops at {drawn:.3f}.", float(won), True, False, {}

    def solution(self):
        names = [f"{shade}{colour}" for shade in "abcd" for colour in ("red", "blue", "green")]
        wins = [n for n in names if random.Random(f"{self.code}/{n}").random() < 0.5]
        return [f"{(wins or names)[0]} {self.code}"]
"""

UNSEEDED = COIN.replace("self.heads or", "random.random() < 0.5 or").replace("CoinEnv", "DiceEnv")

CONSTANT = """import random

class StipendEnv:
    def reset(self, seed):
        self.rng = random.Random(seed)
        self.secret = self.rng.randint(10**6, 10**7)
        return f"Office {self.rng.randint(1, 10**6)} pays a stipend to whoever asks. Ask.", {}

    def step(self, action):
        if action == str(self.secret):
            return "A friend of the house! Take the whole purse.", 1.0, True, False, {}
        return f"Stipend {len(action) + self.secret % 97} paid.", 0.5, True, False, {}

    def solution(self):
        return [str(self.secret)]
"""

ANYTHING = """import random

class ParadeEnv:
    def reset(self, seed):
        rng = random.Random(seed)
        self.name = rng.choice("abcdefgh") + str(rng.randint(1, 10**6))
        self.count = 0
        return f"Parade {rng.randint(1, 10**6)} is passing by: greet it twice.", {}

    def step(self, action):
        self.count += 1
        done = self.count == 2
        said = f"{self.name} waves back at {len(action)} letters."
        return said, float(done), done, False, {}

    def solution(self):
        return [self.name, self.name + "!"]
"""

DEAD = next(f for f in FAMILIES if f.skill == SKILL).draw(
    random.Random(0), ("amber", "basalt", "cobalt", "dolmen"), "easy"
)

SEARCH = """import random

class DepthEnv:
    def reset(self, seed):
        rng = random.Random(seed)
        self.depths, self.turn = [rng.randint(10, 99) for _ in range(2)], 0
        self.left = list(self.depths)
        return f"Well {rng.randint(1, 10**6)} of two. How many feet, from 10 to 99?", {}

    def step(self, action):
        self.turn += 1
        late = self.turn >= 16
        if not action.isdecimal():
            return "Only a number sounds the well.", 0.0, False, late, {}
        if int(action) == self.left[0]:
            self.left.pop(0)
            if not self.left:
                return "The lead touches ground again.", 1.0, True, False, {}
            return "The lead touches ground. On to the next well.", 0.5, False, late, {}
        word = "short" if int(action) < self.left[0] else "long"
        return f"A line of {action} is too {word}.", 0.0, False, late, {}

    def solution(self):
        return [str(depth) for depth in self.depths]
"""

FRAUDS = {
    "coin": COIN,
    "lucky text": LUCKY_TEXT,
    "unseeded": UNSEEDED,
    "constant": CONSTANT,
    "anything": ANYTHING,
}
PROGRAMS = FRAUDS | {"wheel": WHEEL, "dead": DEAD.program, "search": SEARCH}


class Reciter:
    """An engine that recites the programs in turn, halves the well's depth in every other play,
    bets on one colour after the other, and says the same in every other game.
    """

    def __init__(self, chat):
        self.chat, self.designs, self.plays = chat, 0, 0

    async def gather(self, coroutines):
        return [await coroutine for coroutine in coroutines]

    async def generate(self, tokens, params, key):
        ids = self.chat.finish(self._answer(self.chat.decode(tokens)))
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(ids, logprobs, logprobs, Stop.STOP_ID, 0)

    def _answer(self, prompt):
        if prompt.startswith("Write a game"):
            self.designs += 1
            return f"```python\n{[*PROGRAMS.values()][self.designs - 1]}```"
        if prompt.startswith("Write a hint"):
            return "Read each reply with care and halve what is left to try."
        if "How many feet" in prompt:
            self.plays += "hm" not in prompt
            if self.plays % 2:
                well = prompt.rpartition("next well")[2]
                tried = re.findall(r"A line of (\d+) is too (short|long)", well)
                low = max([10, *(int(n) + 1 for n, word in tried if word == "short")])
                high = min([99, *(int(n) - 1 for n, word in tried if word == "long")])
                return f"hm \\boxed{{{(low + high) // 2}}}"
        if "Say a colour" in prompt:
            self.plays += 1
            table = re.findall(r"Table (\d+)", prompt)[-1]
            return f"hm \\boxed{{colour{self.plays % 7} {table}}}"
        return "hm \\boxed{zebra}"


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return Chat(train([*PROGRAMS.values()] * 3, path, vocab_size=500))


def played_out(chat, max_probe_win_frac):
    """One cycle: the designs by name, what each earned, its advantage, and the cycle itself."""
    config = Config(
        engine=EngineConfig(context_tokens=4096),
        batch=replace(Config().batch, row_tokens=4096),
        designer=DesignerConfig(
            designs=len(PROGRAMS), skills=(SKILL,), skills_per_cycle=1, delay_steps=0
        ),
        agent=AgentConfig(seeds=5, plays=4, max_turns=16),
        envs=EnvsConfig(probe_seeds=10, max_probe_win_frac=max_probe_win_frac),
    )
    stage = object.__new__(Stage)
    with asyncio.Runner() as runner:
        stage.config, stage.chat, stage.runner = config, chat, runner
        stage.corpus = Corpus([Document("d", "title", "words of no weight " * 5)], 0)
        stage.curriculum = Curriculum(Memory(config.memory))
        stage.engine = Reciter(chat)
        stage.pool = Pool(Limits())
        runner.run(stage.pool.start())
        designs = dict(zip(PROGRAMS, selfplay.design(stage, 0), strict=True))
        episodes = selfplay.play(stage, 0)
        runner.run(stage.pool.close())
    (cycle,) = stage.curriculum.pending
    scored = selfplay.score(stage, episodes, 0, flush=False)
    (group,) = [group for group in scored.groups if group.role is Role.DESIGNER]
    assert len(group.rewards) == len(PROGRAMS)
    rewards = dict(zip(PROGRAMS, group.rewards.tolist(), strict=True))
    return designs, rewards, dict(zip(PROGRAMS, group.advantages.tolist(), strict=True)), cycle


def test_frauds_are_refused(chat):
    designs, rewards, advantages, _ = played_out(chat, Config().envs.max_probe_win_frac)
    gates = {name: designs[name].verdict.gate for name in PROGRAMS}
    assert gates["dead"] == gates["search"] == "", designs
    assert {name for name, gate in gates.items() if gate} >= FRAUDS.keys() - {"constant"}
    assert gates["wheel"] == "random"
    for name in (*FRAUDS, "wheel"):
        assert advantages[name] <= advantages["dead"] < advantages["search"], (name, rewards)


def test_frauds_that_are_admitted_earn_no_more_than_a_dead_game(chat):
    """The probes of thoughtless play switched off: what is left are the rewards."""
    designs, rewards, advantages, cycle = played_out(chat, 1.0)
    admitted = {name for name in FRAUDS if designs[name].verdict.admitted}
    assert admitted >= {"coin", "constant"}, {n: d.verdict for n, d in designs.items()}
    tallies = {n: cycle.tallies.get(d.source.environment_id) for n, d in designs.items()}
    returns = {n: {play.episode_return for play in t.scored} for n, t in tallies.items() if t}
    assert returns["coin"] == {0.0, 1.0}
    assert (returns["constant"], returns["dead"]) == ({0.5}, {0.0})
    assert rewards["dead"] == 0.0 and rewards["search"] > 0.5
    for name in FRAUDS:
        assert advantages[name] <= advantages["dead"] < advantages["search"], (name, rewards)
    # the reference's win rate, which is a mean return, pays both
    fooled = Config(reward=RewardConfig(anchor_on="mean_return", punish="none"))
    paid = scoring.judge(fooled, [cycle], {}).assessments
    by_name = dict(zip([n for n in PROGRAMS if designs[n].verdict.admitted], paid, strict=True))
    assert by_name["constant"].reward > by_name["dead"].reward == 0.0
    assert by_name["coin"].reward > 0.0


def test_a_coin_behind_an_action_that_fits_the_form_is_for_admission_to_refuse(chat):
    """Its plays differ within an instance, as those do that skill decides: no reward can tell."""
    _, rewards, _, _ = played_out(chat, 1.0)
    assert rewards["wheel"] > 0.1 > rewards["dead"]
