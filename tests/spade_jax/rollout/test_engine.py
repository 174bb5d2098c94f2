import asyncio
import dataclasses
import functools
import logging
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models import layout, transformer
from models.config import TransformerConfig
from models.execution import PLAIN
from models.sharding import build_mesh, param_shardings
from spade_jax.config import EngineConfig
from spade_jax.errors import SamplerError
from spade_jax.rollout.engine import Engine, plan_chunks
from spade_jax.rollout.sampling import Rule, draw
from spade_jax.types import Completion, SamplingParams, Stop

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
    slots=4, context_tokens=64, prefill_rows=2, prefill_chunks=(8, 64), decode_steps=4
)


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


def new_engine(mesh: Mesh | None = None) -> Engine:
    return Engine(MODEL, CONFIG, mesh or one_device())


@pytest.fixture(scope="module")
def shared() -> Engine:
    engine = new_engine()
    engine.compile()
    return engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.load(parameters(), version=7)
    shared.stats()
    return shared


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 64, length).astype(np.int32)


def sampling(
    max_tokens: int = 6, temperature: float = 1.0, stop_ids: tuple[int, ...] = ()
) -> SamplingParams:
    return SamplingParams(temperature, max_tokens, stop_ids)


def run(engine: Engine, *requests: tuple[np.ndarray, SamplingParams, int]) -> list[Completion]:
    return asyncio.run(
        engine.gather([engine.generate(t, p, jax.random.key(seed)) for t, p, seed in requests])
    )


