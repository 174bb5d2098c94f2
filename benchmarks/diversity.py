"""What measuring the likeness of programs costs and tells: processor time of a cycle at the paper's
size, and how near the library's programs are to one another.

    python -m benchmarks.diversity [--seed 0]

Programs of some 320 lines, the paper's mean, are library programs put one behind another. The first
figure is of 24 designs that are compared with a full memory of 200 and a full window of 100, and of
the window's Vendi scores. The second is of eight programs of each family, each on words of its own,
by rules and by code. The last line is JSON.
"""

import argparse
import itertools
import json
import math
import random
import string
import time
from typing import Any

import numpy as np

from spade_jax.config import Config
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.similarity import shingles
from spade_jax.roles import digests
from spade_jax.roles.diversity import Likeness, Window, Written, embedder, ngrams, vendi

LINES = 320
PER_FAMILY = 8


def words(rng: random.Random) -> list[str]:
    """Eight made-up words."""
    return ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(4, 10))) for _ in range(8)]


def long_program(rng: random.Random) -> str:
    """Library programs one behind another."""
    parts: list[str] = []
    while sum(part.count("\n") for part in parts) < LINES:
        parts.append(rng.choice(FAMILIES).draw(rng, words(rng), "hard").program)
    return "\n".join(parts)


def cost(rng: random.Random) -> dict[str, float]:
    """Seconds of processor time of one cycle, after those that filled what it is compared with."""
    config = Config()
    likeness = Likeness.of(config)
    known = {str(index): long_program(rng) for index in range(200)}
    newest = list(known.values())[-config.diversity.window :]
    window = Window([Written(text, "a", 0, True, False, 1) for text in newest], newest)
    likeness.nearest(newest[0], known)  # what earlier cycles left in the caches
    window.vendi(likeness.embed, config.diversity.window)
    designs = [long_program(rng) for _ in range(24)]
    started = time.process_time()
    for program in designs:
        likeness.nearest(program, known)
    gate = time.process_time()
    for program in designs:
        likeness.nearest(program, {str(i): each.program for i, each in enumerate(window.written)})
    windowed = time.process_time()
    window.vendi(embedder(config.diversity), config.diversity.window)
    ended = time.process_time()
    return {
        "gate_s": gate - started,
        "window_s": windowed - gate,
        "vendi_s": ended - windowed,
        "lines_mean": float(np.mean([text.count("\n") for text in designs])),
    }


def library(rng: random.Random) -> dict[str, Any]:
    """Cosines within families and between them, and the Vendi scores of all."""
    drawn = [
        (family.name, family.draw(rng, words(rng), "easy").program)
        for family in FAMILIES
        for _ in range(PER_FAMILY)
    ]
    rows = np.stack([ngrams(digests.rules(text)) for _, text in drawn]).astype(np.float64)
    runs = [shingles(text) for _, text in drawn]
    code = np.array([[len(a & b) / math.sqrt(len(a) * len(b)) for b in runs] for a in runs])
    found: dict[str, Any] = {"programs": len(drawn), "families": len(FAMILIES)}
    for view, cosines in (("rules", rows @ rows.T), ("code", code)):
        pairs = list(itertools.combinations(range(len(drawn)), 2))
        same = [cosines[i, j] for i, j in pairs if drawn[i][0] == drawn[j][0]]
        other = [cosines[i, j] for i, j in pairs if drawn[i][0] != drawn[j][0]]
        found[view] = {
            "same_family_median": float(np.median(same)),
            "same_family_max": float(max(same)),
            "other_family_median": float(np.median(other)),
            "other_family_max": float(max(other)),
            "vendi": vendi(cosines),
            "vendi_one_family_mean": float(
                np.mean(
                    [
                        vendi(cosines[i : i + PER_FAMILY, i : i + PER_FAMILY])
                        for i in range(0, len(drawn), PER_FAMILY)
                    ]
                )
            ),
        }
    return found


def main() -> None:
    """Print both figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    rng = random.Random(parser.parse_args().seed)
    values = {"cost": cost(rng), "library": library(rng)}
    for name, found in values["cost"].items():
        print(f"{name:12} {found:.3f}")
    for view in ("rules", "code"):
        print(view, {name: round(number, 3) for name, number in values["library"][view].items()})
    print(json.dumps(values))


if __name__ == "__main__":
    main()
