"""What goes into a designer's prompt, and what comes out of it. No wording."""

from dataclasses import dataclass
from typing import Literal

from spade_jax.roles_config import DesignPrompt, Difficulty

Variant = Literal["happy", "conditional", "discovery", "decline"]
"""What is special about one message of a tool task: nothing; it holds for what was read; a value
must be found out; it cannot be met and must be declined."""


@dataclass(frozen=True)
class Material:
    """What one design is asked for."""

    kind: DesignPrompt
    skill: str
    difficulty: Difficulty
    max_turns: int  # actions that a player may take
    document: str = ""  # the excerpt to ground the design in
    terms: tuple[str, ...] = ()  # its rare words, named in the compact prompt
    memory: tuple[str, ...] = ()  # rendered records of earlier environments
    ideas: tuple[str, ...] = ()  # examples of the skill
    domain: str = ""  # of a tool task
    variant: Variant = "happy"  # of a tool task
    asks_hint: bool = False  # the completion shall hold the hint as well


@dataclass(frozen=True)
class Prompt:
    """A first message and who it is said to."""

    text: str
    persona: str | None = None  # the system message


@dataclass(frozen=True)
class Size:
    """What a difficulty word means: bounds of a design."""

    least_steps: int  # actions of the shortest way to win, at least
    most_steps: int
    turns: int  # the program's own limit
    hidden: int  # hidden values of an instance, at least


SIZES: dict[Difficulty, Size] = {
    "easy": Size(2, 5, 8, 3),
    "medium": Size(4, 9, 14, 6),
    "hard": Size(7, 15, 22, 10),
}


def game_size(difficulty: Difficulty, max_turns: int) -> Size:
    """The size of a game that fits the turns a player has."""
    size = SIZES[difficulty]
    turns = min(size.turns, max_turns)
    most = max(1, min(size.most_steps, 3 * turns // 4))
    return Size(min(size.least_steps, most), most, turns, size.hidden)


@dataclass(frozen=True)
class ToolSize:
    """The same for a tool task."""

    messages: tuple[int, int]
    tools: tuple[int, int]
    calls: tuple[int, int]  # of one message
    changes: int  # that depend on each other, at least, in a single task
    distractors: int
    records: tuple[int, int]
    turns: int
    partial: bool  # no single call shows all that is needed


TOOL_SIZES: dict[Difficulty, ToolSize] = {
    "easy": ToolSize((3, 4), (3, 4), (1, 3), 3, 1, (10, 15), 12, False),
    "medium": ToolSize((3, 5), (4, 6), (2, 5), 4, 1, (15, 25), 18, False),
    "hard": ToolSize((4, 5), (6, 8), (4, 8), 6, 2, (25, 50), 25, True),
}
