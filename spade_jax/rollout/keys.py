"""Where every random choice of a run comes from: the run's seed and the name of the thing drawn
(design decision 7).

Names are hashed with CRC-32, which is the same in every process, unlike Python's salted `hash`.
"""

import random
import zlib

import jax

MAX_SEED = 2**31


def named_seed(seed: int, *names: str | int) -> int:
    """Integer in [0, 2**31) from the run's seed and a name such as ("instance", environment_id,
    step, 3).
    """
    text = "/".join([str(seed), *map(str, names)])
    return zlib.crc32(text.encode()) % MAX_SEED


def named_rng(seed: int, *names: str | int) -> random.Random:
    """Private generator for host-side draws, such as which memory records a designer is shown."""
    return random.Random("/".join([str(seed), *map(str, names)]))


def episode_key(seed: int, name: str) -> jax.Array:
    """Key of one sampled sequence; the engine folds in the absolute position of each token."""
    return jax.random.fold_in(jax.random.key(seed), named_seed(seed, name))
