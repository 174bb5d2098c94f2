"""Each gate refuses a program that fails there alone, and a good program passes all."""

import time
from collections.abc import Sequence
from typing import Any

import pytest

from spade_jax.envs.admit import admit
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Outcome, Verdict

GOOD = '''import random


class VaultEnv:
    """Open a vault of three dials by trying numbers; replies tell too low or too high."""

    def reset(self, seed):
        rng = random.Random(seed)
        self.code = [rng.randint(10, 99) for _ in range(3)]
        self.dial, self.turn = 0, 0
        return f"Vault {rng.randint(1, 10**6)}: dial 1 of 3. Say a number from 10 to 99.", {}

    def step(self, action):
        self.turn += 1
        truncated = self.turn >= 30
        try:
            number = int(action)
        except ValueError:
            return "That is no number.", 0.0, False, truncated, {}
        wanted = self.code[self.dial]
        if number != wanted:
            word = "low" if number < wanted else "high"
            return f"{number} is too {word}.", self.dial / 10, False, truncated, {}
        self.dial += 1
        if self.dial == 3:
            return "The vault opens.", 1.0, True, False, {}
        return f"Click. Now dial {self.dial + 1}.", self.dial / 10, False, truncated, {}

    def solution(self):
        return [str(number) for number in self.code]
'''


def verdict(shared, program: str, **overrides: Any) -> Verdict:
    arguments: dict[str, Any] = {
        "solution_seeds": range(4),
        "probe_seeds": range(100, 110),
        "max_probe_win_frac": 0.1,
        "max_turns": 12,
        "rng_seed": 0,
    }
    return shared.run(admit(shared.pool, program, **(arguments | overrides)))


def test_a_program_that_is_no_text_is_refused_before_it_is_parsed(shared):
    refusal = verdict(shared, GOOD + "# \udc80")
    assert (refusal.admitted, refusal.gate) == (False, "parse")
    assert "surrogate" in refusal.reason


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new)


def test_a_good_program_is_admitted_with_its_measures(shared):
    assert verdict(shared, GOOD) == Verdict(
        True,
        measures={"num_solution_seeds": 4, "constant_win_frac": 0.0, "random_win_frac": 0.0},
    )


def test_the_same_admission_gives_the_same_verdict(shared):
    coin = changed("if number != wanted:", "if number % 3 != wanted % 3:")
    first = verdict(shared, coin, max_probe_win_frac=1.0)
    assert first.admitted
    assert 0 < first.measures["random_win_frac"] < 1
    assert verdict(shared, coin, max_probe_win_frac=1.0) == first
    others = [verdict(shared, coin, max_probe_win_frac=1.0, rng_seed=seed) for seed in range(1, 9)]
    assert {other.measures["random_win_frac"] for other in others} != {
        first.measures["random_win_frac"]
    }


