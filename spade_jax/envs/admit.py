"""Which programs are played at all: their claims are tried before an episode depends on them.

Gates, in order; the first that refuses names the verdict:
    parse        Python of a bearable size, whose class ending in Env has reset, step, solution
    imports      only the allowed modules are imported, and the clock is not read
    duplicate    it is not a known program again, renamed or with other numbers
    load         the module body runs
    criteria     of a tool task: every message is open, and can be evaluated, at reset
    contract     reset and 25 unhelpful actions neither raise nor hang, on several seeds
    schema       what these return keeps the contract: types, rewards from -1 to 1
    determinism  same seed and actions: same replies and solution in a worker of another zygote,
                 whose addresses, hashes, process id and time are others
    variety      the seeds have several different solutions, and what wins on one seldom wins on
                 the others
    solution     what `solution()` returns can be said and wins on every seed, on an instance never
                 asked for it
    outcomes     not every play is won
    feedback     what is shown before the end depends on what was done, beyond repeating it, and on
                 the instance
    leak         the first observation does not tell the answer, nor do replies to anything
    no_op        doing nothing wins on few of the probe seeds
    constant     repeating one action, or what the program's text holds, wins on few of the probe
                 seeds
    random       drawing actions from the words on show wins on few of the probe seeds, and it is
                 not chance which of several choices wins
A gate that cannot run refuses. A refusal by `infrastructure` is not the program's doing: nobody
earns or pays for it. Environments that were not generated here have no solution to ask for and
pass the gates of `PUBLIC` alone (`admit_public`), and `criteria` if they have messages; the others
are reported as not applicable. Hints have gates of their own (`hint_gates`). Whether a program is
interesting or too hard is not judged here.
"""

import ast
import asyncio
import itertools
from collections.abc import Mapping, Sequence

from spade_jax.envs import leaks, screen, thoughtless, tool_gate
from spade_jax.envs.luck import luck
from spade_jax.envs.pool import Pool
from spade_jax.envs.similarity import near_duplicate
from spade_jax.envs.trial import (
    Play,
    Refused,
    Solved,
    Trial,
    demand,
    replay,
    solve,
)
from spade_jax.types import Fault, Gate, GateResult, Outcome, Verdict

PUBLIC = frozenset({Gate.LOAD, Gate.CONTRACT, Gate.SCHEMA, Gate.DETERMINISM})
"""The gates of imported pools and public environments."""

GENERATED = PUBLIC | {
    Gate.PARSE,
    Gate.IMPORTS,
    Gate.DUPLICATE,
    Gate.CRITERIA,
    Gate.VARIETY,
    Gate.SOLUTION,
    Gate.OUTCOMES,
    Gate.FEEDBACK,
    Gate.LEAK,
    Gate.NO_OP,
    Gate.CONSTANT,
    Gate.RANDOM,
}
"""The gates of programs that the designer wrote."""

HINT_GATES = frozenset({Gate.HINT, Gate.HINT_LEAK, Gate.HINT_COPY})
"""The gates of the hint to an admitted program (`hint_gates`)."""

_CONTRACT_SEEDS = 3
_CONTRACT_STEPS = 25
_CONTRACT_EPISODES = 5  # an episode that ends before its 25 steps is begun again so often
UNHELPFUL = (
    "1",
    "",
    "yes",
    "0",
    "-7.5",
    "look around",
    "ünïcode ☃",
    "a b c\nd",
    "[1, 2]",
    "z" * 5000,
)
"""Actions that no game can have asked for."""
_SAME_FRAC = 0.5  # of plays with another seed's solution that may win
_MIN_SOLUTIONS = 4  # different ones among all seeds, or one for three seeds where these are few


