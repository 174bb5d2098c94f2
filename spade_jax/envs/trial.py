"""One admission under way: what is tried, what is known so far, and the plays that gates look at.

Every play is made of fixed or seeded actions in the pool's workers, so the same program and seeds
give the same plays. A play that cannot be finished is a `Fault`, data for the gate that asked.
"""

import itertools
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spade_jax.envs import api
from spade_jax.envs.limits import Purse
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Gate, GateResult, Measures, Outcome, Reply, Verdict

GENERIC = ("1", "yes", "a")  # tried as actions of any program
_TOKENS = re.compile(r"[\"'`]([^\"'`\n]{1,60})[\"'`]|(-?\d+(?:\.\d+)?|[^\W\d]\w*)")
_MAX_SHOWN = 4000  # characters of an observation whose words are tried as actions
_MAX_CANDIDATES = 400  # of the random player, the newest
_MAX_REASON = 500
_SAME_WIN_FRAC = 1e-9  # slack when a fraction is compared with its limit


class Play(NamedTuple):
    """First observation and replies of one episode, as far as it was played."""

    observation: str
    replies: tuple[Reply, ...]

    @property
    def won(self) -> bool:
        return bool(self.replies) and api.is_win(self.replies[-1])

    @property
    def open_replies(self) -> tuple[Reply, ...]:
        """The replies after which the episode goes on."""
        last = self.replies[-1:]
        return (
            self.replies[:-1]
            if last and (last[0].terminated or last[0].truncated)
            else self.replies
        )


class Solved(NamedTuple):
    """What an instance says wins, and how that went on another one of the same seed."""

    solution: list[str]
    play: Play

    @property
    def played(self) -> list[str]:
        """The actions that were played: what comes after the win is no part of the answer."""
        return self.solution[: len(self.play.replies)]


class Refused(Exception):
    """The end of an admission."""

    def __init__(self, gate: Gate, reason: str) -> None:
        super().__init__(gate, reason)
        self.gate = gate
        self.reason = reason