ALWAYS_SAME = changed("random.Random(seed)", "random.Random(7)")
HIDDEN_CLOCK = "from collections import _sys\nclock = _sys.modules['time'].time_ns\n"
REFUSED = {
    "syntax": ("parse", "def f(:", "SyntaxError"),
    "null byte": ("parse", "x = '\0'", ""),
    "deep": ("parse", "-" * 50_000 + "1", "MemoryError"),
    "long": ("parse", GOOD + "#" * 70_000, "65536"),
    "no class": ("parse", "class Vault: pass", "Env"),
    "nested class": ("parse", "def f():\n    class AEnv: pass", "Env"),
    "no solution": ("parse", changed("def solution", "def answer"), "solution"),
    "other class": ("parse", GOOD + "class LastEnv:\n    def reset(self, seed): pass", "step"),
    "os": ("imports", "import os\n" + GOOD, "line 1: import of os"),
    "from": ("imports", "from subprocess import run\n" + GOOD, "subprocess"),
    "dotted": ("imports", "import random, urllib.request\n" + GOOD, "urllib.request"),
    "late": ("imports", changed("self.turn += 1", "import time"), "time"),
    "relative": ("imports", "from . import x\n" + GOOD, "import of ."),
    "dunder": ("imports", "os = __import__('os')\n" + GOOD, "__import__"),
    "body": ("load", GOOD + "\n1 / 0", "ZeroDivisionError"),
    "body hangs": ("load", GOOD + "\nwhile True: pass", "timeout"),
    "reset": (
        "contract",
        changed("self.dial, self.turn = 0, 0", "self.turn = 0"),
        "AttributeError",
    ),
    "bad action": ("contract", changed("except ValueError", "except KeyError"), "ValueError"),
    "some seed": ("contract", changed("rng = ", "assert seed != 2; rng = "), "AssertionError"),
    "late hang": (
        "contract",
        changed("truncated = ", "while self.turn > 20: pass\n        truncated = "),
        "timeout",
    ),
    "reward": ("contract", changed("0.0, False, truncated", "5.0, False, truncated"), "schema"),
    "system random": ("determinism", changed("random.Random(seed)", "random.SystemRandom()"), ""),
    "global random": (
        "determinism",
        changed("random.Random(seed)", "random"),
        "random.Random(seed)",
    ),
    "address": (
        "determinism",
        changed("That is no number.", "{id(object())}").replace('return "{', 'return f"{'),
        "",
    ),
    "clock": (
        "determinism",
        HIDDEN_CLOCK + changed("random.Random(seed)", "random.Random(clock())"),
        "",
    ),
    "urandom": (
        "determinism",
        changed("random.Random(seed)", "random.Random(random._urandom(8))"),
        "",
    ),
    "state in a library": (  # unlike its own globals and classes, shared by all instances
        "determinism",
        changed(
            "self.turn = 0, 0",
            "self.turn = 0, 0\n        random.n = getattr(random, 'n', 0) + 1",
        ).replace("Vault {", "Vault {random.n} {"),
        "",
    ),
    "reseeded global": (
        "determinism",
        changed("rng = random.Random(seed)", "random.seed(seed); rng = random").replace(
            "number = int(action)", "number = int(action) + random.randint(0, 1)"
        ),
        "",
    ),
    "one instance": ("variety", ALWAYS_SAME, "4 seeds"),
    "solution raises": ("solution", changed("return [str(", "return [missing("), "NameError"),
    "solution type": (
        "solution",
        changed("return [str(number) for", "return [number for"),
        "schema",
    ),
    "solution empty": (
        "solution",
        changed("for number in self.code]", "for number in self.code[3:]]"),
        "0 actions",
    ),
    "solution loses": (
        "solution",
        changed("in self.code]", "in self.code[:2]]"),
        "2 actions do not win",
    ),
    "one seed loses": (
        "solution",
        changed("number) for", "number + (self.code == [17, 21, 20])) for"),
        "",
    ),
    "partial reward": ("solution", changed("1.0, True, False", "0.9, True, False"), "reward 0.9"),
    "solution too long": (
        "solution",
        changed("return [str(", "return ['?'] * 10 + [str("),
        "12 turns",
    ),
    "asking opens it": (
        "solution",
        changed("self.dial, self.turn = 0, 0", "self.dial, self.turn, self.asked = 0, 0, False")
        .replace("return [str(", "self.asked = True\n        return [str(")
        .replace("if self.dial == 3:", "if self.dial == 3 and self.asked:")
        .replace("Now dial", "Now dial {self.code.append(0) or ''}"),
        "do not win",
    ),
    "constant": ("constant", changed("if number != wanted:", "if number < 1:"), "repeating"),
    "any text": (
        "constant",
        changed(
            'return "That is no number.", 0.0, False, truncated, {}',
            "number = self.code[self.dial]",
        ),
        "100%",
    ),
    "random": ("random", changed("number != wanted", "number % 3 != wanted % 3"), "at random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_first_gate_that_fails_is_named(shared, name: str):
    gate, program, word = REFUSED[name]
    found = verdict(shared, program)
    assert (found.admitted, found.gate) == (False, gate), found
    assert word in found.reason
    assert 0 < len(found.reason) < 400


@pytest.mark.parametrize(
    ("overrides", "gate"),
    [
        ({"solution_seeds": ()}, "solution"),
        ({"solution_seeds": (1, 1)}, "variety"),
        ({"probe_seeds": ()}, "constant"),
        ({"probe_seeds": (0,)}, "constant"),  # the seed whose solution is repeated
    ],
)
def test_a_gate_that_cannot_run_refuses(shared, overrides: dict[str, Sequence[int]], gate: str):
    found = verdict(shared, GOOD, **overrides)
    assert (found.admitted, found.gate) == (False, gate)


def test_measures_hold_what_was_reached(shared):
    found = verdict(shared, REFUSED["random"][1])
    assert found.measures["num_solution_seeds"] == 4
    assert found.measures["constant_win_frac"] == 0.0
    assert found.measures["random_win_frac"] > 0.1
    assert verdict(shared, REFUSED["one instance"][1]).measures == {}
    assert "random_win_frac" not in verdict(shared, REFUSED["constant"][1]).measures


def test_a_fault_of_ours_is_not_the_programs(shared, monkeypatch):
    async def load(program: str, replica: int = 0) -> Fault:
        return Fault(Outcome.INFRASTRUCTURE, "the zygote died")

    monkeypatch.setattr(shared.pool, "load", load)
    found = verdict(shared, GOOD)
    assert (found.admitted, found.gate) == (False, "infrastructure")


def test_methods_of_a_base_class_count(shared):
    inherited = (
        GOOD.replace("class VaultEnv:", "class Base:") + "\nclass VaultEnv(Base):\n    pass\n"
    )
    assert verdict(shared, inherited).admitted


def test_one_worker_at_a_time_is_enough(shared):
    async def narrow() -> Verdict:
        async with Pool(Limits(max_workers=1, instances_per_worker=2)) as pool:
            return await admit(
                pool,
                GOOD,
                solution_seeds=range(3),
                probe_seeds=range(10, 16),
                max_probe_win_frac=0.1,
                max_turns=12,
                rng_seed=0,
            )

    assert shared.run(narrow()).admitted


def test_an_admission_takes_little_processor_time(shared):
    """The trainer's own share; the goal for all processes together is 0.3 s."""
    verdict(shared, GOOD)
    start = time.process_time()
    verdict(shared, GOOD, solution_seeds=range(5), probe_seeds=range(100, 120))
    assert time.process_time() - start < 1.0