def same_bits(left: list[Completion], right: list[Completion]) -> bool:
    return all(
        a.stop == b.stop
        and a.tokens.tobytes() == b.tokens.tobytes()
        and a.logprobs.tobytes() == b.logprobs.tobytes()
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
    logits = scores(np.concatenate([start, completion.tokens])) / (temperature or 1.0)
    for i, token in enumerate(completion.tokens):
        row = logits[len(start) + i - 1].astype(np.float64)
        expected = row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert abs(completion.logprobs[i] - expected) < 1e-4


def naive(start: np.ndarray, params: SamplingParams, seed: int) -> list[int]:
    """Sample one sequence token by token with a training-mode forward: no cache, no batch."""
    tokens = start.tolist()
    while True:
        logits = jnp.asarray(scores(np.array(tokens, np.int32))[-1:])
        off = jnp.zeros(1, jnp.float32)
        how = Rule(
            jax.random.key_data(jax.random.key(seed))[None],
            off + params.temperature,
            off + 1,
            off,
            jnp.zeros(1, jnp.int32),
        )
        drawn = jax.jit(draw)(logits, how, jnp.array([len(tokens)], jnp.int32))
        tokens.append(int(drawn.tokens[0]))
        done = len(tokens) - len(start) == params.max_tokens or len(tokens) == 64
        if done or tokens[-1] in params.stop_ids:
            return tokens[len(start) :]


def test_equals_naive_sampling_with_more_requests_than_slots(engine):
    cases = [
        (
            prompt(i, 1 + 5 * i),
            sampling(3 + 3 * (i % 4), (0.0, 1.0, 0.7)[i % 3], (i, 20 + i) if i % 2 else ()),
            i,
        )
        for i in range(9)
    ]
    for (start, params, seed), completion in zip(cases, run(engine, *cases), strict=True):
        assert completion.tokens.tolist() == naive(start, params, seed)
        assert completion.policy_version == 7
        assert_teacher_forced(start, completion, params.temperature)


def test_stop_reasons(engine):
    start = prompt(3, 10)
    free = naive(start, sampling(9), 5)
    first_seen = next(
        i for i in range(3, 9) if free[i] not in free[:i]
    )  # ends on the device, after some tokens
    full = prompt(4, 60)
    results = run(
        engine,
        (start, sampling(9, stop_ids=(free[first_seen],)), 5),
        (start, sampling(9, stop_ids=(free[0],)), 5),
        (start, sampling(9), 5),
        (start, sampling(1), 5),
        (full, sampling(50), 1),
        (prompt(4, 63), sampling(50), 1),
    )
    assert [r.stop for r in results] == [
        Stop.STOP_ID, Stop.STOP_ID, Stop.MAX_TOKENS, Stop.MAX_TOKENS, Stop.CONTEXT, Stop.CONTEXT
    ]  # fmt: skip
    assert results[0].tokens.tolist() == free[: first_seen + 1]
    assert [len(r.tokens) for r in results[1:]] == [1, 9, 1, 4, 1]
    assert results[4].tokens.tolist() == naive(full, sampling(50), 1)


def test_bits_do_not_depend_on_neighbours_order_or_engine(engine):
    cases = [(prompt(i, length), sampling(7), i) for i, length in enumerate((3, 9, 14, 30, 33, 50))]
    alone = []
    for case in cases:
        engine.load(parameters(), version=7)
        alone += run(engine, case)
    engine.load(parameters(), version=7)
    assert same_bits(run(engine, *cases), alone)
    engine.load(parameters(), version=7)
    assert same_bits(run(engine, *cases[::-1])[::-1], alone)
    strangers = [(prompt(100 + i, 4 + 9 * i), sampling(5, 0.3), i) for i in range(6)]
    engine.load(parameters(), version=7)
    assert same_bits(run(engine, *strangers[:3], *cases, *strangers[3:])[3:-3], alone)
    fresh = new_engine()
    fresh.load(parameters(), version=7)
    assert same_bits(run(fresh, *cases[:2]), alone[:2])
    assert (
        fresh.num_compiles == fresh.stats().late_compiles == 3
    )  # not compiled ahead: allocate, prefill, decode


def turns(engine: Engine, seed: int, num_turns: int, delays: random.Random | None = None):
    """Play an episode whose replies are a function of what was sampled; return all completions."""

    async def episode() -> list[Completion]:
        tokens, completions = prompt(seed, 9), []
        for _ in range(num_turns):
            completion = await engine.generate(tokens, sampling(5), jax.random.key(seed))
            completions.append(completion)
            if delays is not None:
                await asyncio.sleep(delays.random() * 0.02)
            reply = prompt(int(completion.tokens.sum()), 3)
            tokens = np.concatenate([tokens, completion.tokens, reply])
        return completions

    return episode()


def test_next_turn_prefills_only_what_is_new(engine):
    together = asyncio.run(engine.gather([turns(engine, seed, 3) for seed in range(3)]))
    stats = engine.stats()
    # Turn 1 prefills 9 tokens; later turns the last sampled token and the 3 of the reply, after the
    # 9 + 4 and then 17 + 4 that the slot holds.
    assert stats.prefilled_tokens == 3 * (9 + 4 + 4)
    assert stats.prefix_hit_tokens == 3 * (13 + 21)
    assert stats.sampled_tokens == 3 * 15
    for seed, completions in enumerate(together):
        tokens = prompt(seed, 9)
        for completion in completions:
            assert_teacher_forced(tokens, completion, 1.0)
            engine.load(parameters(), version=7)
            [missed] = run(engine, (tokens, sampling(5), seed))
            assert missed.tokens.tolist() == completion.tokens.tolist()
            np.testing.assert_allclose(missed.logprobs, completion.logprobs, atol=1e-4)
            reply = prompt(int(completion.tokens.sum()), 3)
            tokens = np.concatenate([tokens, completion.tokens, reply])


@pytest.mark.parametrize("seed", range(3))
def test_slow_replies_change_neither_results_nor_schedule(engine, caplog, seed):
    def play(delays: random.Random | None) -> tuple[list[Completion], list[str]]:
        engine.load(parameters(), version=7)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="spade_jax.rollout.engine"):
            episodes = asyncio.run(
                engine.gather([turns(engine, i, 1 + i % 3, delays) for i in range(7)])
            )
        return [c for episode in episodes for c in episode], [
            r.getMessage() for r in caplog.records
        ]

    prompt_results, prompt_schedule = play(None)
    slow_results, slow_schedule = play(random.Random(seed))
    assert len(prompt_schedule) > 3
    assert slow_schedule == prompt_schedule
    assert same_bits(slow_results, prompt_results)


