"""What drawing a token costs beside the product that makes the scores.

    python benchmarks/rule.py [--rows 32] [--rounds 5]

Processor time of one call, the least of the rounds, for 32 rows: the product of the head alone, one
Gumbel number for every token (what `jax.random.categorical` does), our rule without truncation and
with each kind, and a sort. Each is repeated within one program, as a decode run repeats it.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from spade_jax.rollout.sampling import Rule, draw

STEPS = 8
SIZES = ((49_152, 576), (151_936, 896))  # vocabulary and width of SmolLM2-135M and Qwen2.5-0.5B


def seconds(function, *inputs, rounds: int) -> float:
    """Processor time of one of the repeated calls."""

    @jax.jit
    def repeated(*inputs):
        def step(i, total):
            return total + function(i, total, *inputs).sum().astype(jnp.float32)

        return jax.lax.fori_loop(0, STEPS, step, jnp.float32(0))

    jax.block_until_ready(repeated(*inputs))
    found = []
    for _ in range(rounds):
        started = time.process_time()
        jax.block_until_ready(repeated(*inputs))
        found.append(time.process_time() - started)
    return min(found) / STEPS


def product(i, total, hidden, table):
    """The scores; the input changes at each step, so that no step can be left out."""
    return (hidden + 1e-9 * total) @ table


def one_stage(i, total, scores, rule):
    """Gumbel noise for the whole vocabulary."""

    def row(scores, key, position):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        return jax.random.categorical(jax.random.fold_in(key, position), scores)

    return jax.vmap(row)(scores, rule.keys, jnp.full(len(scores), i))


def two_stages(i, total, scores, rule):
    """The rule."""
    return draw(scores + 1e-9 * total, rule, jnp.full(len(scores), i, jnp.int32)).tokens


def sort(i, total, scores, rule):
    """What a truncation by sorting begins with."""
    return jnp.sort(scores + 1e-9 * total)[:, ::4096]


def main() -> None:
    """Print a line for each size and each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = options.rows
    rng = np.random.default_rng(0)
    ones = jnp.ones(rows, jnp.float32)
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), rows))
    off = Rule(keys, ones, ones, 0 * ones, jnp.zeros(rows, jnp.int32))
    fifty = jnp.full(rows, 50, jnp.int32)
    rules = {
        "nothing truncated": off,
        "min-p 0.1": off._replace(min_p=0.1 * ones),
        "top-k 50": off._replace(top_k=fifty),
        "top-p 0.9": off._replace(top_p=0.9 * ones),
        "top-k 50, top-p 0.9": off._replace(top_k=fifty, top_p=0.9 * ones),
    }
    for vocab, width in SIZES:
        hidden = jnp.asarray(rng.normal(size=(rows, width)), jnp.float32)
        table = jnp.asarray(rng.normal(size=(width, vocab)), jnp.float32)
        scores = jnp.asarray(3 * rng.normal(size=(rows, vocab)), jnp.float32)
        ways = {
            "product": (product, hidden, table),
            "one stage": (one_stage, scores, off),
            **{f"two stages, {name}": (two_stages, scores, rule) for name, rule in rules.items()},
            "sort": (sort, scores, off),
        }
        for name, (function, *inputs) in ways.items():
            took = seconds(function, *inputs, rounds=options.rounds)
            print(f"{rows} rows of {vocab}: {name:34} {1e3 * took:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
