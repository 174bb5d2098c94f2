"""A decode step against what this machine can do: the time that its matrix products need at the
best measured rate, or that its weights and keys need to be read, whichever is longer.

The rate is the best of NumPy, XLA and (where its Python is given) torch, at the shapes of a layer
with its weights already in the processor's cache; the bandwidth is that of reading an array that is
far larger than the cache, with all cores. Both are the best of several rounds taken between the
rounds of the decode, so that other work on the machine disturbs all alike.
"""

import concurrent.futures
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from sampler_ours import Model, goal, make_engine, play, say
from sampler_workload import Scripted

from models.config import TransformerConfig

ROWS = 32
LEAST_REPEAT = 3  # decodes that are timed at each context
SHORT, LONG = 16, 80  # tokens of the two completions whose difference is timed
READ_BYTES = 2**29
SHORT_PROMPT = 16

TORCH = """
import json, sys, time, torch
torch.set_num_threads({threads})
out = []
with torch.inference_mode():
    for k, n in {shapes}:
        x, w, best = torch.randn({rows}, k), torch.randn(k, n), 1e9
        for _ in range({rounds}):
            start = time.perf_counter()
            for _ in range(20):
                torch.mm(x, w)
            best = min(best, (time.perf_counter() - start) / 20)
        out.append(best)
print(json.dumps(out))
"""


