"""Each gate refuses a program that fails there alone, and a good program passes all."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from spade_jax.envs import api, thoughtless
from spade_jax.envs.admit import GENERATED, HINT_GATES, PUBLIC, admit, admit_public
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.trial import Play, Solved, Trial, wander
from spade_jax.types import Fault, Gate, Outcome, Verdict

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


HOW: dict[str, Any] = {
    "solution_seeds": range(4),
    "probe_seeds": range(100, 110),
    "max_probe_win_frac": 0.1,
    "max_turns": 12,
    "rng_seed": 0,
    "known": {},
    "duplicate_similarity": 0.95,
}


def verdict(shared, program: str, **overrides: Any) -> Verdict:
    return shared.run(admit(shared.pool, program, **(HOW | overrides)))


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
        measures={
            "similarity": 0.0,
            "num_instances": 14,
            "num_solution_seeds": 14,
            "leak_frac": 0.0,
            "no_op_win_frac": 0.0,
            "constant_win_frac": 0.0,
            "random_win_frac": 0.0,
        },
        gates=dict.fromkeys(GENERATED, "passed") | {Gate.CRITERIA: "not_applicable"},
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
TIME = "import collections\ntime = [collections][0]._sys.modules['time']\n"  # past the first gates
SLEEP = TIME + "sleep = time.sleep\n"
HIDDEN_CLOCK = TIME + "clock = time.time_ns\n"
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
    "datetime": (
        "imports",
        "import datetime\n"
        + changed("random.Random(seed)", "random.Random(datetime.date.today().day)"),
        "reads the clock",
    ),
    "private": ("imports", "from random import _urandom\n" + GOOD, "_urandom is private"),
    "surroundings": (
        "imports",
        changed("random.Random(seed)", "random.Random(random._os.environ.get('HOME', seed))"),
        "random._os is private",
    ),
    "host's files": ("imports", "HOST = open('/etc/hostname').read()\n" + GOOD, "open()"),
    "count in a library": (  # easy in the middle of an admission
        "imports",
        changed("self.turn = 0, 0", "self.turn = 0, 0\n        random.n = 1"),
        "keep state in self",
    ),
    "told by a library": (
        "imports",
        changed("return [str(", "setattr(random, 'asked', True)\n        return [str("),
        "setattr(random)",
    ),
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
    "hang at step 4": (
        "contract",
        SLEEP + changed("truncated = ", "if self.turn > 3: sleep(99)\n        truncated = "),
        "timeout",
    ),
    "lost at once, then a hang": (
        "contract",
        SLEEP
        + changed(
            "self.turn += 1", "self.turn += 1\n        if action == 'yes': sleep(99)"
        ).replace("0.0, False, truncated", "0.0, True, False"),
        "timeout",
    ),
    "reward": ("schema", changed("0.0, False, truncated", "5.0, False, truncated"), "5"),
    "reward not finite": (
        "schema",
        changed("0.0, False, truncated", "float('nan'), False, truncated"),
        "step",
    ),
    "coin-flip reward": (
        "determinism",
        changed(
            "self.dial / 10, False, truncated, {}\n        self.dial",
            "COIN() < 0.5, False, truncated, {}\n        self.dial",
        ).replace("COIN() < 0.5", "float(random.SystemRandom().random() < 0.5)"),
        "random.Random(seed)",
    ),
    "hash order": (
        "determinism",
        changed(
            "That is no number.", "{' '.join({'amber', 'basalt', 'cobalt', 'dolmen'})}"
        ).replace('return "{', 'return f"{'),
        "another process",
    ),
    "hash": ("determinism", changed("random.Random(seed)", "random.Random(hash(str(seed)))"), ""),
    "process id": (
        "determinism",
        changed("random.Random(seed)", "random.Random([random][0]._os.getpid())"),
        "",
    ),
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
        changed("random.Random(seed)", "random.Random([random][0]._urandom(8))"),
        "",
    ),
    "state in a library": (  # unlike its own globals and classes, shared by all instances
        "determinism",
        changed(
            "self.turn = 0, 0",
            "self.turn = 0, 0\n        [random][0].n = getattr(random, 'n', 0) + 1",
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
    "one instance": ("variety", ALWAYS_SAME, "14 seeds have 1"),
    "three instances": (
        "variety",
        changed("random.Random(seed)", "random.Random(seed % 3)"),
        "have 3",
    ),
    "one answer": (  # the seed changes what is told, and not what wins
        "variety",
        changed("[rng.randint(10, 99) for _ in range(3)]", "[11, 22, 33]"),
        "have 1 different",
    ),
    "instances that differ in name": (
        "variety",
        changed("[rng.randint(10, 99) for _ in range(3)]", "[11 * n + 40 for n in (1, 2, 3)]")
        .replace("number = int(action)", "number = int(action.split()[0])")
        .replace("except ValueError", "except (ValueError, IndexError)")
        .replace("self.dial, self", "self.name, self.dial, self")
        .replace("= 0, 0", "= seed, 0, 0")
        .replace("[str(number) for", "[f'{number} of {self.name}' for"),
        "100% of the others",
    ),
    "the same but for what follows": (
        "variety",
        changed("[rng.randint(10, 99) for _ in range(3)]", "[11, 22, 33]")
        .replace("self.dial, self", "self.name, self.dial, self")
        .replace("= 0, 0", "= seed, 0, 0")
        .replace("in self.code]", "in [*self.code, self.name]]"),
        "have 1 different",
    ),
    "a space that is never said": (
        "solution",
        changed(
            "number = int(action)", "number = int(action) if action[-1:] == ' ' else 0"
        ).replace("return [str(number) for", "return [f'{number} ' for"),
        "no player can say",
    ),
    "a brace that is never said": (
        "solution",
        changed("number = int(action)", "number = int(action.strip('{'))").replace(
            "return [str(number) for", "return ['{' + str(number) for"
        ),
        "no player can say",
    ),
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
    "another seed loses": (  # one of the probe seeds
        "solution",
        changed("number) for", "number + (self.code == [28, 68, 68])) for"),
        "seed 100",
    ),
    "wins on one seed only": (
        "solution",
        changed(
            "self.dial, self.turn = 0, 0", "self.dial, self.turn, self.seed = 0, 0, seed"
        ).replace("number) for", "number + (self.seed != 2)) for"),
        "do not win",
    ),
    "partial reward": ("solution", changed("1.0, True, False", "0.9, True, False"), "reward 0.9"),
    "constant reward": (
        "solution",
        GOOD.replace("0.0, False", "0.5, False")
        .replace("self.dial / 10, False", "0.5, False")
        .replace("1.0, True", "0.5, True"),
        "reward 0.5",
    ),
    "unwinnable": ("solution", changed("if self.dial == 3:", "if self.dial == 4:"), "do not win"),
    "seeded coin": (  # won or lost by the seed, whatever is done
        "solution",
        changed(
            "wanted = self.code[self.dial]",
            "return 'Coin.', float(self.code[0] % 2), True, False, {}",
        ),
        "reward 0",
    ),
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
    "reward for any input": (
        "outcomes",
        changed("self.turn += 1", "return f'{action}!', 1.0, True, False, {}"),
        "senseless actions win",
    ),
    "reward for length": (
        "outcomes",
        changed("self.turn += 1", "if len(action) > 400: return 'Long!', 1.0, True, False, {}"),
        "senseless actions win",
    ),
    "reward for patience": (
        "outcomes",
        changed(
            "truncated = ", "if self.turn == 11: return 'Oh.', 1.0, True, False, {}\n        x = "
        ).replace("truncated, {}", "False, {}"),
        "senseless actions win",
    ),
    "counter": (
        "feedback",
        GOOD.replace('"That is no number."', "f'Turn {self.turn} .'")
        .replace('f"{number} is too {word}."', "f'Turn  {self.turn}'")
        .replace('f"Click. Now dial {self.dial + 1}."', "f'Turn {self.turn}!'"),
        "but for the end",
    ),
    "nothing to go by": (  # the solution knows, and no player ever could
        "feedback",
        changed('f"{number} is too {word}."', '"Wrong."')
        .replace("Vault {rng.randint(1, 10**6)}", "Vault")
        .replace("randint(10, 99)", "randint(10**8, 10**9)"),
        "depend on the instance",
    ),
    "no feedback": (
        "feedback",
        GOOD.replace('"That is no number."', "'Hm.'")
        .replace('f"{number} is too {word}."', "'Hm.'")
        .replace('f"Click. Now dial {self.dial + 1}."', "'Hm.'")
        .replace('"The vault opens."', "'Hm.'"),
        "the same",
    ),
    "echo": (
        "feedback",
        GOOD.replace('"That is no number."', "f'Heard {action}.'")
        .replace('f"{number} is too {word}."', "f'Heard {action}.'")
        .replace('f"Click. Now dial {self.dial + 1}."', "f'Heard {action}.'")
        .replace('"The vault opens."', "f'Heard {action}.'"),
        "the same",
    ),
    "answer shown": (
        "leak",
        changed("dial 1 of 3.", "dial 1 of 3, not {self.code[0]}, {self.code[1]}, {self.code[2]}!"),
        "100% of the seeds, word for word",
    ),
    "answer in a sentence": (
        "leak",
        changed("dial 1 of 3.", "A {self.code[0]}, B {self.code[1]}, then C {self.code[2]}."),
        "100% of the seeds, its first word",
    ),
    "answer in one piece": (
        "leak",
        changed("dial 1 of 3.", "dial 1 of 3, no. {self.code[0]}{self.code[1]}{self.code[2]}."),
        "letter for letter",
    ),
    "answer when asked for nothing": (
        "leak",
        changed('"That is no number."', "f'No number like {self.code}.'"),
        "senseless actions are told the answer",
    ),
    "one answer shown": (
        "leak",
        changed("for _ in range(3)", "for _ in range(1)")
        .replace("self.dial == 3", "self.dial == 1")
        .replace("dial 1 of 3.", "code {self.code[0]}."),
        "100% of the seeds, as word 4",
    ),
    "waiting wins": (
        "no_op",
        changed(
            "self.turn += 1",
            "self.turn += 1\n        self.noise = self.turn == 1 or bool(action) or self.noise\n"
            "        if self.turn == 9 and not self.noise:\n"
            "            return 'It opened by itself.', 1.0, True, False, {}",
        ).replace(
            "self.turn == 1 or bool(action) or self.noise",
            "bool(action) or self.turn > 1 and self.noise",
        ),
        "repeating ''",
    ),
    "constant": ("constant", changed("if number != wanted:", "if number < 1:"), "repeating"),
    "a word that opens it": (
        "constant",
        changed("self.turn += 1", "if action == 'xyzzy': return 'Open.', 1.0, True, False, {}"),
        "'xyzzy'",
    ),
    "a word within": (
        "constant",
        changed(
            "self.turn += 1", "if 'please' in action.lower(): return 'Yes.', 1.0, True, False, {}"
        ),
        "'please'",
    ),
    "two words that open it": (
        "constant",
        changed(
            "self.turn += 1",
            "self.past = [*getattr(self, 'past', []), action][-2:]\n"
            "        if self.past == ['plugh', 'xyzzy']: return 'Open.', 1.0, True, False, {}",
        ),
        "repeating [",
    ),
    "any text": (
        "outcomes",
        changed(
            'return "That is no number.", 0.0, False, truncated, {}',
            "number = self.code[self.dial]",
        ),
        "senseless",
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
    ("reward", "gate"),
    [("1.0, True", "no_op"), ("5.0, False", "no_op"), ("float('nan'), False", "no_op")],
)
def test_what_happens_after_the_unhelpful_actions_is_seen(shared, reward: str, gate: str):
    late = changed(
        "self.turn += 1",
        f"self.turn += 1\n        if self.turn == 26: return 'Oh.', {reward}, False, {{}}",
    )
    found = verdict(shared, late.replace(">= 30", ">= 90"), max_turns=40)
    assert (found.admitted, found.gate) == (False, gate), found


@pytest.mark.parametrize(
    ("overrides", "gate"),
    [
        ({"solution_seeds": ()}, "contract"),
        ({"solution_seeds": (1, 1), "probe_seeds": (1,)}, "variety"),
        ({"probe_seeds": ()}, "no_op"),
        ({"probe_seeds": (0,)}, "constant"),  # the seed whose solution is repeated
    ],
)
def test_a_gate_that_cannot_run_refuses(shared, overrides: dict[str, Sequence[int]], gate: str):
    found = verdict(shared, GOOD, **overrides)
    assert (found.admitted, found.gate) == (False, gate)


def test_measures_hold_what_was_reached(shared):
    found = verdict(shared, REFUSED["random"][1])
    assert found.measures["num_solution_seeds"] == 14
    assert found.measures["constant_win_frac"] == 0.0
    assert found.measures["random_win_frac"] > 0.1
    assert verdict(shared, REFUSED["one instance"][1]).measures == {
        "similarity": 0.0,
        "num_instances": 1,
    }
    assert "random_win_frac" not in verdict(shared, REFUSED["constant"][1]).measures


def test_the_random_player_does_not_hold_the_solution_of_its_own_seed(shared, monkeypatch):
    held = {}

    async def watched(trial, seed, candidates, **options):
        held[seed] = set(candidates)
        return await wander(trial, seed, held[seed], **options)

    monkeypatch.setattr(thoughtless, "wander", watched)
    seeds = (0, 1, 2)
    solved = {seed: Solved([f"own {seed}"], Play("", ())) for seed in seeds}
    trial = Trial(shared.pool, GOOD, seeds, seeds, 1.0, 3, 0)
    shared.run(thoughtless.random(trial, solved))
    assert held == {seed: {f"own {other}" for other in seeds if other != seed} for seed in seeds}


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
                known={},
                duplicate_similarity=0.95,
            )

    assert shared.run(narrow()).admitted


def test_an_admission_takes_little_processor_time(shared):
    """The trainer's own share; the goal for all processes together is 0.3 s."""
    verdict(shared, GOOD)
    start = time.process_time()
    verdict(shared, GOOD, solution_seeds=range(5), probe_seeds=range(100, 120))
    assert time.process_time() - start < 1.0


