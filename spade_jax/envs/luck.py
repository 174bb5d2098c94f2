"""Whether chance decides what wins: the last of the gate `random`. Where it does, the plays of one
instance differ for ever though there is nothing left to learn from them.

Tried is who knows all of an instance but one choice, and guesses that. In the winning actions of
the instance itself are replaced
    what others want   each word that other instances want too, by the words of another one; what
                       only this instance wants stays
    any one word       by made-up words of the same length, a number by the next few

Who has to find the one right thing loses with all of these, and with all he wins where a word does
not matter. That some win and others not is chance; of numbers in a row the first may win, where a
range is asked for.

Not found is chance over what only this instance wants, and over what has to be said in other words
each time. A rule on the letters of any word at all, or on the divisors of a number, is taken for
chance, as it is for whoever guesses.
"""

import asyncio
import itertools
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from spade_jax.envs.trial import Refused, Solved, Trial, demand, replay
from spade_jax.types import Gate

_WORD = re.compile(r"[^\W_]+")
_MAX_GUESSES = 4  # in one instance
_SEEDS = 8  # on which made-up words are tried
_MAX_WORDS = 4  # of a solution that they replace, each by itself
_OTHERS = 3  # that replace one
_MAX_DIGITS = 18  # of a number
_LUCKY_FRAC = 0.25  # of the seeds that chance may seem to decide
_VOWELS, _CONSONANTS = "aeiou", "bdfgklmnprstvz"


class _Choice(NamedTuple):
    """What is tried in place of one choice of an instance's winning actions."""

    seed: int
    is_number: bool  # numbers in a row
    scripts: list[tuple[str, ...]]


async def luck(trial: Trial, solved: Mapping[int, Solved]) -> None:
    """Refuse a program where it is chance which of several choices wins."""
    seeds = trial.probe_seeds
    await _judge(trial, [_guesses(solved, seed) for seed in seeds], len(seeds), "elsewhere")
    made_up = [choice for seed in seeds[:_SEEDS] for choice in _made_up(trial, solved, seed)]
    await _judge(trial, made_up, len(seeds[:_SEEDS]), "nowhere")


async def _judge(trial: Trial, choices: Sequence[_Choice], num_seeds: int, where: str) -> None:
    plays = await asyncio.gather(
        *(replay(trial, each.seed, script, 0) for each in choices for script in each.scripts)
    )
    won = iter([demand(Gate.RANDOM, play).won for play in plays])
    lucky = {
        each.seed
        for each in choices
        if _by_chance(list(itertools.islice(won, len(each.scripts))), each.is_number)
    }
    frac = len(lucky) / max(1, num_seeds)
    if frac > max(_LUCKY_FRAC, trial.max_win_frac):
        raise Refused(
            Gate.RANDOM,
            f"on {frac:.0%} of the seeds some of the words that win {where} win in place of the "
            "right one, by chance; let what is right follow from what is shown",
        )


def _by_chance(won: Sequence[bool], is_number: bool) -> bool:
    """Whether some won and others not; of numbers in a row, one after another that lost."""
    if is_number:
        return any(later and not earlier for earlier, later in itertools.pairwise(won))
    return len(set(won)) > 1


def _guesses(solved: Mapping[int, Solved], seed: int) -> _Choice:
    others = {other: each.played for other, each in solved.items() if other != seed}
    known = frozenset(word for played in others.values() for word in _words(played))
    guesses = (_guess(solved[seed].played, played, known) for played in others.values())
    different = dict.fromkeys(guess for guess in guesses if guess)
    return _Choice(seed, False, list(different)[:_MAX_GUESSES])


def _made_up(trial: Trial, solved: Mapping[int, Solved], seed: int) -> Iterator[_Choice]:
    """For some words that not every instance wants, first of all those that are not on show."""
    rng = random.Random(f"{trial.rng_seed} {seed}")
    fixed = frozenset.intersection(*(frozenset(_words(each.played)) for each in solved.values()))
    played, observation = solved[seed].played, solved[seed].play.observation
    shown = frozenset(_words([observation]))
    free = [word for word in _words(played) if word not in fixed]
    for word in sorted(free, key=shown.__contains__)[:_MAX_WORDS]:
        scripts = [_replaced(played, word, other) for other in _others(word, rng)]
        yield _Choice(seed, _is_number(word), scripts)


def _words(actions: Sequence[str]) -> list[str]:
    """The words of actions, each once, in lower case."""
    return list(dict.fromkeys(word for each in actions for word in _WORD.findall(each.lower())))


def _guess(
    own: Sequence[str], other: Sequence[str], known: frozenset[str]
) -> tuple[str, ...] | None:
    """An instance's winning actions with another's words for those that are known from other
    instances; None unless that changes something and leaves something."""
    mine, theirs = ([_WORD.findall(each) for each in actions] for actions in (own, other))
    if [len(words) for words in mine] != [len(words) for words in theirs]:
        return None
    guess = []
    for action, my_words, their_words in zip(own, mine, theirs, strict=True):
        pairs = zip(my_words, their_words, strict=True)
        words = iter([other if word.lower() in known else word for word, other in pairs])
        guess.append(_WORD.sub(lambda _, words=words: next(words), action))
    is_known = known.issuperset(_words(own))
    return None if is_known or guess == list(own) else tuple(guess)


def _replaced(actions: Sequence[str], word: str, other: str) -> tuple[str, ...]:
    """The actions with another word for one, wherever it stands."""
    return tuple(
        _WORD.sub(lambda found: other if found[0].lower() == word else found[0], action)
        for action in actions
    )


def _others(word: str, rng: random.Random) -> Iterator[str]:
    """What is said in place of a word: the numbers that follow it, or made-up words."""
    for step in range(1, _OTHERS + 1):
        if _is_number(word):
            yield str(int(word) + step).zfill(len(word))
        else:
            length = max(3, len(word))
            yield "".join(rng.choice((_CONSONANTS, _VOWELS)[at % 2]) for at in range(length))


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= _MAX_DIGITS
