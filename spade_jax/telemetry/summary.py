"""The plain account of a finished run, read back from its `metrics.jsonl`: what happened and what
changed.

First and last cycle are compared, since a single step of a small run is mostly noise. Plots are not
here.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COMPARED = (
    ("agent/return_unhinted_mean", "agent return without hint"),
    ("agent/return_hinted_mean", "agent return with hint"),
    ("designer/admitted_frac", "designs admitted"),
    ("designer/regret_mean", "regret"),
    ("designer/reward_mean", "designer reward"),
    ("designer/learnable_frac", "learnable share"),
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a `metrics.jsonl`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def average(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    """Mean of a metric over steps, weighted by its `_count` where it has one; None if it was never
    measured.
    """
    pairs = [(line[name], line.get(f"{name}_count", 1)) for line in lines if name in line]
    weight = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / weight if weight else None


def changes(lines: Sequence[dict[str, Any]]) -> list[tuple[str, float | None, float | None]]:
    """(label, first cycle, last cycle) of the compared metrics."""
    cycles = [line["progress/cycle"] for line in lines]
    first = [line for line in lines if line["progress/cycle"] == min(cycles)]
    last = [line for line in lines if line["progress/cycle"] == max(cycles)]
    return [(label, average(first, name), average(last, name)) for name, label in _COMPARED]


def summary(lines: Sequence[dict[str, Any]], moved: float | None) -> str:
    """Markdown account of a run; `moved` is the relative distance the weights went."""
    attempted = sum(line.get("designer/attempted_count", 0) for line in lines)
    admitted = sum(line.get("designer/admitted_count", 0) for line in lines)
    episodes = sum(
        value for line in lines for name, value in line.items() if name.startswith("agent/outcome_")
    )
    updates = sum("optim/grad_norm" in line for line in lines)
    gap = next(
        (line[name] for line in lines if (name := "sampler/learner_logprob_gap_max") in line), None
    )
    seconds = sum(line["time/step_s"] for line in lines)
    rows = [f"| {label} | {_number(old)} | {_number(new)} |" for label, old, new in changes(lines)]
    return "\n".join(
        [
            "# Summary",
            "",
            f"- {len(lines)} steps, {updates} optimiser updates, "
            f"{lines[-1]['progress/cycle'] + 1} designer cycles, "
            f"{seconds / 60:.1f} minutes",
            f"- {attempted} designs, {admitted} admitted; {episodes} episodes played",
            *(f"- {text}" for text in _unsafe(lines)),
            f"- the weights moved by {_number(moved, '.2e')} of their norm",
            f"- sampler and learner log-probabilities differed by at most "
            f"{_number(gap, '.1e')} on the first batch",
            "",
            "| | first cycle | last cycle |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def closing(lines: Sequence[dict[str, Any]], moved: float | None, folder: str) -> str:
    """The last lines a user sees: where the run is and what changed."""
    told = [
        f"  {label}: {_number(old)} -> {_number(new)}"
        for label, old, new in changes(lines)
        if old is not None or new is not None
    ]
    return "\n".join(
        [
            f"run folder: {folder}  (start with summary.md, then environments/ and episodes/)",
            "first cycle -> last cycle:",
            *told,
            *(f"  {text}" for text in _unsafe(lines)),
            f"  weights moved by {_number(moved, '.2e')} of their norm",
        ]
    )


def _unsafe(lines: Sequence[dict[str, Any]]) -> list[str]:
    count = sum("sandbox/unsafe" in line for line in lines)
    return [f"sandbox=unsafe: programs of {count} steps were not contained"] if count else []


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)