def test_decode_returns_when_a_prefill_call_can_be_filled(engine):
    def request(seed: int, num_tokens: int) -> tuple[np.ndarray, SamplingParams, int]:
        return prompt(seed, 4), sampling(num_tokens), seed

    # Two slots (prefill_rows) end after 1 step; the others 3 steps after their successors start.
    run(engine, *(request(i, n) for i, n in enumerate((2, 2, 5, 5, 5, 5))))
    stats = engine.stats()
    assert stats.decode_steps == 1 + 3 + 1
    assert stats.occupied_slot_steps == 4 * 1 + 4 * 3 + 2 * 1
    assert stats.late_compiles == 0
    assert stats.device_s > 0
    # One slot is not enough: its successor starts when the run of 4 steps is over.
    run(engine, *(request(i, n) for i, n in enumerate((2, 5, 5, 5, 5))))
    assert engine.stats().decode_steps == 4 + 4
    run(engine, request(0, 3))
    assert engine.stats().decode_steps == 2  # nothing is decoded after the last one ends


def test_failed_and_cancelled_coroutines_leave_the_engine_clean(engine):
    cases = [(prompt(i, 10), sampling(8), i) for i in range(4)]
    expected = run(engine, *cases)

    async def fail_later() -> None:
        await engine.generate(prompt(9, 5), sampling(2), jax.random.key(0))
        raise LookupError("environment broke")

    async def gives_up() -> Completion:
        call = asyncio.create_task(engine.generate(prompt(8, 5), sampling(40), jax.random.key(0)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.0, call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call
        return await engine.generate(*cases[0][:2], jax.random.key(0))

    waiting = [engine.generate(t, sampling(40), jax.random.key(s)) for t, _, s in cases]
    with pytest.raises(LookupError, match="environment broke"):
        asyncio.run(engine.gather([fail_later(), *waiting]))
    engine.load(parameters(), version=7)
    assert same_bits(asyncio.run(engine.gather([gives_up()])), expected[:1])
    engine.load(parameters(), version=7)  # fails if any slot were still in use
    assert same_bits(run(engine, *cases), expected)


def test_bad_requests_are_refused(engine):
    good, key = prompt(0, 5), jax.random.key(0)

    def refuse(match: str, tokens: np.ndarray, params: SamplingParams, on: Engine = engine) -> None:
        with pytest.raises(SamplerError, match=match):
            asyncio.run(on.gather([on.generate(tokens, params, key)]))

    refuse(
        r"64 tokens leaves no room .* engine.context_tokens=64; shorten it to 63",
        prompt(0, 64),
        sampling(),
    )
    refuse("0 tokens", good[:0], sampling())
    refuse(r"span 3..64; expected ids in 0..63", np.array([3, 64], np.int32), sampling())
    refuse("max_tokens=0", good, sampling(0))
    refuse("temperature=-1", good, sampling(temperature=-1.0))
    refuse("temperature=nan", good, sampling(temperature=float("nan")))
    refuse("9 stop ids", good, sampling(stop_ids=tuple(range(9))))
    refuse("before load", good, sampling(), new_engine())
    with pytest.raises(SamplerError, match="outside gather"):
        asyncio.run(engine.generate(good, sampling(), key))

    async def reload() -> None:
        engine.load(parameters(), version=8)

    with pytest.raises(SamplerError, match="while gather runs"):
        asyncio.run(engine.gather([reload()]))
    assert len(run(engine, (good, sampling(), 0))[0].tokens) == 6

    async def catches() -> int:
        with pytest.raises(SamplerError, match="64 tokens"):
            await engine.generate(prompt(0, 64), sampling(), key)
        return len((await engine.generate(good, sampling(), key)).tokens)

    assert asyncio.run(engine.gather([catches()])) == [6]


def test_load_drops_the_cache_and_release_lets_the_learner_donate(engine):
    start, params = prompt(1, 20), sampling(6)
    [first] = run(engine, (start, params, 1))
    learner = jax.tree.map(jnp.copy, parameters(1))
    engine.load(learner, version=8)
    engine.stats()
    [other] = run(engine, (start, params, 1))
    assert engine.stats().prefix_hit_tokens == 0
    assert other.policy_version == 8
    assert other.logprobs.tolist() != first.logprobs.tolist()
    engine.release()
    with pytest.raises(SamplerError, match="before load"):
        run(engine, (start, params, 1))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(learner)]
    halve = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree), donate_argnums=0)
    updated = halve(learner)
    assert [
        leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(updated)
    ] == pointers  # donated: updated in place
    engine.load(parameters(), version=7)
    assert same_bits(run(engine, (start, params, 1)), [first])


