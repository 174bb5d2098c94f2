"""What an environment family is: a generator of complete programs with a hint and an expert that
plays them.

The families are the teaching material of the warm start. They run like any generated program, in a
worker; nothing here executes a program.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Player(Protocol):
    """An expert that sees what the agent sees: the observations of one episode, one at a time."""

    def act(self, observation: str) -> tuple[str, str]:
        """Return (a short thought, the unboxed action) for the newest observation."""
        ...


@dataclass(frozen=True)
class Draw:
    """One program drawn from a family.

    `player(hinted, rng)` starts an expert for one episode. Hinted, it may use what the hint says;
    unhinted, only what the observations say, so that the agent can learn to do the same.
    """

    family: str
    skill: str
    program: str
    hint: str
    player: Callable[[bool, random.Random], Player]


@dataclass(frozen=True)
class Family:
    """A parametrised environment. `draw(rng, terms, difficulty)`: `terms` are at least 3 rare words
    of a document.
    """

    name: str
    skill: str
    class_name: str
    draw: Callable[[random.Random, Sequence[str], str], Draw]


def pick_terms(rng: random.Random, terms: Sequence[str], count: int) -> list[str]:
    """Draw `count` distinct terms, in their order of appearance.

    Raises:
        ValueError: fewer than `count` distinct terms are given.
    """
    distinct = list(dict.fromkeys(terms))
    if len(distinct) < count:
        raise ValueError(f"{len(distinct)} distinct terms given, {count} needed: {distinct}")
    return [distinct[index] for index in sorted(rng.sample(range(len(distinct)), count))]


def by_difficulty(difficulty: str, easy: int, medium: int, hard: int) -> int:
    """Pick the parameter that belongs to the difficulty word."""
    return {"easy": easy, "medium": medium, "hard": hard}[difficulty]
