"""Run library programs in one subprocess: scripted probes and expert play, as lines of JSON.

This file is both sides. As a module it offers `Programs`, which the tests use; run as a script it
is the child that executes the programs, so that no generated line runs in the test process. It
trusts its programs: no sandbox.
"""

import ast
import json
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any


class Programs:
    """A child process that answers one JSON request per line."""

    def __enter__(self) -> "Programs":
        self.child = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.child.stdin and self.child.stdout
        self.child.stdin.close()
        self.child.wait(timeout=10)
        self.child.stdout.close()

    def ask(self, **request: Any) -> Any:
        """Send one request to the child and return its answer."""
        assert self.child.stdin and self.child.stdout
        self.child.stdin.write(json.dumps(request) + "\n")
        self.child.stdin.flush()
        answer = json.loads(self.child.stdout.readline())
        if "error" in answer:
            raise AssertionError(f"program failed: {answer['error']}\n{request.get('program', '')}")
        return answer["value"]

    def play(self, draw: Any, seed: int, hinted: bool) -> tuple[bool, int]:
        """Let the expert of a draw play one episode: (won, turns)."""
        observation = self.ask(op="open", program=draw.program, seed=seed)
        player = draw.player(hinted, random.Random(seed))
        for turn in range(1, 13):
            thought, action = player.act(observation)
            assert 2 <= len(thought.split()) <= 14, thought
            observation, reward, terminated, truncated = self.ask(op="step", action=action)
            if terminated or truncated:
                return terminated and reward >= 1, turn
        return False, 12


def skeleton(program: str) -> str:
    """The syntax tree with identifiers, numbers and strings blanked."""
    dump = ast.dump(ast.parse(program))
    dump = re.sub(r"(?:(?<=id=)|(?<=name=)|(?<=attr=)|(?<=arg=))'[^']*'", "_", dump)
    return re.sub(r"Constant\(value=(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^)]*)\)", "_", dump)


def _load(program: str) -> Any:
    scope: dict[str, Any] = {}
    exec(program, scope)  # the child process exists for this line
    return next(value for name, value in scope.items() if name.endswith("Env"))


def _checked(reply: tuple) -> list:
    text, reward, terminated, truncated, info = reply
    assert isinstance(text, str) and 0 < len(text.split()) <= 25, text
    assert isinstance(reward, float) and 0 <= reward <= 1, reward
    assert isinstance(terminated, bool) and isinstance(truncated, bool) and info == {}, reply
    assert not truncated or reward <= 0.5, reply
    assert reward < 1 or terminated, reply
    return [text, reward, terminated, truncated]


def _episode(cls: Any, seed: int, choose: Any) -> tuple[bool, list[str]]:
    env = cls()
    text, info = env.reset(seed)
    assert isinstance(text, str) and len(text.split()) <= 25 and info == {}, text
    seen = [text]
    for turn in range(40):
        action = choose(env, turn, seen)
        if action is None:
            return False, seen
        text, reward, terminated, truncated = _checked(env.step(action))
        seen.append(text)
        if terminated or truncated:
            return terminated and reward >= 1, seen
    raise AssertionError("the episode does not end")


def _probe(program: str, seeds: int) -> dict[str, Any]:
    """What the gates of admission measure on one program."""
    cls = _load(program)
    firsts, lengths, solved, answers, deaf = [], [], 0, set(), 0
    legal: set[str] = set()
    for seed in range(seeds):
        env = cls()
        first = env.reset(seed)[0]
        plan = env.solution()
        twin = cls()
        assert (twin.reset(seed)[0], twin.solution()) == (first, plan), "not a function of the seed"
        won, _ = _episode(
            cls, seed, lambda env, turn, seen, plan=plan: plan[turn] if turn < len(plan) else None
        )
        solved += won
        firsts.append(first)
        lengths.append(len(plan))
        answers.add(tuple(plan))
        legal |= set(plan)
        assert " ".join(plan) not in first and ", ".join(plan) not in first, (
            "the first observation holds the answer"
        )
        garbage = [
            "",
            " ",
            "zzz",
            "cheby",
            "1 1 1",
            "a b",
            "\u00b2 \u00b2",
            "x" * 300,
            "{}",
            "-1",
            "1 \u00b2",
        ]
        rng = random.Random(seed)
        words = re.findall(r"\w+", first)
        garbage += [rng.choice(words) + " \u00b2", rng.choice(words) + " 999"]
        _episode(cls, seed, lambda env, turn, seen, rng=rng, garbage=garbage: rng.choice(garbage))
    constants = sorted(legal)

    def from_legal(env: Any, turn: int, seen: list[str]) -> str:
        return rng.choice(constants)

    def from_words(env: Any, turn: int, seen: list[str]) -> str:
        return rng.choice(re.findall(r"\w+", " ".join(seen)))

    def from_pairs(env: Any, turn: int, seen: list[str]) -> str:
        return from_words(env, turn, seen) + " " + from_words(env, turn, seen)

    rng = random.Random(zlib.crc32(program.encode()))  # programs share their luck otherwise
    rates = [
        sum(_episode(cls, seed, choose)[0] for seed in range(4 * seeds)) / (4 * seeds)
        for choose in (from_legal, from_words, from_pairs)
    ]
    constant = max(
        sum(
            _episode(cls, seed, lambda env, turn, seen, action=action: action)[0]
            for seed in range(seeds)
        )
        / seeds
        for action in constants[:12]
    )
    for action in constants:
        reply = env.step(action) if (env := cls()).reset(0) else None
        assert reply and reply[1] < 1, f"{action} wins at once"
        deaf += reply[0] == firsts[0]
    return {
        "solved": solved / seeds,
        "lengths": lengths,
        "firsts": firsts,
        "answers": len(answers),
        "deaf": deaf,
        "constant": constant,
        "random": rates,
    }


def _serve() -> None:
    env: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["op"] == "probe":
                value: Any = _probe(request["program"], request["seeds"])
            elif request["op"] == "open":
                env = _load(request["program"])()
                value = env.reset(request["seed"])[0]
            else:
                value = _checked(env.step(request["action"]))
            answer = {"value": value}
        except Exception as error:  # the answer carries it to the test
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
