"""Which programs are played at all: their claims are tried before an episode depends on them.

Gates, in order; the first that refuses names the verdict:
    parse        Python of a bearable size, whose class ending in Env has reset, step, solution
    imports      only the allowed modules are imported
    load         the module body runs
    criteria     of a tool task: every message is open, and can be evaluated, at reset
    contract     reset and up to 25 unhelpful actions keep the contract, on several seeds
    determinism  same seed and actions: same replies and solution in a worker of another zygote
    variety      the seeds are not all one instance
    solution     what `solution()` returns wins on every seed, on an instance never asked for it
    constant     repeating one action wins on few of the probe seeds
    random       drawing actions from the words on show wins on few of the probe seeds
A gate that cannot run refuses. A refusal by `INFRASTRUCTURE` is not the program's doing: nobody
earns or pays for it. Whether a program is interesting, novel or too hard is not judged here.
"""

import ast
import asyncio
import itertools
import random
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spade_jax.envs import api, tool_gate
from spade_jax.envs.limits import ALLOWED_IMPORTS
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Measures, Outcome, Reply, Verdict

INFRASTRUCTURE = "infrastructure"
_METHODS = frozenset({"reset", "step", "solution"})
_CONTRACT_SEEDS = 3
_CONTRACT_STEPS = 25
_UNHELPFUL = (
    "1",
    "",
    "yes",
    "0",
    "-7.5",
    "look around",
    "ünïcode ☃",
    "a b c\nd",
    "[1, 2]",
    "z" * 300,
)
_GENERIC = ("1", "yes", "a")  # tried as constant actions of any program
_TOKENS = re.compile(r"[\"'`]([^\"'`\n]{1,60})[\"'`]|(-?\d+(?:\.\d+)?|[^\W\d]\w*)")
_MAX_CANDIDATES = 400  # of the random player, the newest
_SAME_WIN_FRAC = 1e-9  # slack when a fraction is compared with its limit

Transcript = tuple[str, tuple[Reply, ...]]  # first observation, replies


@dataclass(frozen=True)
class _Plan:
    """One admission: the program and how it is tried."""

    pool: Pool
    program: str
    solution_seeds: tuple[int, ...]
    probe_seeds: tuple[int, ...]
    max_probe_win_frac: float
    max_turns: int
    rng_seed: int
    measures: Measures = field(default_factory=Measures)  # filled as gates are reached


class _Refused(Exception):
    def __init__(self, gate: str, reason: str) -> None:
        super().__init__(gate, reason)
        self.gate = gate
        self.reason = reason


async def admit(
    pool: Pool,
    program: str,
    *,
    solution_seeds: Sequence[int],
    probe_seeds: Sequence[int],
    max_probe_win_frac: float,
    max_turns: int,
    rng_seed: int,
) -> Verdict:
    """Pass `program` through all gates.

    Args:
        solution_seeds: instances that the program's own solution must win; at least two.
        probe_seeds: instances that constant and random play are tried on.
        max_probe_win_frac: share of the probe seeds that either may win.
        max_turns: actions an episode may have.
        rng_seed: of the random player.
    """
    plan = _Plan(
        pool,
        program,
        tuple(dict.fromkeys(solution_seeds)),
        tuple(dict.fromkeys(probe_seeds)),
        max_probe_win_frac,
        max_turns,
        rng_seed,
    )
    try:
        tree = _parse(program)
        _check_imports(tree)
        _demand("load", await pool.load(program))
        if tool_gate.is_tool_program(tree):
            fault = await tool_gate.check_criteria(pool, program, plan.solution_seeds)
            _demand(tool_gate.GATE, fault)
        probes = await _contract(plan)
        solutions = await _determinism(plan, probes)
        await _constant(plan, solutions)
        await _random(plan, solutions)
    except _Refused as refusal:
        return Verdict(False, refusal.gate, refusal.reason, plan.measures)
    return Verdict(True, measures=plan.measures)


def _parse(program: str) -> ast.Module:
    """The gate `parse`; the text is parsed, never run."""
    if problem := api.program_problem(program):
        raise _Refused("parse", problem)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _Refused("parse", f"{type(error).__name__}: {error}"[:200]) from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    name = next((name for name in reversed(classes) if name.endswith("Env")), None)
    if name is None:
        raise _Refused("parse", "the program defines no class whose name ends in Env")
    if missing := sorted(_METHODS - _methods(name, classes)):
        raise _Refused("parse", f"{name} has no {', '.join(missing)}")
    return tree