async def admit(
    pool: Pool,
    program: str,
    *,
    solution_seeds: Sequence[int],
    probe_seeds: Sequence[int],
    max_probe_win_frac: float,
    max_turns: int,
    rng_seed: int,
    known: Mapping[str, str],
    duplicate_similarity: float,
) -> Verdict:
    """Pass a generated program through all gates.

    Args:
        solution_seeds: instances that are compared between two processes, and that the program's
            own solution must win.
        probe_seeds: more instances that it must win, and that thoughtless play is tried on.
        max_probe_win_frac: share of the probe seeds that thoughtless play may win.
        max_turns: actions an episode may have.
        rng_seed: of the random player.
        known: programs by environment id that this one must not be like.
        duplicate_similarity: from which a program counts as a known one (`envs.similarity`).
    """
    trial = Trial(
        pool,
        program,
        tuple(dict.fromkeys(solution_seeds)),
        tuple(dict.fromkeys(probe_seeds)),
        max_probe_win_frac,
        max_turns,
        rng_seed,
    )
    try:
        tree = _screen(trial, known, duplicate_similarity)
        await _load(trial)
        await _criteria(trial, tree)
        probes = await _contract(trial)
        solved = await _solve(trial)
        await _determinism(trial, probes, solved)
        plays = _solutions(trial, solved)
        strangers = await thoughtless.strangers(trial, plays)
        _observations(trial, probes, plays, strangers)
        await thoughtless.no_op(trial)
        await thoughtless.constant(trial, plays, screen.literals(tree))
        _unlike(strangers)
        await thoughtless.random(trial, plays)
        await luck(trial, plays)
        trial.passed(Gate.RANDOM)
    except Refused as refusal:
        return trial.verdict(refusal)
    return trial.verdict(None)


async def admit_public(
    pool: Pool, program: str, *, seeds: Sequence[int], deterministic: bool = True
) -> Verdict:
    """Pass an environment that was not generated here through the gates of `PUBLIC`; one that does
    not claim to be deterministic is not held to it."""
    gates = PUBLIC if deterministic else PUBLIC - {Gate.DETERMINISM}
    others = [gate for gate in Gate if gate in (GENERATED | HINT_GATES) - gates]
    trial = Trial(
        pool,
        program,
        tuple(dict.fromkeys(seeds)),
        probe_seeds=(),
        max_win_frac=0.0,
        max_turns=_CONTRACT_STEPS,
        rng_seed=0,
        gates=dict.fromkeys(others, GateResult.NOT_APPLICABLE),
    )
    try:
        await _load(trial)
        await _imported_criteria(trial)
        probes = await _contract(trial)
        if deterministic:
            await _determinism(trial, probes, {})
    except Refused as refusal:
        return trial.verdict(refusal)
    return trial.verdict(None)


def _screen(trial: Trial, known: Mapping[str, str], duplicate_similarity: float) -> ast.Module:
    tree = screen.parse(trial.program)
    trial.passed(Gate.PARSE)
    screen.check_imports(tree)
    trial.passed(Gate.IMPORTS)
    trial.measures["similarity"], reason = near_duplicate(
        trial.program, known, duplicate_similarity
    )
    if reason:
        raise Refused(Gate.DUPLICATE, reason)
    trial.passed(Gate.DUPLICATE)
    return tree


async def _load(trial: Trial) -> None:
    demand(Gate.LOAD, await trial.pool.load(trial.program))
    trial.passed(Gate.LOAD)


async def _criteria(trial: Trial, tree: ast.Module) -> None:
    if not tool_gate.is_tool_program(tree):
        trial.gates[Gate.CRITERIA] = GateResult.NOT_APPLICABLE
        return
    fault = await tool_gate.check_criteria(trial.pool, trial.program, trial.solution_seeds)
    demand(Gate.CRITERIA, fault)
    trial.passed(Gate.CRITERIA)


async def _imported_criteria(trial: Trial) -> None:
    try:
        tree = screen.parse(trial.program, methods=())
    except Refused:  # what this Python cannot read, it could not load either
        return
    if tool_gate.is_tool_program(tree, "ToolUseBaseEnv"):
        seeds = trial.solution_seeds
        demand(
            Gate.CRITERIA,
            await tool_gate.check_imported(trial.pool, trial.program, tree, seeds),
        )
        trial.passed(Gate.CRITERIA)