def test_each_gate_refuses_some_program_here():
    gates = {gate for gate, _, _ in REFUSED.values()}
    assert gates | {Gate.DUPLICATE, Gate.CRITERIA} == GENERATED


def test_the_gates_are_reported_as_far_as_they_were_reached(shared):
    found = verdict(shared, REFUSED["answer shown"][1])
    assert found.gates == {
        **dict.fromkeys(
            ("parse", "imports", "duplicate", "load", "contract", "schema", "determinism"), "passed"
        ),
        **dict.fromkeys(("variety", "solution", "outcomes", "feedback"), "passed"),
        "criteria": "not_applicable",
        "leak": "refused",
    }


RENAMED = (
    GOOD.replace("VaultEnv", "SafeEnv")
    .replace("code", "secret")
    .replace("number", "guess")
    .replace("That is no guess", "That is no number")
    .replace("Say a guess", "Say a number")
    .replace("10 to 99", "20 to 50")
    .replace("10, 99", "20, 50")
    .replace("self.turn += 1", "self.turn += 1  # one more")
)


@pytest.mark.parametrize(
    "known", [GOOD, GOOD + "\n# the same\n", GOOD.replace('    """O', '    """L')]
)
def test_a_program_known_but_for_names_numbers_and_comments_is_refused(shared, known: str):
    found = verdict(shared, RENAMED, known={"other": "x = 1", "vault": known})
    assert (found.gate, found.measures) == ("duplicate", {"similarity": 1.0})
    assert "vault" in found.reason and "95" in found.reason