def layer_shapes(config: TransformerConfig) -> list[tuple[int, int]]:
    """Weights of one layer, those of equal inputs joined."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        (config.embed, heads + 2 * kv),
        (heads, config.embed),
        (config.embed, 2 * config.mlp),
        (config.mlp, config.embed),
    ]


class Needs(NamedTuple):
    """What one decode step of ROWS rows has to compute and to read."""

    flops: float
    weight_bytes: float
    kv_bytes: float
    attention_flops: float


def needs(config: TransformerConfig, context: float) -> Needs:
    """Count for a dense model in float32; every row reads its own keys and values."""
    weights = config.num_layers * sum(k * n for k, n in layer_shapes(config))
    weights += config.embed * config.vocab_size
    kv = ROWS * context * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    scores = ROWS * context * config.num_layers * config.num_heads * config.head_dim
    return Needs(2.0 * ROWS * weights, 4.0 * weights, 4.0 * kv, 4.0 * scores)


def _best(call: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


class Machine:
    """The best rates seen so far."""

    def __init__(self, config: TransformerConfig, torch_python: Path | None) -> None:
        self._shapes = layer_shapes(config)
        self._torch = torch_python
        self._seconds = [np.inf] * len(self._shapes)
        self._by = [""] * len(self._shapes)
        self.bytes_per_s = 0.0
        rng = np.random.default_rng(0)
        self._pairs = [
            (rng.standard_normal((ROWS, k), np.float32), rng.standard_normal((k, n), np.float32))
            for k, n in self._shapes
        ]
        self._large = np.ones(READ_BYTES // 4, np.float32)

    @property
    def flops_per_s(self) -> float:
        """Over one layer, each product by whoever is fastest at it."""
        work = 2 * ROWS * sum(k * n for k, n in self._shapes)
        return work / sum(self._seconds)

    def measure(self) -> None:
        """One round of all."""
        for index, (x, w) in enumerate(self._pairs):
            self._offer(index, "numpy", _best(lambda x=x, w=w: x @ w, 30))
            self._offer(index, "xla", self._xla(x, w))
        if self._torch is not None:
            for index, seconds in enumerate(self._torch_times()):
                self._offer(index, "torch", seconds)
        self.bytes_per_s = max(self.bytes_per_s, READ_BYTES / self._read())

    def describe(self) -> str:
        """Rates and who reached them."""
        best = ", ".join(f"{k}x{n} {by}" for (k, n), by in zip(self._shapes, self._by, strict=True))
        return (
            f"{self.flops_per_s / 1e9:.0f} GFLOP/s at {ROWS} rows ({best}), "
            f"{self.bytes_per_s / 1e9:.1f} GB/s read"
        )

    def seconds(self, flops: float, read: float) -> float:
        """The roofline."""
        return max(flops / self.flops_per_s, read / self.bytes_per_s)

    def _offer(self, index: int, name: str, seconds: float) -> None:
        if seconds < self._seconds[index]:
            self._seconds[index], self._by[index] = seconds, name

    def _xla(self, x: np.ndarray, w: np.ndarray) -> float:
        """Ten products in one program: a call by itself is short beside its dispatch."""

        @jax.jit
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            # Each needs the one before, so that none is left out.
            def body(_: int, x: jax.Array) -> jax.Array:
                return x + 1e-30 * (x @ w)[:, :1]

            return jax.lax.fori_loop(0, 10, body, x)

        arrays = jnp.asarray(x), jnp.asarray(w)
        jax.block_until_ready(run(*arrays))
        return _best(lambda: jax.block_until_ready(run(*arrays)), 5) / 10

    def _torch_times(self) -> list[float]:
        threads = len(os.sched_getaffinity(0))
        program = TORCH.format(shapes=self._shapes, rows=ROWS, rounds=5, threads=threads)
        found = subprocess.run(
            [str(self._torch), "-c", program], check=True, capture_output=True, text=True
        )
        return json.loads(found.stdout)

    def _read(self) -> float:
        threads = len(os.sched_getaffinity(0))
        parts = np.array_split(self._large, threads)
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return _best(lambda: list(pool.map(lambda part: float(part @ part), parts)), 4)


def _rows(prompts: list[list[int]], length: int) -> list[Scripted]:
    return [Scripted(index, prompt, [length], []) for index, prompt in enumerate(prompts)]


def measure(
    model: Model, text: list[int], context: int, repeat: int, torch_python: Path | None
) -> list[dict[str, Any]]:
    """Time decode steps at a short and a long context and compare; return the goals."""
    machine = Machine(model.config, torch_python)
    goals = []
    for prompt, counted in ((SHORT_PROMPT, False), (context, True)):
        prompts = [text[row * prompt :][:prompt] for row in range(ROWS)]
        # Pages for all rows at once: each holds copies of what an earlier run left there.
        engine = make_engine(model, ROWS, prompt + LONG, kv_tokens=2 * ROWS * (prompt + LONG))
        engine.load(model.params, 0)
        steps = [_step_s(engine, model, prompts, machine) for _ in range(repeat)]
        step, mean_context = min(steps), prompt + (SHORT + LONG) / 2
        need = needs(model.config, mean_context)
        matmuls = machine.seconds(need.flops, need.weight_bytes)
        everything = machine.seconds(
            need.flops + need.attention_flops, need.weight_bytes + need.kv_bytes
        )
        say("machine:", machine.describe())
        say(
            f"decode of {ROWS} rows at {mean_context:.0f} tokens: {1e3 * step:.1f} ms a step (all: "
            f"{[round(1e3 * s, 1) for s in steps]}); the products alone need {1e3 * matmuls:.1f} "
            f"ms, with keys and values {1e3 * everything:.1f} ms"
        )
        if counted:
            goals.append(goal("decode_roofline_share_with_kv", everything / step, 0.35, least=True))
        else:
            goals.append(goal("decode_roofline_share_matmuls", matmuls / step, 0.5, least=True))
    return goals


def _step_s(engine: Any, model: Model, prompts: list[list[int]], machine: Machine) -> float:
    """Seconds of one step: what longer completions take more, prompts being alike."""
    machine.measure()
    # Once before: from then on both find the prompts in the cache.
    play(engine, model, _rows(prompts, SHORT), env_s=0, keep=True)
    short, long = (
        play(engine, model, _rows(prompts, length), env_s=0, keep=True) for length in (SHORT, LONG)
    )
    steps = long.stats["decode_steps"] - short.stats["decode_steps"]
    assert steps == LONG - SHORT, f"{steps} steps for {LONG - SHORT} tokens a row: rows waited"
    return (long.time.wall_s - short.time.wall_s) / steps
