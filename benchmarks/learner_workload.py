"""The trajectories of the learner benchmark, and the protocol of a contestant in its own process.

Needs NumPy alone: the peer imports it. A trajectory is a prompt and turns of sampled tokens and
replies; about half of its tokens have a loss. Ids are drawn at random: the time of an update does
not depend on them.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

LENGTHS = (50, 1500)  # tokens of the shortest and of the longest trajectory of a mix
EQUAL = 1024  # tokens of each where all are equal
CLIPS = (0.2, 0.28)
TIS_CAP = 2.0
LR, BETAS, WEIGHT_DECAY, MAX_NORM = 1e-6, (0.9, 0.98), 0.1, 1.0  # of AdamW
MARK = "@@ "  # before a line of the protocol: libraries print to the same stream


class Sampled(NamedTuple):
    """One trajectory."""

    tokens: np.ndarray  # int32
    mask: np.ndarray  # bool, has a loss; never the first
    logprobs: np.ndarray  # float32, the sampler's
    advantage: float


def draw(lengths: list[int], vocab: int, seed: int = 0) -> list[Sampled]:
    """Draw trajectories of these lengths: a prompt, then turns of 16 to 256 sampled tokens and
    replies of 10 to 60.
    """
    rng = np.random.default_rng(seed)

    def one(length: int) -> Sampled:
        mask = np.zeros(length, bool)
        start = int(length * rng.uniform(0.1, 0.4)) + 1
        while start < length:
            end = start + int(rng.integers(16, 257))
            mask[start:end] = True
            start = end + int(rng.integers(10, 61))
        tokens = rng.integers(0, vocab, length).astype(np.int32)
        logprobs = rng.normal(-12.0, 2.0, length).astype(np.float32)
        return Sampled(tokens, mask, logprobs, float(rng.normal()))

    return [one(length) for length in lengths]


def mixed_lengths(count: int, seed: int = 0) -> list[int]:
    """Lengths spread evenly over LENGTHS, in random order."""
    spread = np.linspace(*LENGTHS, count).astype(int)
    return np.random.default_rng(seed).permutation(spread).tolist()


def save(path: Path, kinds: dict[str, list[Sampled]]) -> None:
    """Write for another process."""
    arrays = {}
    for kind, sampled in kinds.items():
        for index, one in enumerate(sampled):
            for name, value in one._asdict().items():
                arrays[f"{kind}/{index:04d}/{name}"] = value
    np.savez(path, **arrays)


def load(path: Path) -> dict[str, list[Sampled]]:
    """Read what `save` wrote."""
    kinds: dict[str, list[Sampled]] = {}
    with np.load(path) as arrays:
        places = sorted({name.rpartition("/")[0] for name in arrays.files})
        for place in places:
            fields = {name: arrays[f"{place}/{name}"] for name in Sampled._fields}
            fields["advantage"] = float(fields["advantage"])
            kinds.setdefault(place.partition("/")[0], []).append(Sampled(**fields))
    return kinds


def serve(update: Callable[[list[Sampled]], float], kinds: dict[str, list[Sampled]]) -> None:
    """Take one optimiser step on each kind that a line names; answer with what it took."""
    print(MARK + "ready", flush=True)
    for line in sys.stdin:
        sampled = kinds[line.strip()]
        cpu, wall = time.process_time(), time.perf_counter()
        loss = update(sampled)
        answer = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "loss": loss,
            "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        }
        print(MARK + json.dumps(answer), flush=True)