def test_a_copy_with_other_things_beside_it_is_a_copy(shared):
    line = "    def m{0}(self, a):\n        return {{'w{0}': [a + 'q{0}', -a]}} if a else 'u{0}'\n"
    junk = "".join(line.format(n) for n in range(60))
    padded = f"class Junk:\n{junk}\n\n{RENAMED}"
    found = verdict(shared, padded, known={"vault": GOOD})
    assert found.gate == "duplicate" and found.measures["similarity"] > 0.97
    assert verdict(shared, GOOD, known={"padded": padded}).admitted


def test_a_program_may_have_a_function_called_open(shared):
    assert verdict(shared, GOOD + "\n\ndef open(door):\n    return door\n\n\nopen(1)\n").admitted


def test_the_same_pattern_with_other_words_is_another_game(shared):
    other = changed("The vault opens.", "A bell rings.").replace("Vault", "Harbour")
    other = other.replace("Click. Now dial", "Splash, now buoy").replace("dial 1 of", "buoy 1 of")
    found = verdict(shared, other, known={"vault": GOOD})
    assert found.admitted
    assert 0.5 < found.measures["similarity"] < 0.95
    strict = verdict(shared, other, known={"vault": GOOD}, duplicate_similarity=0.5)
    assert strict.gate == "duplicate"


