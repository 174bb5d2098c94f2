"""A covering table: rows in which every two values of every two options meet, if they may.

Greedy and without chance: of all whole rows that are allowed, the one that covers most of what is
left is taken, the first of equals.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence

Row = dict[str, str]
Pair = tuple[str, str, str, str]


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """Every two options of a row with their values."""
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(sorted(row), 2)}


def covering(options: Mapping[str, Sequence[str]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Rows in which each pair is that is in any allowed row."""
    every = [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]
    rows = [(row, pairs_of(row)) for row in every if allowed(row)]
    left = set().union(*(pairs for _, pairs in rows))
    table: list[Row] = []
    while left:
        row, pairs = max(rows, key=lambda each: len(each[1] & left))
        table.append(row)
        left -= pairs
    return table


OPTIONS: dict[str, tuple[str, ...]] = {
    "reward": (
        "blend",
        "regret",
        "learning_potential",
        "solve_rate",
        "micro_learning_potential",
        "frontier",
    ),
    "source": ("policy", "folder", "rlve"),
    "setting": ("games", "tools"),
    "memory": ("on", "off"),
    "corpus": ("on", "off"),
    "designer": ("trained", "untrained"),
    "thinking": ("off", "on"),
}


def may_be(row: Row) -> bool:
    """What the configuration allows: only what the policy wrote is trained on, and the problems of
    RLVE have no hints.
    """
    hints = row["reward"] in ("blend", "regret")
    return not (
        (row["source"] != "policy" and row["designer"] == "trained")
        or (row["source"] == "rlve" and hints)
    )