async def _contract(trial: Trial) -> dict[int, list[Play]]:
    """The gates `contract` and `schema`; returns the plays by seed."""
    seeds = trial.solution_seeds[:_CONTRACT_SEEDS]
    if not seeds:
        raise Refused(Gate.CONTRACT, "there is no seed to try")
    probes = await asyncio.gather(*(_probe(trial, seed, 0) for seed in seeds))
    for probe in probes:
        schema = isinstance(probe, Fault) and probe.outcome is Outcome.SCHEMA
        demand(Gate.SCHEMA if schema else Gate.CONTRACT, probe)
    trial.passed(Gate.CONTRACT, Gate.SCHEMA)
    return {
        seed: probe for seed, probe in zip(seeds, probes, strict=True) if isinstance(probe, list)
    }


async def _probe(trial: Trial, seed: int, replica: int) -> list[Play] | Fault:
    """Play the unhelpful actions; where an episode ends, the next one goes on with them."""
    waiting = list(itertools.islice(itertools.cycle(UNHELPFUL), _CONTRACT_STEPS))
    plays: list[Play] = []
    while waiting and len(plays) < _CONTRACT_EPISODES:
        play = await replay(trial, seed, waiting, replica)
        if isinstance(play, Fault):
            return play
        plays.append(play)
        waiting = waiting[len(play.replies) :]
    return plays


async def _solve(trial: Trial) -> dict[int, Solved | Fault]:
    found = await asyncio.gather(*(solve(trial, seed, 0) for seed in trial.seeds))
    return dict(zip(trial.seeds, found, strict=True))


async def _determinism(
    trial: Trial, probes: Mapping[int, list[Play]], solved: Mapping[int, Solved | Fault]
) -> None:
    """The other worker takes the seeds in reverse, so that state shared between instances shows as
    well."""
    here = [*probes.items(), *((seed, solved[seed]) for seed in trial.solution_seeds if solved)]
    there = await asyncio.gather(
        *(
            _probe(trial, seed, 1) if isinstance(play, list) else solve(trial, seed, 1)
            for seed, play in reversed(here)
        )
    )
    for (seed, play), other in zip(here, reversed(there), strict=True):
        for side in (play, other):
            if isinstance(side, Fault) and (
                side.outcome is Outcome.INFRASTRUCTURE or trial.purse.empty
            ):  # which of the plays that hits is chance
                demand(Gate.DETERMINISM, side)
        if isinstance(play, Fault) and isinstance(other, Fault):
            continue  # texts may hold times and addresses; a later gate refuses
        if play != other:
            raise Refused(
                Gate.DETERMINISM,
                f"seed {seed}: the same actions went otherwise in another process; "
                "draw everything from a generator of the instance, random.Random(seed)",
            )
    trial.passed(Gate.DETERMINISM)