def public(shared, program: str, seeds: Sequence[int] = range(3), **claims: bool) -> Verdict:
    return shared.run(admit_public(shared.pool, program, seeds=seeds, **claims))


def test_what_was_not_generated_passes_the_public_gates_alone(shared):
    """It may import anything, have no solution, be one instance and reward anything."""
    foreign = "import os.path\n" + ALWAYS_SAME[: ALWAYS_SAME.index("    def solution")]
    found = public(shared, foreign)
    assert found.admitted and found.measures == {}
    others = (GENERATED | HINT_GATES) - PUBLIC
    assert found.gates == dict.fromkeys(PUBLIC, "passed") | dict.fromkeys(others, "not_applicable")


@pytest.mark.parametrize("name", ["body", "hang at step 4", "reward", "hash order", "process id"])
def test_the_public_gates_refuse_as_well(shared, name: str):
    gate, program, _ = REFUSED[name]
    found = public(shared, program + "\n# not one that was refused before: it is in quarantine\n")
    assert (found.admitted, found.gate, found.gates[gate]) == (False, gate, "refused"), found
    assert found.gates["random"] == "not_applicable"
    assert public(shared, GOOD, seeds=()).gate == "contract"


def test_what_claims_no_determinism_is_not_held_to_it(shared):
    found = public(shared, REFUSED["system random"][1], deterministic=False)
    assert found.admitted and found.gates["determinism"] == "not_applicable"