def test_every_program_is_compiled_ahead(shared):
    assert shared.num_compiles == len(set(shared.programs())) == 4  # allocate, 2 prefill, decode
    shared.compile()
    assert shared.num_compiles == 4


def test_chunks_cover_every_sequence_with_little_padding():
    for end in range(1, CONFIG.context_tokens):
        for start in range(end):
            pieces = plan_chunks(start, end, CONFIG.prefill_chunks)
            assert [pieces[0][1], *(piece[2] for piece in pieces)] == [
                start,
                *(p[1] for p in pieces[1:]),
                end,
            ]
            assert all(0 < stop - begin <= chunk for chunk, begin, stop in pieces)
            assert (
                sum(piece[0] for piece in pieces)
                < max(2 * (end - start), CONFIG.prefill_chunks[0]) + 1
            )


def test_same_tokens_on_eight_devices(engine):
    cases = [(prompt(i, 4 + 2 * i), sampling(4), i) for i in range(5)]
    expected = run(engine, *cases)
    sharded = new_engine(build_mesh(1, 2, 2, 2))
    sharded.load(parameters(), version=7)
    for result, reference in zip(run(sharded, *cases), expected, strict=True):
        assert result.tokens.tolist() == reference.tokens.tolist()
        np.testing.assert_allclose(result.logprobs, reference.logprobs, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scanned_layers_sample_what_the_learner_scores(dtype):
    """Stacked weights and cache, in the dtype of the learner's forward, which is the yardstick."""
    execution = dataclasses.replace(PLAIN, layers="scanned", compute_dtype=dtype)
    params = layout.stacked(parameters())
    scanned = Engine(MODEL, CONFIG, one_device(), execution)
    scanned.compile()
    scanned.load(params, version=7)
    cases = [(prompt(i, 4 + 9 * i), sampling(6), i) for i in range(5)]
    results = run(scanned, *cases)
    assert scanned.stats().late_compiles == 0 and scanned.num_compiles == 4
    assert [len(result.tokens) for result in results] == [6] * 5
    tokens = np.zeros((5, 64), np.int32)
    for row, (case, result) in enumerate(zip(cases, results, strict=True)):
        whole = np.concatenate([case[0], result.tokens])
        tokens[row, : len(whole)] = whole

    @jax.jit
    def learner(params, tokens):
        positions = jnp.tile(jnp.arange(64, dtype=jnp.int32)[None], (5, 1))
        out = transformer.forward(MODEL, params, tokens, positions, execution=execution)
        return jax.nn.log_softmax(transformer.logits(MODEL, params, out.hidden), axis=-1)

    likely = np.asarray(learner(params, tokens))
    bound = 1e-4 if dtype == "float32" else 0.1  # eight bits of mantissa against log-probs of -10
    for row, (case, result) in enumerate(zip(cases, results, strict=True)):
        places = len(case[0]) + np.arange(6)
        expected = likely[row, places - 1, result.tokens]
        np.testing.assert_allclose(result.logprobs, expected, atol=bound)