@dataclass(frozen=True)
class Trial:
    """The program, how it is tried, and what was found so far."""

    pool: Pool
    program: str
    solution_seeds: tuple[int, ...]
    probe_seeds: tuple[int, ...]
    max_win_frac: float
    max_turns: int
    rng_seed: int
    measures: Measures = field(default_factory=Measures)
    gates: dict[str, str] = field(default_factory=dict)
    purse: Purse = field(default_factory=Purse)

    def __post_init__(self) -> None:
        self.purse.left_s = self.pool.limits.trial_s
        self.purse.left_bytes = api.MAX_TRIAL_BYTES

    async def open(self, seed: int, replica: int = 0) -> Instance | Fault:
        """An instance of the program, whose time counts as the trial's."""
        return await self.pool.open(self.program, seed, replica, self.purse)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Every seed that is tried, once."""
        return tuple(dict.fromkeys(self.solution_seeds + self.probe_seeds))

    def passed(self, *gates: Gate) -> None:
        """Note that the program got through."""
        for gate in gates:
            self.gates[gate] = GateResult.PASSED

    def verdict(self, refusal: Refused | None) -> Verdict:
        """The result, once admission has ended."""
        if refusal is None:
            return Verdict(True, measures=self.measures, gates=self.gates)
        results = self.gates | {refusal.gate: GateResult.REFUSED}
        reason = refusal.reason  # it may quote the program
        if len(reason) > _MAX_REASON:
            reason = f"{reason[: _MAX_REASON - 3]}..."
        reason = "".join(c if c.isprintable() else "?" for c in reason)
        return Verdict(False, refusal.gate, reason, self.measures, results)


def demand(gate: Gate, value: Any) -> Any:
    """`value`, unless it is a fault: that refuses, for the gate or for our own failure."""
    if isinstance(value, Fault):
        gate = Gate.INFRASTRUCTURE if value.outcome is Outcome.INFRASTRUCTURE else gate
        raise Refused(gate, f"{value.outcome}: {value.detail}")
    return value


def win_frac(gate: Gate, plays: Sequence[Play | Fault]) -> float:
    """Share of the plays that were won; refuses when there is none or one is a fault."""
    if not plays:
        raise Refused(gate, "there is no probe seed to play")
    return sum(demand(gate, play).won for play in plays) / len(plays)


def limit(trial: Trial, gate: Gate, frac: float, how: str) -> None:
    """Refuse what wins on more seeds than playing without a thought may."""
    if frac > trial.max_win_frac + _SAME_WIN_FRAC:
        raise Refused(
            gate, f"{how} wins on {frac:.0%} of the seeds; at most {trial.max_win_frac:.0%}"
        )


async def solve(trial: Trial, seed: int, replica: int) -> Solved | Fault:
    """Ask one instance for its solution; try it on another, which asking cannot have prepared."""
    instance = await trial.open(seed, replica)
    if isinstance(instance, Fault):
        return instance
    actions = await instance.solution()
    await instance.close()
    if isinstance(actions, Fault):
        return actions
    play = await replay(trial, seed, actions[: trial.max_turns], replica)
    return play if isinstance(play, Fault) else Solved(actions, play)


async def replay(trial: Trial, seed: int, actions: Iterable[str], replica: int) -> Play | Fault:
    """Play fixed actions until they or the episode end."""
    left = iter(actions)
    return await _play(trial, seed, replica, lambda _: next(left, None))


async def repeat(trial: Trial, seed: int, actions: Sequence[str]) -> Play | Fault:
    """Play the same actions over and over, until the last turn."""
    cycled = itertools.islice(itertools.cycle(actions), trial.max_turns)
    return await replay(trial, seed, cycled, 0)


async def wander(
    trial: Trial, seed: int, candidates: Iterable[str], *, observe: bool = True
) -> Play | Fault:
    """Play actions drawn at random from the candidates and, unless `observe` is off, from the words
    that the observations show."""
    rng = random.Random(f"{trial.rng_seed} {seed}")
    known = dict.fromkeys(candidates)
    turns = itertools.count()

    def say(shown: str) -> str | None:
        if next(turns) == trial.max_turns:
            return None
        known.update(dict.fromkeys(tokens(shown) if observe else ()))
        return rng.choice(list(known)[-_MAX_CANDIDATES:] or list(GENERIC))

    return await _play(trial, seed, 0, say)


async def echo(trial: Trial, seed: int, script: Sequence[str]) -> Play | Fault:
    """Play the script over and over, but before it goes on each word of a reply that no reply has
    shown before, the last one first."""
    heard: set[str] = set()
    waiting: list[str] = []
    cycled = itertools.cycle(script)
    turns = itertools.count()

    def say(shown: str) -> str | None:
        turn = next(turns)
        new = [word for word in dict.fromkeys(tokens(shown)) if word not in heard]
        heard.update(new)
        if turn:
            waiting.extend(new)
        if turn == trial.max_turns:
            return None
        return waiting.pop() if waiting else next(cycled)

    return await _play(trial, seed, 0, say)


async def _play(
    trial: Trial, seed: int, replica: int, say: Callable[[str], str | None]
) -> Play | Fault:
    """Play what `say` answers to each observation, until it has no answer or the episode ends."""
    instance = await trial.open(seed, replica)
    if isinstance(instance, Fault):
        return instance
    replies: list[Reply] = []
    shown = instance.observation
    try:
        while (action := say(shown)) is not None:
            reply = await instance.step(action)
            if isinstance(reply, Fault):
                return reply
            replies.append(reply)
            if reply.terminated or reply.truncated:
                break
            shown = reply.observation
    finally:
        await instance.close()
    return Play(instance.observation, tuple(replies))


def tokens(text: str) -> list[str]:
    """Words, numbers and quoted phrases of a text, in order."""
    return [quoted or word for quoted, word in _TOKENS.findall(text[:_MAX_SHOWN])]
