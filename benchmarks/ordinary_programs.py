"""Whether the sandbox leaves ordinary programs alone: they play in it as they do without it.

    python benchmarks/ordinary_programs.py [--library 120] [--designs 100] [--seeds 5]

Programs of the environment library, and those of the shipped weights that admission could load, are
played to the end in confined workers, on each seed once with their own solution and once with
random actions. The same actions are then played by a plain interpreter that knows nothing of this
project, with other hashes. The goals: enough programs, all of them alike in both, none killed or in
quarantine. What a program itself raises is no fault of the sandbox's if it does so in both. The
last line is JSON.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

from admission import draws
from designs import ROOT, design_all, opened_stage

from spade_jax.cli import load_config
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.trial import GENERIC, tokens
from spade_jax.types import Fault, Gate, GateResult, Outcome, Reply

GOAL = 200
MAX_STEPS = 200
KILLED = (Outcome.TIMEOUT, Outcome.WORKER_DIED, Outcome.PROTOCOL, Outcome.INFRASTRUCTURE)
PLAIN = """
import json, sys, types


def play(code, seed, actions):
    module = types.ModuleType("environment")
    sys.modules["environment"] = module
    said, operation = [], "open"
    try:
        exec(code, module.__dict__)
        made = [value for value in module.__dict__.values() if isinstance(value, type)]
        own = [each for each in made if each.__module__ == "environment"]
        env = [each for each in own if each.__name__.endswith("Env")][-1]()
        result = env.reset(seed)
        said.append(result[0] if isinstance(result, tuple) else result)
        operation = "step"
        for action in actions:
            said.append(list(env.step(action)[:4]))
    except BaseException as error:
        said.append(f"{operation}: {type(error).__name__}")
    return said


for line in sys.stdin:
    program, plays = json.loads(line)
    code = compile(program, "<environment>", "exec")
    print(json.dumps([play(code, seed, actions) for seed, actions in plays]), flush=True)
"""


class Play(NamedTuple):
    """One episode in the sandbox."""

    seed: int
    actions: list[str]
    said: list[Any]  # first observation, replies, and how a fault begins
    ended: bool
    outcome: Outcome | None  # of a fault


async def play(pool: Pool, program: str, seed: int, script: list[str] | None) -> Play:
    """One episode with the actions of `script`, or with random ones, to the end."""
    instance = await pool.open(program, seed)
    if isinstance(instance, Fault):
        return Play(seed, [], [_begins(instance)], True, instance.outcome)
    rng = random.Random(seed)
    said: list[Any] = [instance.observation]
    actions: list[str] = []
    shown, known = instance.observation, dict.fromkeys(GENERIC)
    ended, outcome = False, None
    while not ended and len(actions) < (MAX_STEPS if script is None else len(script)):
        known |= dict.fromkeys(tokens(shown))
        actions.append(rng.choice(list(known)) if script is None else script[len(actions)])
        reply = await instance.step(actions[-1])
        if isinstance(reply, Reply):
            said.append([shown := reply.observation, *dataclasses.astuple(reply)[1:]])
            ended = reply.terminated or reply.truncated
        else:
            said.append(_begins(reply))
            ended, outcome = True, reply.outcome
    await instance.close()
    return Play(seed, actions, said, ended, outcome)


def _begins(fault: Fault) -> str:
    """The operation and the exception's name, which a plain interpreter tells as well."""
    if fault.outcome is Outcome.ENV_ERROR:
        return ": ".join(fault.detail.split(": ")[:2])
    return f"{fault.outcome}: {fault.detail}"


async def play_all(programs: list[str], num_seeds: int) -> tuple[list[list[Play]], Counter, int]:
    """All plays of each program, the faults by outcome, and how many programs are in quarantine."""
    gate = asyncio.Semaphore(4)
    async with Pool(Limits()) as pool:
        print(pool.sandbox.line())

        async def both(program: str, seed: int) -> list[Play]:
            plays = [await play(pool, program, seed, None)]
            instance = await pool.open(program, seed)
            if not isinstance(instance, Fault):
                solution = await instance.solution()
                await instance.close()
                if not isinstance(solution, Fault):
                    plays.append(await play(pool, program, seed, solution))
            return plays

        async def one(program: str) -> list[Play]:
            async with gate:
                found = await asyncio.gather(*(both(program, seed) for seed in range(num_seeds)))
                return [each for plays in found for each in plays]

        played = await asyncio.gather(*map(one, programs))
        stats = pool.stats()
        print(f"{stats.steps} steps, {stats.spawned} workers, {stats.retries} requests made again")
        return played, Counter(stats.faults), stats.quarantined


def differing(programs: list[str], played: list[list[Play]]) -> int:
    """Plays that a plain interpreter plays otherwise; prints the first ones."""
    plain = subprocess.Popen(
        [sys.executable, "-c", PLAIN],
        env=os.environ | {"PYTHONHASHSEED": "12345"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert plain.stdin is not None and plain.stdout is not None
    count = 0
    for program, plays in zip(programs, played, strict=True):
        asked = [(each.seed, each.actions) for each in plays]
        plain.stdin.write(json.dumps([program, asked]) + "\n")
        plain.stdin.flush()
        for each, told in zip(plays, json.loads(plain.stdout.readline()), strict=True):
            if told != each.said:
                count += 1
                if count <= 3:
                    print(f"  seed {each.seed}: {each.said[-1]!r} here, {told[-1]!r} plainly")
    plain.stdin.close()
    plain.wait()
    return count


def designed(count: int) -> list[str]:
    """Programs of the shipped weights that admission could load, all different."""
    config = load_config(ROOT / "configs" / "tiny.py")
    with opened_stage(config) as stage:
        found = design_all(stage, config, count, 0)
    loaded = (
        each.source.program
        for each in found
        if each.source and each.verdict.gates.get(Gate.LOAD) == GateResult.PASSED
    )
    return list(dict.fromkeys(loaded))


def main() -> None:
    """Play in the sandbox and plainly, and print the goals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--library", type=int, default=120)
    parser.add_argument("--designs", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    library = [draw.program for draw in draws(arguments.library, seed=7)]
    policys = designed(arguments.designs) if arguments.designs else []
    programs = list(dict.fromkeys([*library, *policys]))
    print(f"{len(set(library))} programs of the library, {len(policys)} of the policy")
    start = time.perf_counter()
    played, faults, quarantined = asyncio.run(play_all(programs, arguments.seeds))
    plays = [each for found in played for each in found]
    print(
        f"{len(plays)} episodes in {time.perf_counter() - start:.0f} s, "
        f"{sum(not each.ended for each in plays)} of which their script ran out; "
        f"faults { ({str(outcome): count for outcome, count in faults.items()}) }"
    )
    goals = [
        ("ordinary_programs", len(programs), GOAL, len(programs) >= GOAL),
        ("played_otherwise_than_plainly", count := differing(programs, played), 0, count == 0),
        ("killed", count := sum(faults[outcome] for outcome in KILLED), 0, count == 0),
        ("in_quarantine", quarantined, 0, quarantined == 0),
    ]
    names = ("name", "value", "goal", "holds")
    print(json.dumps({"goals": [dict(zip(names, goal, strict=True)) for goal in goals]}))


if __name__ == "__main__":
    main()
