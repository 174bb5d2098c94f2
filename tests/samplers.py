"""A small model and its sampler, for the tests of the engine. `from samplers import new_engine`."""

import asyncio
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from models.sharding import build_mesh, param_shardings
from spade_jax.config import EngineConfig
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.programs import Programs
from spade_jax.types import Completion, SamplingParams

MODEL = TransformerConfig(
    vocab_size=64,
    num_layers=2,
    embed=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp=32,
    num_experts=4,
)
CONFIG = EngineConfig(
    slots=4,
    queue=2,
    context_tokens=64,
    page_tokens=8,
    piece_tokens=16,
    prefill_tokens=64,
    decode_steps=4,
)

Case = tuple[np.ndarray, SamplingParams, int]
"""Prompt, parameters and the seed of the key."""


@functools.cache
def one_device() -> Mesh:
    return build_mesh(1, 1, 1, 1, devices=jax.devices()[:1])


@functools.cache
def parameters(seed: int = 0) -> transformer.Params:
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.ShapeDtypeStruct, target: jax.sharding.Sharding) -> jax.Array:
        std = 0.3 if len(leaf.shape) > 1 else 0.1  # predictions far from uniform
        return jax.device_put(
            rng.normal(float(len(leaf.shape) == 1), std, leaf.shape).astype(np.float32), target
        )

    return jax.tree.map(
        draw, transformer.abstract_params(MODEL), param_shardings(MODEL, one_device())
    )


@functools.cache
def _programs(config: EngineConfig, mesh: Mesh, execution: Execution) -> Programs:
    """Compiling takes seconds, so engines of one kind share what is compiled."""
    programs = Programs(MODEL, config, mesh, execution)
    programs.compile()
    return programs


def new_engine(
    config: EngineConfig = CONFIG,
    mesh: Mesh | None = None,
    execution: Execution = PLAIN,
    params: transformer.Params | None = None,
    **options: Any,
) -> Engine:
    """An engine whose programs are compiled, with weights of version 7."""
    mesh = mesh or one_device()
    engine = Engine(MODEL, config, mesh, execution, **options)
    engine._programs = _programs(config, mesh, execution)
    engine._programs.num_late = 0
    engine.load(params or parameters(), version=7)
    return engine


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)


def sampling(
    max_tokens: int = 6,
    temperature: float = 1.0,
    stop_ids: tuple[int, ...] = (),
    **options: Any,
) -> SamplingParams:
    return SamplingParams(temperature, max_tokens, stop_ids, **options)


def run(engine: Engine, *cases: Case) -> list[Completion]:
    return asyncio.run(
        engine.gather([engine.generate(t, p, jax.random.key(seed)) for t, p, seed in cases])
    )


def fresh(engine: Engine, *cases: Case) -> list[Completion]:
    """As `run`, with nothing in the cache."""
    engine.load(parameters(), version=7)
    return run(engine, *cases)


def same_bits(left: list[Completion], right: list[Completion]) -> bool:
    return all(
        a.stop == b.stop
        and a.tokens.tobytes() == b.tokens.tobytes()
        and a.logprobs.tobytes() == b.logprobs.tobytes()
        and a.untruncated_logprobs.tobytes() == b.untruncated_logprobs.tobytes()
        for a, b in zip(left, right, strict=True)
    )


@functools.cache
def _scores():
    return jax.jit(
        lambda params, tokens: transformer.logits(
            MODEL,
            params,
            transformer.forward(
                MODEL, params, tokens, jnp.arange(64, dtype=jnp.int32)[None]
            ).hidden,
        )
    )


def scores(tokens: np.ndarray) -> np.ndarray:
    """Logits [seq, vocab] of a training-mode forward over the whole sequence."""
    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_scores()(parameters(), padded))[0, : len(tokens)]


def assert_teacher_forced(start: np.ndarray, completion: Completion, temperature: float) -> None:
    """The untruncated log-probabilities are those of the learner's forward."""
    logits = scores(np.concatenate([start, completion.tokens])) / (temperature or 1.0)
    for i, token in enumerate(completion.tokens):
        if completion.forced is not None and completion.forced[i]:
            continue
        row = logits[len(start) + i - 1].astype(np.float64)
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert abs(completion.untruncated_logprobs[i] - expected) < 1e-4
