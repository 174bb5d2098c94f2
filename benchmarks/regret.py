"""What each estimator of the regret pays for a useless hint and for a true one.

    python benchmarks/regret.py [--tries 10000] [--instances 4] [--gain 0.0] [--seed 0]

Scripted players that win by a coin, 16 plays in each arm, on four instances with four plays each,
and as many unhinted plays on new instances in each of three later steps. A useless hint leaves the
win rate as it is, a true one adds 0.15. In the rows `equal` every instance has the same win rate;
in `unequal` half have a higher one and half a lower one. `--gain` is what the unhinted win rate
rises by in each later step, as the agent learns.

Printed is the regret's term of the blend, clip(credited regret / 0.15, 0, 1): its mean for either
hint, how often the true one earns more than the useless one, and how often both earn the same. The
reference's arms see instances of their own, as there. The last line is JSON.
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from spade_jax.reward_config import RewardConfig
from spade_jax.rewards.blend import regret_term
from spade_jax.rewards.caution import Caution, credited
from spade_jax.rewards.regret import Estimator, PairKey, Regret, regret

PLAYS, LATER_STEPS = 4, 3
GAP = 0.15
RATES = (0.1, 0.3, 0.5)
SPREAD = 0.9  # of what win rates may differ by between instances, in the rows `unequal`
REFERENCE_PLAYS, REFERENCE_AT_HALF = 16, 0.33  # what its recipe pays a useless hint
USELESS_GOAL, TOLERANCE = 0.11, 0.015
ROWS: tuple[tuple[Estimator, Caution], ...] = (
    ("reference", "none"),
    ("paired", "none"),
    ("paired", "shrunk"),
    ("paired", "lower_bound"),
    ("accumulated", "none"),
    ("accumulated", "shrunk"),
    ("accumulated", "lower_bound"),
)


def arm(rng: np.random.Generator, rates: np.ndarray) -> dict[PairKey, float | None]:
    """Plays of one arm, by the win rate of each instance."""
    wins = rng.random((len(rates), PLAYS)) < rates[:, None]
    return {(s, p): float(wins[s, p]) for s in range(len(rates)) for p in range(PLAYS)}


def instances(rng: np.random.Generator, count: int, rate: float, unequal: bool) -> np.ndarray:
    """Win rates without hint, one for each instance."""
    spread = SPREAD * min(rate, 1 - rate - GAP) if unequal else 0.0
    return rate + spread * rng.choice((-1.0, 1.0), count)


def measured(
    rng: np.random.Generator, count: int, rate: float, gap: float, gain: float, unequal: bool
) -> Iterator[Regret]:
    """One environment's regret by each of ROWS, all from the same plays."""
    here = instances(rng, count, rate, unequal)
    unhinted, hinted = arm(rng, here), arm(rng, here + gap)
    elsewhere = arm(rng, instances(rng, count, rate, unequal) + gap)
    epoch = list(unhinted.values())
    for step in range(1, LATER_STEPS + 1):
        later = np.clip(instances(rng, count, rate, unequal) + gain * step, 0, 1)
        epoch += arm(rng, later).values()
    for estimator, _ in ROWS:
        first = elsewhere if estimator == "reference" else hinted
        found = regret(estimator, first, unhinted, [value for value in epoch if value is not None])
        assert found is not None
        yield found


def paid(
    rng: np.random.Generator,
    tries: int,
    count: int,
    rate: float,
    gap: float,
    gain: float,
    unequal: bool,
) -> np.ndarray:
    """The regret's term by try and row."""
    reward = RewardConfig()
    numbers = {"prior": reward.regret_prior, "errors": reward.regret_errors}
    return np.array(
        [
            [
                regret_term(credited(found, caution, **numbers), reward.regret_scale)
                for found, (_, caution) in zip(
                    measured(rng, count, rate, gap, gain, unequal), ROWS, strict=True
                )
            ]
            for _ in range(tries)
        ]
    )


def main() -> None:
    """Print the table and hold it to the goals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tries", type=int, default=10000)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--gain", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng = np.random.default_rng(arguments.seed)
    useless: dict[tuple[Estimator, Caution], list[float]] = {row: [] for row in ROWS}
    ranks: dict[tuple[Estimator, Caution], list[float]] = {row: [] for row in ROWS}
    reference_at_half = float("nan")
    print(
        "| Instances | Win rate | Estimator | Caution | Useless | True | True earns more | Same |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for unequal in (False, True):
        for rate in RATES:
            low = paid(
                rng, arguments.tries, arguments.instances, rate, 0.0, arguments.gain, unequal
            )
            high = paid(
                rng, arguments.tries, arguments.instances, rate, GAP, arguments.gain, unequal
            )
            for index, row in enumerate(ROWS):
                a, b = low[:, index], high[:, index]
                more, same = float((b > a).mean()), float((b == a).mean())
                label = f"{'unequal' if unequal else 'equal'} | {rate} | {row[0]} | {row[1]}"
                print(f"| {label} | {a.mean():.3f} | {b.mean():.3f} | {more:.2f} | {same:.2f} |")
                useless[row].append(float(a.mean()))
                ranks[row].append(more)
                if row == ROWS[0] and rate == 0.5 and not unequal:
                    reference_at_half = float(a.mean())
    reward = RewardConfig()
    default = (reward.regret_estimator, reward.regret_caution)
    worst = max(useless[default])
    margin = min(a - b for a, b in zip(ranks[default], ranks[ROWS[0]], strict=True))
    goals = [
        {
            "name": "default_useless_max",
            "value": worst,
            "goal": USELESS_GOAL,
            "holds": worst <= USELESS_GOAL,
        },
        {
            "name": "default_ranks_over_reference_min",
            "value": margin,
            "goal": -TOLERANCE,
            "holds": margin >= -TOLERANCE,
        },
    ]
    if arguments.instances * PLAYS == REFERENCE_PLAYS:
        goals.append(
            {
                "name": "reference_useless_at_half",
                "value": reference_at_half,
                "goal": REFERENCE_AT_HALF,
                "holds": abs(reference_at_half - REFERENCE_AT_HALF) <= TOLERANCE,
            }
        )
    print(json.dumps({"goals": goals}))


if __name__ == "__main__":
    main()
