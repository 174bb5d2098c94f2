"""Which hints are shown: to help is allowed, to play the game for the player is not.

Gates, in order; the first that refuses names the verdict:
    hint         there is one, of a bearable length, without code or a boxed action
    hint_leak    it does not contain the winning actions of an instance, in a row or with other
                 words between them; of calls of tools, not all values that the instance hides;
                 nor a word of them that play would not show, such as a password
    hint_copy    players that copy from it and think of nothing win on few of the probe seeds
A gate that cannot run refuses. Whether a hint is true or of use is not judged here: the regret
tells.
"""

import asyncio
import functools
import re
from collections.abc import Mapping, Sequence

from spade_jax.envs import forms, leaks
from spade_jax.envs.admit import UNHELPFUL
from spade_jax.envs.pool import Pool
from spade_jax.envs.trial import (
    Play,
    Refused,
    Solved,
    Trial,
    demand,
    echo,
    limit,
    repeat,
    replay,
    solve,
    tokens,
    wander,
    win_frac,
)
from spade_jax.types import Fault, Gate, Verdict

_WORD_CHARS = 12  # that a word may have on average: signs and spaces are no words, but are read
_ALWAYS_FRAC = 0.9  # share of instances that no short piece of a word is in by chance
_SEVERAL = 5  # instances of which that can be said
_CLAUSE = re.compile(r"[.,;:!?\n]+\s*|\s(?:then|and)\s")
_QUOTED = re.compile(r"[\"'`]([^\"'`\n]+)[\"'`]")


async def admit_hint(
    pool: Pool,
    program: str,
    hint: str | None,
    *,
    solution_seeds: Sequence[int],
    probe_seeds: Sequence[int],
    max_probe_win_frac: float,
    max_turns: int,
    rng_seed: int,
    max_words: int,
) -> Verdict:
    """Pass the hint to an admitted program through the gates; the arguments are those of
    `admit.admit`, and the most words a hint may have."""
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
        text = _form(hint, max_words)
        trial.passed(Gate.HINT)
        solved = await _leak(trial, text)
        trial.passed(Gate.HINT_LEAK)
        await _copy(trial, text, solved)
        trial.passed(Gate.HINT_COPY)
    except Refused as refusal:
        return trial.verdict(refusal)
    return trial.verdict(None)


def _form(hint: str | None, max_words: int) -> str:
    """The gate `hint`; returns the hint."""
    if not hint:
        raise Refused(Gate.HINT, "no hint was written")
    if (count := len(leaks.words(hint))) > max_words:
        raise Refused(Gate.HINT, f"hint of {count} words; at most {max_words} are allowed")
    if len(hint) > (max_chars := max_words * _WORD_CHARS):
        raise Refused(Gate.HINT, f"hint of {len(hint)} characters; at most {max_chars} are allowed")
    if "```" in hint or "\\boxed" in hint:
        raise Refused(Gate.HINT, "hint contains code or a boxed action")
    return hint


async def _leak(trial: Trial, hint: str) -> dict[int, Solved]:
    """The gate `hint_leak`; returns what wins, by seed.

    A long answer in the hint is refused on a single seed; a short one, or one with other words in
    between, stands there by chance as well and is refused on as many as thoughtless play may win.
    """
    if not trial.seeds:
        raise Refused(Gate.HINT_LEAK, "there is no seed to try")
    asked = await asyncio.gather(*(solve(trial, seed, 0) for seed in trial.seeds))
    solved: list[Solved] = [demand(Gate.HINT_LEAK, answer) for answer in asked]
    for actions in (each.played for each in solved):
        if len(leaks.said(actions)) >= leaks.LONG and leaks.contains(hint, actions):
            raise Refused(Gate.HINT_LEAK, f"hint contains the winning actions {str(actions)[:200]}")
    rule = _same_everywhere([each.played for each in solved])
    told = sum(
        leaks.names_in_order(hint, each.played)
        or leaks.joins(hint, each.played)
        or leaks.fills_in(hint, each.played, rule.union(leaks.words(each.play.observation)))
        for each in solved
    )
    if (frac := told / len(solved)) > trial.max_win_frac:
        raise Refused(Gate.HINT_LEAK, f"hint names the winning actions of {frac:.0%} of the seeds")
    by_seed = dict(zip(trial.seeds, solved, strict=True))
    await _secrets(trial, hint, by_seed)
    return by_seed