def test_a_program_that_is_slow_in_everything_is_not_tried_for_ever():
    slow = GOOD.replace("        self.turn += 1\n", "        self.turn += 1\n        burn(0.1)\n")
    slow += """

def burn(seconds):
    for _ in range(int(seconds * 30_000_000)):
        pass
"""

    async def try_both() -> tuple[Verdict, Verdict]:
        async with Pool(Limits(step_s=5, trial_s=1.0)) as pool:
            return await admit(pool, slow, **HOW), await admit(pool, GOOD, **HOW)

    refused, good = asyncio.run(try_both())
    assert good.admitted
    assert (refused.admitted, refused.gate) == (False, Gate.CONTRACT)
    assert "all plays of its trial together took more than their 1 s" in refused.reason


def test_what_a_program_shows_fills_no_memory(shared, monkeypatch):
    """Each observation is allowed; it is the hundreds of them that are kept which are too many."""
    monkeypatch.setattr(api, "MAX_TRIAL_BYTES", 4 << 20)
    broad = (
        GOOD
        + """

class BroadEnv(VaultEnv):
    def reset(self, seed):
        observation, info = super().reset(seed)
        return observation + " " * 100_000, info
"""
    )
    found = verdict(shared, broad)
    assert not found.admitted and "showed more than 4 MiB" in found.reason, found


def test_a_reason_is_short_and_plain(shared):
    found = verdict(shared, GOOD + f"import {'a' * 50_000}\n")
    assert found.gate == Gate.IMPORTS and found.reason.startswith("line ")
    assert len(found.reason) == 500 and found.reason.endswith("a...")
