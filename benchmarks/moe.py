"""A mixture-of-experts layer against one dense matrix product of equal FLOPs, on this CPU.

    python benchmarks/moe.py [--tokens 256 4096] [--rounds 15] [--ragged-limit-gib 4]

All in float32. The measured functions take turns, each ratio is of two measurements next to one
another, and the median is shown: by the clock, and by processor time, which other work on the
machine disturbs less. Results are written into the arrays of the call before (donated), on both
sides, so that none pays for fresh memory in the size of its gradients. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import TransformerConfig
from models.grouped import grouped_matmul
from models.moe import MoE

EXPERTS, CHOSEN, EMBED, MLP = 64, 8, 512, 256
GOALS = {256: 3.0, 4096: 1.75}  # times one dense product of equal FLOPs
MEMORY_GOAL = 2.0  # times the activations
GRAPH, STATE = nnx.split(
    MoE(
        TransformerConfig(
            num_layers=1, embed=EMBED, mlp=MLP, num_experts=EXPERTS, experts_per_token=CHOSEN
        ),
        nnx.Rngs(params=0),
    )
)


class Case(NamedTuple):
    """One compiled function with its inputs."""

    name: str
    call: Callable[[], Any]
    temp_bytes: int


def compile_case(name: str, function: Callable, *inputs: Any, limit: float = np.inf) -> Case | None:
    """Compile, with results that replace the last ones; None if it needs more than `limit`."""
    shapes = jax.eval_shape(function, *inputs)
    jitted = jax.jit(lambda old, *inputs: function(*inputs), donate_argnums=0, keep_unused=True)
    compiled = jitted.lower(shapes, *inputs).compile()
    memory: Any = compiled.memory_analysis()
    temp_bytes = memory.temp_size_in_bytes
    if temp_bytes > limit:
        print(f"  {name}: needs {temp_bytes / 2**30:.1f} GiB of temporaries; not run")
        return None
    held = [jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)]

    def call() -> Any:
        held[0] = compiled(held[0], *inputs)
        return jax.block_until_ready(held[0])

    call()
    return Case(name, call, temp_bytes)


def dense(x: Any, w: Any, grad: Any) -> Any:
    """One product, and the two of its backward pass."""
    return x @ w, grad @ w.T, x.T @ grad


def layer(state: Any, x: Any, live: Any, grad: Any, replay: Any = None) -> Any:
    """Output of the layer, and the gradients of input, router and experts."""

    def run(state: Any, x: Any) -> Any:
        return nnx.merge(GRAPH, state)(x, live, replay=replay)

    output, pull, routing = jax.vjp(run, state, x, has_aux=True)
    return output, routing.dropped, pull(grad)


def products(multiply: Callable, rows: Any, hidden: Any, state: Any, sizes: Any) -> Any:
    """The layer's two grouped products, and the four of their backward pass."""

    def run(rows: Any, hidden: Any, gate_up: Any, down: Any) -> Any:
        return multiply(rows, gate_up, sizes), multiply(hidden, down, sizes)

    gate_up = state["gate_up"][...].reshape(EXPERTS, EMBED, -1)
    outputs, pull = jax.vjp(run, rows, hidden, gate_up, state["down"][...])
    return outputs, pull(outputs)