async def _secrets(trial: Trial, hint: str, solved: Mapping[int, Solved]) -> None:
    """Refuse a hint with a word of winning actions that nobody finds by play, as it is shown
    neither at first, nor to senseless actions, nor to the winning ones that do without it: with
    such a word everybody wins, without it nobody can learn to."""
    wanted = [
        (seed, piece)
        for seed, each in solved.items()
        for piece in leaks.handed_over(hint, each.played)
        if not leaks.shows(each.play.observation, piece)
    ]
    found = await asyncio.gather(
        *(_is_found(trial, seed, solved[seed].played, piece) for seed, piece in wanted)
    )
    secret: dict[str, set[int]] = {}
    for (seed, piece), is_found in zip(wanted, found, strict=True):
        if not is_found:
            secret.setdefault(piece, set()).add(seed)
    for piece, seeds in secret.items():
        if len(piece) < leaks.CHANCE and (
            len(solved) < _SEVERAL or len(seeds) < _ALWAYS_FRAC * len(solved)
        ):
            seeds.clear()
    frac = len(set().union(*secret.values())) / len(solved)
    if frac > trial.max_win_frac:
        worst = max(secret, key=lambda piece: len(secret[piece]))
        raise Refused(
            Gate.HINT_LEAK,
            f"hint hands over what winning actions need and no observation shows, {worst!r} "
            f"among it, on {frac:.0%} of the seeds",
        )


async def _is_found(trial: Trial, seed: int, actions: Sequence[str], piece: str) -> bool:
    """Whether play shows a piece of a word to who does not know it."""
    others = [action for action in actions if piece not in leaks.pieces(leaks.said([action]))]
    for script in (others, UNHELPFUL[: trial.max_turns]):
        play: Play = demand(Gate.HINT_LEAK, await replay(trial, seed, script, 0))
        if any(leaks.shows(reply.observation, piece) for reply in play.replies):
            return True
    return False


def _same_everywhere(solutions: Sequence[Sequence[str]]) -> set[str]:
    """Words that every instance wants: a rule, not an answer. One instance alone shows none."""
    if len(solutions) < 2:
        return set()
    return functools.reduce(set.intersection, (set(leaks.said(each)) for each in solutions))


async def _copy(trial: Trial, hint: str, solved: Mapping[int, Solved]) -> None:
    """The gate `hint_copy`: players that say, over and over, the actions that the hint names, its
    words, its quotes, its clauses or all of it, the first three also with what replies show in
    between, one that draws from all these at random, and one that calls tools with its words."""
    legal = dict.fromkeys(action for each in solved.values() for action in each.played)
    named = leaks.named(hint, list(legal))
    clauses = [clause for part in _CLAUSE.split(hint) if (clause := part.strip(" \"'`"))]
    scripts = (named, tokens(hint), _QUOTED.findall(hint), clauses, [hint])
    candidates = [action for script in scripts for action in script]
    for script in dict.fromkeys(tuple(script) for script in scripts if script):
        plays = await asyncio.gather(*(repeat(trial, seed, script) for seed in trial.probe_seeds))
        _judge(trial, plays, f"saying {str(script)[1:60]}")
    for script in dict.fromkeys(tuple(script) for script in scripts[:3] if script):
        plays = await asyncio.gather(*(echo(trial, seed, script) for seed in trial.probe_seeds))
        _judge(trial, plays, f"saying what replies show, and {str(script)[1:60]}")
    plays = await asyncio.gather(
        *(wander(trial, seed, candidates, observe=False) for seed in trial.probe_seeds)
    )
    _judge(trial, plays, "drawing from the hint at random")
    said = tokens(hint)
    calls = {s: forms.actions(solved[s].play.observation, said) for s in trial.probe_seeds}
    if all(calls.values()):
        plays = await asyncio.gather(*(repeat(trial, seed, calls[seed]) for seed in calls))
        _judge(trial, plays, "calling tools with words of the hint")


def _judge(trial: Trial, plays: Sequence[Play | Fault], how: str) -> None:
    frac = win_frac(Gate.HINT_COPY, plays)
    worst_frac = max(frac, trial.measures.get("hint_copy_win_frac", 0.0))
    trial.measures["hint_copy_win_frac"] = worst_frac
    limit(trial, Gate.HINT_COPY, frac, how)