def _solutions(trial: Trial, solved: Mapping[int, Solved | Fault]) -> dict[int, Solved]:
    """The gates `variety` and `solution`."""
    found: dict[int, Solved] = {s: demand(Gate.SOLUTION, value) for s, value in solved.items()}
    different = len({tuple(each.played) for each in found.values()})
    wanted = max(2, min(_MIN_SOLUTIONS, len(found) // 3))
    trial.measures["num_instances"] = different
    if different < wanted:
        raise Refused(
            Gate.VARIETY,
            f"{len(found)} seeds have {different} different solutions; expected at least {wanted}: "
            "draw the instance from the seed",
        )
    trial.passed(Gate.VARIETY)
    trial.measures["num_solution_seeds"] = sum(each.play.won for each in found.values())
    for seed, (actions, play) in found.items():
        if (unsaid := next((each for each in actions if not _sayable(each)), None)) is not None:
            raise Refused(
                Gate.SOLUTION,
                f"seed {seed}: no player can say {unsaid[:60]!r}; an action has balanced braces "
                "and no space at its ends",
            )
        if not play.won:
            reward = f"reward {play.replies[-1].reward:g}" if play.replies else "no reply"
            raise Refused(
                Gate.SOLUTION,
                f"seed {seed}: the solution's {len(actions)} actions do not win in "
                f"{trial.max_turns} turns; they end with {reward}",
            )
    trial.passed(Gate.SOLUTION)
    return found


def _sayable(action: str) -> bool:
    """Whether `\\boxed{...}` can hold an action: it is read to its closing brace, and stripped."""
    depth = 0
    for character in action:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and action == action.strip()


def _unlike(strangers: Sequence[Sequence[Play | Fault]]) -> None:
    """The rest of the gate `variety`: instances that differ in name only are one. It is seen last,
    since what anything wins has a gate of its own."""
    frac = thoughtless.win_frac(Gate.VARIETY, [play for plays in strangers for play in plays])
    if frac > _SAME_FRAC:
        raise Refused(
            Gate.VARIETY, f"what wins on one seed wins on {frac:.0%} of the others; vary the answer"
        )


def _observations(
    trial: Trial,
    probes: Mapping[int, list[Play]],
    solved: Mapping[int, Solved],
    strangers: Sequence[Sequence[Play | Fault]],
) -> None:
    """The gates `outcomes`, `feedback` and `leak`, on plays that are known by now."""
    if all(
        any(play.won and len(play.replies) <= trial.max_turns for play in plays)
        for plays in probes.values()
    ):
        raise Refused(
            Gate.OUTCOMES, "senseless actions win on every seed; let plays be lost as well"
        )
    trial.passed(Gate.OUTCOMES)
    if not any(_acted_on(solved[seed], plays[0]) for seed, plays in probes.items()):
        raise Refused(
            Gate.FEEDBACK,
            "the observations after good and after senseless actions are the same, but for the "
            "end; tell what an action did",
        )
    if all(
        len({_said(play) for play in plays if isinstance(play, Play)}) == 1 for plays in strangers
    ):
        raise Refused(
            Gate.FEEDBACK,
            "the same actions show the same on every seed, though other actions win; let what is "
            "shown depend on the instance",
        )
    trial.passed(Gate.FEEDBACK)
    _leak(trial, probes, solved)
    trial.passed(Gate.LEAK)


def _leak(trial: Trial, probes: Mapping[int, list[Play]], solved: Mapping[int, Solved]) -> None:
    """What the first observation tells, and each answer to a senseless action: these few are held
    against it if they tell on every seed."""
    answers = {seed: each.played for seed, each in solved.items()}
    frac, how = leaks.told_frac({s: each.play.observation for s, each in solved.items()}, answers)
    trial.measures["leak_frac"] = frac
    if frac > trial.max_win_frac:
        raise Refused(
            Gate.LEAK, f"the first observation tells the answer on {frac:.0%} of the seeds, {how}"
        )
    probed = {seed: answers[seed] for seed in probes}
    turns = [plays[0].open_replies for plays in probes.values()]
    if len({tuple(answer) for answer in probed.values()}) < len(probed):
        return
    for replies in zip(*turns, strict=False):
        shown = {seed: reply.observation for seed, reply in zip(probed, replies, strict=True)}
        if leaks.told_frac(shown, probed)[0] == 1.0:
            raise Refused(Gate.LEAK, f"senseless actions are told the answer: {replies[0]}"[:300])


def _acted_on(solved: Solved, probe: Play) -> bool:
    """Whether a turn of two plays of one instance shows different words, echoes left out. The end,
    which says that it was won, counts only where a single action wins."""
    good = solved.play.replies if len(solved.played) == 1 else solved.play.open_replies
    turns = zip(solved.played, good, UNHELPFUL, probe.replies, strict=False)
    for action, reply, other_action, other_reply in turns:
        echoed = {*leaks.words(action), *leaks.words(other_action)}
        mine, other = (
            [word for word in leaks.words(each.observation) if word not in echoed]
            for each in (reply, other_reply)
        )
        if mine != other:
            return True
    return False


def _said(play: Play) -> tuple[str, ...]:
    """What a play shows before it ends."""
    return play.observation, *(reply.observation for reply in play.open_replies)