def cases(tokens: int, ragged_limit: float) -> list[Case]:
    """The dense product first: the others are measured against it."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    copies = tokens * CHOSEN
    x, grad, live = draw(1, tokens, EMBED), draw(1, tokens, EMBED), jnp.ones((1, tokens), bool)
    rows, hidden = draw(copies, EMBED), draw(copies, MLP)
    load = nnx.merge(GRAPH, STATE)(x, live)[1].load
    print(
        f"\n{tokens} tokens: {copies} rows for experts, "
        f"{int(load.min())} to {int(load.max())} an expert"
    )
    busy = jnp.broadcast_to(jnp.arange(CHOSEN, dtype=jnp.int32), (1, tokens, CHOSEN))
    sizes = load.astype(jnp.int32)
    found = [
        compile_case("dense", dense, rows, draw(EMBED, 3 * MLP), draw(copies, 3 * MLP)),
        compile_case("layer", layer, STATE, x, live, grad),
        compile_case("layer, 8 experts get everything", layer, STATE, x, live, grad, busy),
        compile_case(
            "grouped products", lambda *a: products(grouped_matmul, *a), rows, hidden, STATE, sizes
        ),
        compile_case(
            "the same by ragged_dot",
            lambda *a: products(jax.lax.ragged_dot, *a),
            rows,
            hidden,
            STATE,
            sizes,
            limit=ragged_limit,
        ),
    ]
    return [case for case in found if case is not None]


def measure(found: list[Case], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds by the clock and of processor time, of each case in each round."""
    times: dict[str, tuple[list[float], list[float]]] = {case.name: ([], []) for case in found}
    for _ in range(rounds):
        for case in found:
            clock, processor = time.perf_counter(), time.process_time()
            case.call()
            times[case.name][0].append(time.perf_counter() - clock)
            times[case.name][1].append(time.process_time() - processor)
    return times


def activations_bytes(tokens: int) -> int:
    """What stands between the layer's operations, forward, and its input, output and gradients.

    Input, output and the gradients of both; of each copy of a token: the row sent to its expert,
    gate and up, their product, and what the expert gives.
    """
    per_copy = EMBED + 2 * MLP + MLP + EMBED
    return 4 * tokens * (4 * EMBED + CHOSEN * per_copy)


def report(tokens: int, rounds: int, ragged_limit: float) -> list[dict[str, Any]]:
    """Measure at one number of tokens; print the table and return the goals."""
    found = cases(tokens, ragged_limit)
    times = measure(found, rounds)
    activations = activations_bytes(tokens)
    print(f"  {'':32} clock ms   cpu ms   x dense: clock   cpu    temp MB   x activations")
    ratios = {}
    for case in found:
        clock, processor = times[case.name]
        ratios[case.name] = [
            statistics.median(a / b for a, b in zip(own, base, strict=True))
            for own, base in zip(times[case.name], times["dense"], strict=True)
        ]
        print(
            f"  {case.name:32} {1e3 * statistics.median(clock):8.1f} "
            f"{1e3 * statistics.median(processor):8.1f} {ratios[case.name][0]:16.2f} "
            f"{ratios[case.name][1]:5.2f} {case.temp_bytes / 1e6:10.1f} "
            f"{case.temp_bytes / activations:10.2f}"
        )
    by_name = {case.name: case for case in found}
    measured = {
        f"layer_{tokens}_clock_ratio": (ratios["layer"][0], GOALS.get(tokens)),
        f"layer_{tokens}_cpu_ratio": (ratios["layer"][1], GOALS.get(tokens)),
        f"layer_{tokens}_temp_ratio": (by_name["layer"].temp_bytes / activations, MEMORY_GOAL),
    }
    return [
        {"name": name, "value": round(value, 3), "goal": goal, "holds": value <= goal}
        for name, (value, goal) in measured.items()
        if goal is not None
    ]


def main() -> None:
    """Measure at each number of tokens and print the goals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ragged-limit-gib", type=float, default=4.0)
    arguments = parser.parse_args()
    print(
        f"{EXPERTS} experts, top-{CHOSEN}, embed {EMBED}, expert width {MLP}; forward + backward\n"
        f"  dense      [rows, {EMBED}] x [{EMBED}, {3 * MLP}], and the two products of its "
        f"gradients: as many FLOPs as the grouped products\n"
        f"  layer      router, sort, grouped [rows, {EMBED}] x [{EMBED}, {2 * MLP}], SwiGLU "
        f"and weights, grouped [rows, {MLP}] x [{MLP}, {EMBED}], sum; all gradients\n"
        f"  products   the two grouped products and the four of their gradients, nothing else"
    )
    goals = []
    for tokens in arguments.tokens:
        goals += report(tokens, arguments.rounds, arguments.ragged_limit_gib * 2**30)
    print(json.dumps({"goals": goals}))


if __name__ == "__main__":
    main()
