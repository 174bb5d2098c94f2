"""Players that do not think, and the gates `no_op`, `constant` and `random`: a program that one of
them wins too often teaches nothing.

They do nothing, repeat one action, say what the program's text holds, or draw actions at random.
None of them reads an observation for its meaning. What wins on one seed is tried on others here as
well; the gates `variety` and `feedback` look at how that goes.
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from spade_jax.envs.trial import (
    GENERIC,
    Play,
    Solved,
    Trial,
    demand,
    limit,
    repeat,
    replay,
    wander,
    win_frac,
)
from spade_jax.types import Fault, Gate

_NO_OPS = ("", "wait")
_MAX_DONORS = 3  # seeds whose solutions are played on others
_LITERAL_SEEDS = 2
_MAX_SUSPECTS = 8


async def no_op(trial: Trial) -> None:
    """The gate `no_op`."""
    await _repeated(trial, Gate.NO_OP, [[action] for action in _NO_OPS], trial.probe_seeds)
    trial.passed(Gate.NO_OP)


async def strangers(trial: Trial, solved: Mapping[int, Solved]) -> list[list[Play | Fault]]:
    """Plays of the probe seeds with what wins on some other seeds: a list for each of these."""
    donors = list(solved)[:_MAX_DONORS]
    return [
        list(
            await asyncio.gather(
                *(replay(trial, seed, solved[donor].played, 0) for seed in _others(trial, donor))
            )
        )
        for donor in donors
    ]


async def constant(trial: Trial, solved: Mapping[int, Solved], literals: Sequence[str]) -> None:
    """The gate `constant`; `literals` are texts that the program holds."""
    donor = next(iter(solved))
    actions = dict.fromkeys((*solved[donor].played, *GENERIC))
    seeds = _others(trial, donor)
    await _repeated(trial, Gate.CONSTANT, [[action] for action in actions], seeds)
    await _repeated(trial, Gate.CONSTANT, await _suspects(trial, literals), seeds)
    trial.passed(Gate.CONSTANT)


async def random(trial: Trial, solved: Mapping[int, Solved]) -> None:
    """The gate `random` but for `luck`: draws from what is shown and from what wins elsewhere."""
    plays = await asyncio.gather(
        *(
            # a list: a generator would look at `seed` when the plays run, and then find the last
            wander(
                trial, seed, [a for s, each in solved.items() if s != seed for a in each.solution]
            )
            for seed in trial.probe_seeds
        )
    )
    trial.measures["random_win_frac"] = win_frac(Gate.RANDOM, plays)
    limit(trial, Gate.RANDOM, trial.measures["random_win_frac"], "drawing actions at random")


async def _suspects(trial: Trial, literals: Sequence[str]) -> list[list[str]]:
    """Scripts that won when all the literals were said, one after the other: the last action, and
    all actions of that play."""
    found: dict[tuple[str, ...], None] = {}
    for seed in trial.probe_seeds[:_LITERAL_SEEDS]:
        waiting = list(literals)
        while waiting and len(found) < _MAX_SUSPECTS:
            play: Play = demand(
                Gate.CONSTANT, await replay(trial, seed, waiting[: trial.max_turns], 0)
            )
            said = waiting[: len(play.replies)]
            if play.won:
                found |= dict.fromkeys((tuple(said[-1:]), tuple(said)))
            waiting = waiting[len(said) :]
    return [list(script) for script in found]


async def _repeated(
    trial: Trial, gate: Gate, scripts: Iterable[Sequence[str]], seeds: Sequence[int]
) -> None:
    """Refuse a program in which repeating one of the scripts wins on too many of the seeds."""
    for script in scripts:
        plays = await asyncio.gather(*(repeat(trial, seed, script) for seed in seeds))
        told = repr(script[0] if len(script) == 1 else list(script))[:60]
        _note(trial, gate, win_frac(gate, plays), f"repeating {told}")


def _note(trial: Trial, gate: Gate, frac: float, how: str) -> None:
    """Keep the worst share that a gate has seen, and refuse if it is too large."""
    measure = "no_op_win_frac" if gate is Gate.NO_OP else "constant_win_frac"
    trial.measures[measure] = max(frac, trial.measures.get(measure, 0.0))
    limit(trial, gate, frac, how)


def _others(trial: Trial, donor: int) -> list[int]:
    return [seed for seed in trial.probe_seeds if seed != donor]
