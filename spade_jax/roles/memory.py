"""The designer's memory: what earlier environments were and how they taught. First in, first out,
and, where near-duplicates are not allowed, no two records alike (`diversity`): the newer one stays.

What is shown of a record is a setting. One line is for small policies: class name, the words it was
built on, win rate and regret. A summary, or the whole program of a record that teaches, comes with
what it brought, and one to avoid with the reason and what it was. As in the reference, it can also
be the beginning of a program, and of one to avoid its name.
"""

import ast
import dataclasses
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from spade_jax.config import MemoryConfig
from spade_jax.roles.digests import digest
from spade_jax.roles.diversity import Likeness

Shows = Literal["line", "summary", "program", "excerpt"]

EXCERPT_CHARS = 2000  # of the reference
MAX_WORDS_SHOWN = 3
MAX_WORD_LETTERS = 24  # a longer name or word is cut: the program is model text


@dataclass(frozen=True)
class Record:
    """One earlier environment. `regret` is what is credited of it (`rewards.caution`), None when no
    pair of plays was left to measure it.
    """

    environment_id: str
    skill: str
    summary: str
    win_rate: float
    regret: float | None
    cycle: int
    program: str


def summary(program: str) -> str:
    """Class name and the first words a program is built on, such as "DialEnv of cheby, ripple".

    Raises:
        SyntaxError: the program does not parse (admitted programs do).
    """
    with warnings.catch_warnings(action="ignore"):  # of its escapes: it is not our text
        tree = ast.parse(program)
    names = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Env")
    ]
    words = [
        element.value
        for node in ast.walk(tree)
        if isinstance(node, ast.List | ast.Tuple)
        for element in node.elts
        if isinstance(element, ast.Constant)
        and isinstance(element.value, str)
        and element.value.isalpha()
    ]
    shown = [word[:MAX_WORD_LETTERS] for word in list(dict.fromkeys(words))[:MAX_WORDS_SHOWN]]
    name = names[-1][-MAX_WORD_LETTERS:] if names else "Env"
    return name + (" of " + ", ".join(shown) if shown else "")


def render(record: Record, learnable: bool, shows: Shows = "line") -> str:
    """One record for the designer's prompt: a line, or a block of several."""
    regret = "unknown" if record.regret is None else f"{record.regret:.2f}"
    fault = f"too {'easy' if record.win_rate > 0.5 else 'hard'}"
    if shows == "line":
        told = f"won {record.win_rate:.2f}, regret {regret}" if learnable else f"was {fault}"
        return f"{record.summary} {told}"
    won = f"the player won {record.win_rate:.0%} of its plays without a hint"
    if not learnable:
        what = f" It was environment {record.environment_id}."
        if shows != "excerpt":
            what = "\n" + digest(record.program)
        return f"To avoid, {fault} to learn from: {won}.{what}"
    if shows == "summary":
        shown = digest(record.program)
    else:
        program = record.program[:EXCERPT_CHARS] if shows == "excerpt" else record.program
        shown = f"```python\n{program.strip()}\n```"
    return f"It taught: {won}, regret {regret}.\n{shown}"


class Memory:
    """Bounded list of records, oldest out first, with seeded retrieval."""

    def __init__(self, config: MemoryConfig, records: Sequence[Record] = ()) -> None:
        self.config = config
        self.records = list(records)

    def add(self, record: Record, likeness: Likeness | None = None) -> None:
        """Append, replacing an older record of the same environment, and by `likeness` those that
        the new one is a near-duplicate of.
        """
        known = {old.environment_id for old in self.records}
        kept = [old for old in self.records if old.environment_id != record.environment_id]
        if likeness is not None and record.environment_id not in known:
            kept = [
                old
                for old in kept
                if not likeness.nearest(record.program, {old.environment_id: old.program}).reason
            ]
        self.records = [*kept, record][-self.config.size :] if self.config.size else []

    def draw(self, skill: str, rng: random.Random) -> list[str]:
        """Rendered records for one design: learnable ones of the skill by regret, then others to
        avoid.

        From the best max(3n, 10) learnable records n are drawn, as in the reference (section 7).
        """
        same = [record for record in self.records if record.skill == skill]
        low, high = self.config.win_low, self.config.win_high
        learnable = [record for record in same if low <= record.win_rate <= high]
        low, high = low - self.config.avoid_margin, high + self.config.avoid_margin
        others = [record for record in same if not low <= record.win_rate <= high]
        best = sorted(learnable, key=lambda r: -(r.regret if r.regret is not None else -1.0))
        best = best[: max(3 * self.config.positives, 10)]
        shown = rng.sample(best, min(self.config.positives, len(best)))
        avoid = rng.sample(others, min(self.config.negatives, len(others)))
        shows = self.config.shows
        return [render(record, True, shows) for record in shown] + [
            render(record, False, shows) for record in avoid
        ]

    def state(self) -> list[dict]:
        """JSON-able records."""
        return [dataclasses.asdict(record) for record in self.records]

    def restore(self, state: Sequence[dict]) -> None:
        """Take the records of `state()` back."""
        self.records = [Record(**record) for record in state]
