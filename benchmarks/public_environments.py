"""Which public environments play through the pool, and are the same again in another process.

    python benchmarks/public_environments.py [--packages reasoning_gym rlve textarena gem bfcl]
                                             [--package-path FOLDER ...]

Needs the extra `environments` and `bfcl-eval` without its dependencies (BUILD.md, "Public
environments"); no jax. Every environment of the catalogues is reset on two seeds and played with
its package's reference answer, or else a fixed script, in workers of two zygotes that take the
seeds in opposite order. Limits are the defaults of a run. Variants of one size or another and
copies of a game in two packages count once. The last line is JSON.
"""

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spade_jax.envs import adapters
from spade_jax.envs.adapters import Listed
from spade_jax.envs.api import is_win
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Reply

SEEDS = (1, 2)
SCRIPT = ("1", "up", "0 0", "a", "left", "1 2", "hit", "reveal 0 0", "down", "A C", "stop", "1 1 1")
GOAL = 520
AT_ONCE = 4
NOT_LISTED = {
    "textarena": "games for two players or more: an environment here has one player",
    "gem": "rg:* is Reasoning Gym again; math, code, logic, qa and eval sets want the network",
    "bfcl": "APIs for memory and web search: vendor packages, embeddings or the network",
}

Transcript = tuple[str, tuple[Reply, ...]]
Played = tuple[Transcript, bool]


class Result(NamedTuple):
    """What became of one environment."""

    listed: Listed
    problem: str  # why it does not run; "" if it does
    unequal: str  # what differs between the two zygotes; "" if nothing
    reference: bool  # whether the package has a reference answer
    won: bool  # whether it wins on every seed


async def play(pool: Pool, program: str, seed: int, replica: int) -> Played | Fault:
    """One scripted episode, and whether the script was the package's reference answer."""
    instance = await pool.open(program, seed, replica)
    if isinstance(instance, Fault):
        return instance
    solution = await instance.solution()
    await instance.close()
    # A missing reference ends an instance, and asking may draw random numbers: play another.
    instance = await pool.open(program, seed, replica)
    if isinstance(instance, Fault):
        return instance
    replies: list[Reply] = []
    try:
        for action in SCRIPT if isinstance(solution, Fault) else solution:
            reply = await instance.step(action)
            if isinstance(reply, Fault):
                return reply
            replies.append(reply)
            if reply.terminated or reply.truncated:
                break
    finally:
        await instance.close()
    return (instance.observation, tuple(replies)), not isinstance(solution, Fault)


async def judge(pool: Pool, package: str, listed: Listed) -> Result:
    """Play one environment on all seeds in both zygotes."""
    program = adapters.program(package, listed.id)
    here = await asyncio.gather(*(play(pool, program, seed, 0) for seed in SEEDS))
    there = await asyncio.gather(*(play(pool, program, seed, 1) for seed in reversed(SEEDS)))
    for play_ in (*here, *there):
        if isinstance(play_, Fault):
            return Result(listed, f"{play_.outcome}: {play_.detail}", "", False, False)
    unequal = ""
    for seed, one, other in zip(SEEDS, here, reversed(there), strict=True):
        if one != other:
            unequal = f"seed {seed}: {_difference(one, other)}"
    reference = all(play_[1] for play_ in here if not isinstance(play_, Fault))
    won = reference and all(
        is_win(play_[0][1][-1]) for play_ in here if not isinstance(play_, Fault) and play_[0][1]
    )
    return Result(listed, "", unequal, reference, won)


def _difference(one: object, other: object) -> str:
    first, second = repr(one), repr(other)
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
    return f"...{first[max(0, at - 20) : at + 30]!r} and ...{second[max(0, at - 20) : at + 30]!r}"


async def run_package(package: str, package_path: Sequence[str]) -> tuple[list[Result], int]:
    """Results of a package and the number of requests that they took."""
    listed = adapters.catalogue(package, package_path)
    gate = asyncio.Semaphore(AT_ONCE)
    async with Pool(Limits(), packages=(package,), package_path=package_path) as pool:

        async def one(entry: Listed) -> Result:
            async with gate:
                return await judge(pool, package, entry)

        results = await asyncio.gather(*(one(entry) for entry in listed))
        return results, pool.stats().requests


def report(package: str, results: list[Result], requests: int) -> None:
    """Print what ran of a package, and all that did not or is not the same twice, with the why."""
    ran = [result for result in results if not result.problem]
    claims = [result for result in ran if not result.listed.unseeded]
    print(
        f"{package:14} listed {len(results):4}  ran {len(ran):4}  "
        f"families {len({result.listed.family for result in ran}):4}  "
        f"claim to be deterministic {len(claims):4}, are {sum(not r.unequal for r in claims):4}  "
        f"with reference {sum(result.reference for result in ran):4}, "
        f"which wins {sum(result.won for result in ran):4}  ({requests} requests)"
    )
    if package in NOT_LISTED:
        print(f"    not listed: {NOT_LISTED[package]}")
    for result in results:
        name = result.listed.id
        if result.problem:
            print(f"    does not run: {name}: {' '.join(result.problem.split())[:160]}")
        elif result.unequal:
            print(f"    not the same twice: {name}: {result.listed.unseeded or result.unequal}")
        elif result.reference and not result.won:
            print(f"    its own reference is not accepted: {name}")


def main() -> None:
    """Run the packages one after another and print the goals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--packages", nargs="+", default=list(adapters.PACKAGES))
    parser.add_argument("--package-path", nargs="*", default=[])
    arguments = parser.parse_args()
    owners: Counter[str] = Counter()
    unsound = 0
    for package in arguments.packages:
        results, requests = asyncio.run(run_package(package, arguments.package_path))
        report(package, results, requests)
        for result in results:
            owners[result.listed.family] += not result.problem
            unsound += bool(result.unequal and not result.listed.unseeded)
    distinct = sum(count > 0 for count in owners.values())
    goals = [
        {
            "name": "distinct_environments",
            "value": distinct,
            "goal": GOAL,
            "holds": distinct >= GOAL,
        },
        {
            "name": "claims_of_determinism_that_fail",
            "value": unsound,
            "goal": 0,
            "holds": unsound == 0,
        },
    ]
    print(json.dumps({"goals": goals}))


if __name__ == "__main__":
    main()