def _methods(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Methods of a class and of those of its bases that the program defines."""
    found: set[str] = set()
    waiting, seen = [name], set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in classes:
            continue
        seen.add(current)
        found |= {node.name for node in classes[current].body if isinstance(node, ast.FunctionDef)}
        bases = tool_gate.base_names(classes[current])
        found = found.union(*(tool_gate.PROVIDES.get(base, ()) for base in bases))
        waiting += bases
    return found


def _check_imports(tree: ast.Module) -> None:
    """The gate `imports`: a rule that keeps programs portable. Walls are around the worker."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        elif isinstance(node, ast.Name) and node.id == "__import__":
            names = [node.id]
        else:
            continue
        for name in names:
            if name.partition(".")[0] not in ALLOWED_IMPORTS:
                raise _Refused("imports", f"line {node.lineno}: import of {name} is not allowed")


def _demand(gate: str, value: Any) -> Any:
    """`value`, unless it is a fault: that refuses, for the gate or for our own failure."""
    if isinstance(value, Fault):
        gate = INFRASTRUCTURE if value.outcome is Outcome.INFRASTRUCTURE else gate
        raise _Refused(gate, f"{value.outcome}: {value.detail}")
    return value


async def _contract(plan: _Plan) -> list[Transcript]:
    seeds = plan.solution_seeds[:_CONTRACT_SEEDS]
    probes = await asyncio.gather(*(_probe(plan, seed, 0) for seed in seeds))
    return [_demand("contract", probe) for probe in probes]


async def _determinism(plan: _Plan, probes: list[Transcript]) -> dict[int, list[str]]:
    """The gates `determinism`, `variety` and `solution`, which look at the same plays; returns the
    solutions.

    The other worker takes the seeds in reverse, so that state shared between instances shows as
    well.
    """
    seeds = plan.solution_seeds
    solved = await asyncio.gather(*(_solve(plan, seed, 0) for seed in seeds))
    again = await asyncio.gather(
        *(_probe(plan, seed, 1) for seed in reversed(seeds[: len(probes)])),
        *(_solve(plan, seed, 1) for seed in reversed(seeds)),
    )
    there = [*again[: len(probes)][::-1], *again[len(probes) :][::-1]]
    for seed, here, other in zip(
        (*seeds[: len(probes)], *seeds), (*probes, *solved), there, strict=True
    ):
        _compare(seed, here, other)
    if not solved:
        raise _Refused("solution", "there is no seed to try the solution on")
    plays = [_demand("solution", play) for play in solved]
    if all(play == plays[0] for play in plays):
        raise _Refused(
            "variety",
            f"all {len(plays)} seeds give one and the same instance; draw it from the seed",
        )
    solutions: dict[int, list[str]] = {}
    for seed, (solution, (_, replies)) in zip(seeds, plays, strict=True):
        if replies and api.is_win(replies[-1]):
            solutions[seed] = solution
    plan.measures["num_solution_seeds"] = len(solutions)
    for seed, (solution, (_, replies)) in zip(seeds, plays, strict=True):
        if seed not in solutions:
            reward = f"reward {replies[-1].reward:g}" if replies else "no reply"
            raise _Refused(
                "solution",
                f"seed {seed}: the solution's {len(solution)} actions do not win in "
                f"{plan.max_turns} turns; they end with {reward}",
            )
    return solutions


def _compare(seed: int, here: Any, there: Any) -> None:
    for play in (here, there):
        if isinstance(play, Fault) and play.outcome is Outcome.INFRASTRUCTURE:
            _demand("determinism", play)
    if isinstance(here, Fault) and isinstance(there, Fault):
        return  # texts may hold times and addresses
    if here != there:
        raise _Refused(
            "determinism",
            f"seed {seed}: the same actions went otherwise in another process; "
            "draw everything from a generator of the instance, random.Random(seed)",
        )


async def _constant(plan: _Plan, solutions: dict[int, list[str]]) -> None:
    donor = next(iter(solutions))
    actions = dict.fromkeys((solutions[donor][0], solutions[donor][-1], *_GENERIC))
    seeds = [seed for seed in plan.probe_seeds if seed != donor]
    worst_frac = -1.0
    for action in actions:
        plays = (_replay(plan, seed, [action] * plan.max_turns, 0) for seed in seeds)
        frac = _win_frac("constant", await asyncio.gather(*plays))
        worst_frac = max(worst_frac, frac)
        plan.measures["constant_win_frac"] = worst_frac
        _limit(plan, "constant", frac, f"repeating {action[:40]!r}")


async def _random(plan: _Plan, solutions: dict[int, list[str]]) -> None:
    plays = await asyncio.gather(*(_wander(plan, seed, solutions) for seed in plan.probe_seeds))
    plan.measures["random_win_frac"] = _win_frac("random", plays)
    _limit(plan, "random", plan.measures["random_win_frac"], "drawing actions at random")


def _win_frac(gate: str, plays: Sequence[Transcript | Fault]) -> float:
    if not plays:
        raise _Refused(gate, "there is no probe seed to play")
    transcripts = [_demand(gate, play) for play in plays]
    return sum(bool(replies) and api.is_win(replies[-1]) for _, replies in transcripts) / len(
        transcripts
    )


def _limit(plan: _Plan, gate: str, frac: float, how: str) -> None:
    if frac > plan.max_probe_win_frac + _SAME_WIN_FRAC:
        raise _Refused(
            gate, f"{how} wins on {frac:.0%} of the seeds; at most {plan.max_probe_win_frac:.0%}"
        )


async def _solve(plan: _Plan, seed: int, replica: int) -> tuple[list[str], Transcript] | Fault:
    """Ask one instance for its solution; try it on another, which asking cannot have prepared."""
    instance = await plan.pool.open(plan.program, seed, replica)
    if isinstance(instance, Fault):
        return instance
    solution = await instance.solution()
    await instance.close()
    if isinstance(solution, Fault):
        return solution
    play = await _replay(plan, seed, solution[: plan.max_turns], replica)
    return play if isinstance(play, Fault) else (solution, play)


async def _probe(plan: _Plan, seed: int, replica: int) -> Transcript | Fault:
    return await _replay(
        plan, seed, itertools.islice(itertools.cycle(_UNHELPFUL), _CONTRACT_STEPS), replica
    )


async def _replay(
    plan: _Plan, seed: int, actions: Iterable[str], replica: int
) -> Transcript | Fault:
    """Play fixed actions until they or the episode end."""
    instance = await plan.pool.open(plan.program, seed, replica)
    if isinstance(instance, Fault):
        return instance
    replies: list[Reply] = []
    try:
        for action in actions:
            reply = await instance.step(action)
            if isinstance(reply, Fault):
                return reply
            replies.append(reply)
            if reply.terminated or reply.truncated:
                break
    finally:
        await instance.close()
    return instance.observation, tuple(replies)


async def _wander(plan: _Plan, seed: int, solutions: dict[int, list[str]]) -> Transcript | Fault:
    """Play actions drawn from what observations show and from the solutions of other seeds."""
    instance = await plan.pool.open(plan.program, seed, 0)
    if isinstance(instance, Fault):
        return instance
    try:
        return await _draw(plan, instance, seed, solutions)
    finally:
        await instance.close()


async def _draw(
    plan: _Plan, instance: Instance, seed: int, solutions: dict[int, list[str]]
) -> Transcript | Fault:
    rng = random.Random(f"{plan.rng_seed} {seed}")
    borrowed = [
        action for donor, solution in solutions.items() if donor != seed for action in solution
    ]
    candidates = dict.fromkeys((*borrowed, *_tokens(instance.observation)))
    replies: list[Reply] = []
    for _ in range(plan.max_turns):
        reply = await instance.step(
            rng.choice(list(candidates)[-_MAX_CANDIDATES:] or list(_GENERIC))
        )
        if isinstance(reply, Fault):
            return reply
        replies.append(reply)
        if reply.terminated or reply.truncated:
            break
        candidates |= dict.fromkeys(_tokens(reply.observation))
    return instance.observation, tuple(replies)


def _tokens(observation: str) -> list[str]:
    return [quoted or word for quoted, word in _TOKENS.findall(observation[:4000])]
