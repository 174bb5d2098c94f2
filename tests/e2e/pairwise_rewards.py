"""What the designs of a pairwise run should have earned, by hand out of the files it wrote: two
cycles of three steps, the first designs due at step 1, the second ones at the last step.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REFUSED = -0.5
DUE = {0: (0, (0, 1)), 1: (2, (2,))}
"""By cycle: the step that wrote it, and the steps whose plays count."""
SLOW = 0.85  # weight of the new value in the tracker of the learning potential

Episodes = Sequence[dict[str, Any]]


def returns(plays: Episodes, **chosen: Any) -> list[float]:
    """Returns of the plays that have these values."""
    return [
        each["episode_return"]
        for each in plays
        if all(each[name] == value for name, value in chosen.items())
    ]


def win_rate(plays: Episodes) -> float:
    return statistics.fmean(value == 1.0 for value in returns(plays, arm="unhinted"))


def anchor(plays: Episodes) -> float:
    """The plateau of the win rate, times the share of the wins' variance within instances."""
    rate = win_rate(plays)
    seeds = [
        [value == 1.0 for value in returns(plays, arm="unhinted", seed=seed)]
        for seed in {each["seed"] for each in plays}
    ]
    num = sum(map(len, seeds))
    # unbiased, as a sample of n has it: sums of squares over n - 1
    within = sum(statistics.variance(map(float, wins)) * len(wins) for wins in seeds) / num
    total = statistics.variance([float(win) for wins in seeds for win in wins])
    share = min(1.0, within / total) if total else 1.0
    return share * max(0.0, 1 - max(0.4 - rate, rate - 0.6, 0.0) / 0.25)


def regret(plays: Episodes, step: int) -> float:
    """Mean difference of the pairs of the step that wrote the environment."""
    pairs = [
        (each["episode_return"], *returns(plays, arm="unhinted", step=step, **pair))
        for each in plays
        if each["arm"] == "hinted" and each["step"] == step
        for pair in [{name: each[name] for name in ("seed", "play_index")}]
    ]
    return statistics.fmean(hinted - unhinted for hinted, unhinted in pairs)


def of_one(kind: str, plays: Episodes, step: int, slow: float) -> float | None:
    """What one admitted design earns; None where it cannot be measured."""
    match kind:
        case "solve_rate":
            return anchor(plays)
        case "frontier":
            return -((win_rate(plays) - 0.5) ** 2) / 0.08
        case "regret":
            return max(0.0, regret(plays, step))
        case "blend":
            gap = min(1.0, max(0.0, regret(plays, step) / 0.15))
            return 0.6 * anchor(plays) + 0.4 * gap
        case "learning_potential":
            return abs(statistics.fmean(returns(plays, arm="unhinted")) - slow)
    steps = [returns(plays, step=each) for each in sorted({each["step"] for each in plays})]
    if kind != "micro_learning_potential" or len(steps) < 2:
        return None
    return max(0.0, statistics.fmean(steps[1]) - statistics.fmean(steps[0]))


def earned(kind: str, folder: Path, episodes: Episodes) -> dict[int, list[float]]:
    """Rewards of all designs by the step in which they come due; the admitted ones first."""
    found: dict[int, list[float]] = {}
    slow: dict[str, float] = {}
    for cycle, (written, steps) in DUE.items():
        records = [
            json.loads(path.read_text())
            for path in sorted((folder / "environments" / f"{cycle:03d}").glob("*.json"))
        ]
        plays = {
            record["environment_id"]: [
                each
                for each in episodes
                if each["environment_id"] == record["environment_id"] and each["step"] in steps
            ]
            for record in records
        }
        skill_of = {record["environment_id"]: record["source"]["skill"] for record in records}
        for skill in set(skill_of.values()):
            mean = statistics.fmean(
                value
                for name, own in plays.items()
                if skill_of[name] == skill
                for value in returns(own, arm="unhinted")
            )
            slow[skill] = (1 - SLOW) * slow.get(skill, mean) + SLOW * mean
        rewards = [of_one(kind, own, written, slow[skill_of[name]]) for name, own in plays.items()]
        refused = [
            json.loads(path.read_text())["verdict"]["gate"] != "infrastructure"
            for path in (folder / "rejected" / f"{cycle:03d}").glob("*.json")
        ]
        found[max(steps)] = [each for each in rewards if each is not None]
        found[max(steps)] += [REFUSED] * sum(refused)
    return found
