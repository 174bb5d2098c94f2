"""The engine samples what the model says, to the same bits whatever happens around a request."""

import asyncio
import dataclasses
import functools
import logging
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from samplers import (
    CONFIG,
    MODEL,
    assert_teacher_forced,
    fresh,
    new_engine,
    one_device,
    parameters,
    prompt,
    run,
    same_bits,
    sampling,
    scores,
)

from models import layout, quantized, transformer
from models.execution import PLAIN
from models.sharding import build_mesh
from spade_jax.config import EngineConfig
from spade_jax.errors import SamplerError
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.sampling import Rule, draw
from spade_jax.types import Completion, SamplingParams, Stop


@pytest.fixture(scope="module")
def shared() -> Engine:
    return new_engine()


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.load(parameters(), version=7)
    shared.stats()
    return shared


@functools.cache
def _draw():
    return jax.jit(draw)


def naive(start: np.ndarray, params: SamplingParams, seed: int) -> list[int]:
    """Sample one sequence token by token with a training-mode forward: no cache, no batch."""
    tokens = start.tolist()
    one = functools.partial(jnp.full, (1,))
    rule = Rule(
        jax.random.key_data(jax.random.key(seed))[None],
        one(params.temperature, jnp.float32),
        one(params.top_p, jnp.float32),
        one(params.min_p, jnp.float32),
        one(params.top_k, jnp.int32),
    )
    while True:
        logits = jnp.asarray(scores(np.array(tokens, np.int32))[-1:])
        tokens.append(int(_draw()(logits, rule, one(len(tokens), jnp.int32)).tokens[0]))
        done = len(tokens) - len(start) == params.max_tokens or len(tokens) == 64
        if done or tokens[-1] in params.stop_ids:
            return tokens[len(start) :]


def test_equals_naive_sampling_with_more_requests_than_lanes(engine):
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
        assert completion.policy_version == 7 and completion.forced is None
        assert np.array_equal(completion.logprobs, completion.untruncated_logprobs)
        assert_teacher_forced(start, completion, params.temperature)
    assert engine.num_held_pages == 0


def test_eight_bit_weights_are_sampled_from_as_they_are_rounded():
    """To the last bit what an engine samples from weights that were rounded beforehand."""

    def there_and_back(value, axes):
        small = quantized.quantize(value, quantized.summed_axis(axes))
        return quantized.dequantize(small, jnp.float32)

    cases = [(prompt(i, 5 + 9 * i), sampling(8), i) for i in range(4)]
    found = run(new_engine(dataclasses.replace(CONFIG, weights="int8")), *cases)
    rounded = quantized.map_matrices(there_and_back, parameters())
    assert same_bits(found, run(new_engine(params=rounded), *cases))
    assert not same_bits(found, run(new_engine(), *cases))


def test_requests_that_copy_from_one_page_in_one_round(engine):
    start = prompt(1, 22)  # two pages, and six tokens in a third
    run(engine, (start, sampling(2), 0))
    cases = [
        (np.append(start[: 21 - i], np.int32((start[21 - i] + 1) % 64)), sampling(6), i)
        for i in range(4)
    ]
    engine.stats()
    completions = run(engine, *cases)
    assert engine.stats().prefix_hit_tokens == sum(len(tokens) - 1 for tokens, _, _ in cases)
    for (tokens, params, seed), completion in zip(cases, completions, strict=True):
        assert completion.tokens.tolist() == naive(tokens, params, seed)
        assert_teacher_forced(tokens, completion, 1.0)


def test_truncated_requests_beside_others(engine):
    options = ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {}, {"top_k": 5, "top_p": 0.9})
    cases = [(prompt(i, 10), sampling(8, **each), i) for i, each in enumerate(options)]
    for (start, params, seed), completion in zip(cases, run(engine, *cases), strict=True):
        assert completion.tokens.tolist() == naive(start, params, seed)
        assert_teacher_forced(start, completion, 1.0)
        assert (completion.logprobs >= completion.untruncated_logprobs).all()
        equal = np.array_equal(completion.logprobs, completion.untruncated_logprobs)
        assert equal == (params == sampling(8))


def test_stop_reasons(engine):
    start = prompt(3, 10)
    free = naive(start, sampling(9), 5)
    # ends on the device, after some tokens
    first_seen = next(i for i in range(3, 9) if free[i] not in free[:i])
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


CASES = [(prompt(i, length), sampling(7), i) for i, length in enumerate((3, 9, 14, 30, 33, 50))]


@pytest.fixture(scope="module")
def alone(shared: Engine) -> list[Completion]:
    """What each of the cases gives by itself."""
    return [completion for case in CASES for completion in fresh(shared, case)]


def test_bits_do_not_depend_on_neighbours_order_or_engine(engine, alone):
    assert same_bits(fresh(engine, *CASES), alone)
    assert same_bits(fresh(engine, *CASES[::-1])[::-1], alone)
    strangers = [(prompt(100 + i, 4 + 9 * i), sampling(5, 0.3), i) for i in range(6)]
    assert same_bits(fresh(engine, *strangers[:3], *CASES, *strangers[3:])[3:-3], alone)
    relatives = [(start[:20], params, seed + 9) for start, params, seed in CASES]
    assert same_bits(fresh(engine, *relatives, *CASES)[6:], alone)  # their pages are found
    assert engine.stats().prefix_hit_tokens > 40
    assert same_bits(run(new_engine(), *CASES), alone)


def test_a_copy_of_a_copy_in_one_round_is_the_first_one(engine):
    """Three prompts of one beginning find it in a cached page that none of them owns: each copies
    the page, and the second would find the first one's copy.
    """
    begin = prompt(9, 3)
    run(engine, (np.append(begin, 1).astype(np.int32), sampling(4), 0))
    cases = [(np.append(begin, i).astype(np.int32), sampling(6, 0.0), i) for i in (2, 3, 4)]
    for (start, params, seed), completion in zip(cases, run(engine, *cases), strict=True):
        assert completion.tokens.tolist() == naive(start, params, seed)
        assert_teacher_forced(start, completion, 0.0)
    assert engine.stats().prefix_hit_tokens >= 9


def test_bits_do_not_depend_on_giving_pages_back(alone):
    """A cache so small that lanes in line must wait again; those that decode are not touched."""
    engine = new_engine(dataclasses.replace(CONFIG, queue=12, kv_tokens=4 * 64 + 8))
    cases = [case for case in CASES for _ in range(3)]
    expected = [completion for completion in alone for _ in range(3)]
    assert same_bits(fresh(engine, *cases), expected)
    assert engine.num_held_pages == 0


OTHER = dataclasses.replace(
    CONFIG, slots=8, queue=8, page_tokens=4, decode_steps=16, prefill_tokens=128
)


@pytest.mark.parametrize(
    "config",
    [
        OTHER,
        dataclasses.replace(CONFIG, slots=2, queue=0, page_tokens=16, piece_tokens=32),
        # lanes that decode have to give way, and go on from what is left of their pages
        dataclasses.replace(CONFIG, kv_tokens=80),
    ],
    ids=["large", "small", "scarce"],
)
def test_other_shapes_agree_up_to_rounding(config):
    engine = new_engine(config)
    cases = [(start, sampling(14), seed) for start, _, seed in CASES[:5]]
    for case, completion in zip(cases, run(engine, *cases), strict=True):
        assert completion.tokens.tolist() == naive(*case)
        assert_teacher_forced(case[0], completion, 1.0)
    assert (engine.stats().preempted_count > 0) == (config.kv_tokens > 0)
    assert engine.num_held_pages == 0


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
    # 9 + 4 and then 17 + 4 that the pages hold.
    assert stats.prefilled_tokens == 3 * (9 + 4 + 4)
    assert stats.prefix_hit_tokens == 3 * (13 + 21)
    assert stats.sampled_tokens == 3 * 15
    for seed, completions in enumerate(together):
        tokens = prompt(seed, 9)
        for completion in completions:
            assert_teacher_forced(tokens, completion, 1.0)
            [missed] = fresh(engine, (tokens, sampling(5), seed))
            assert missed.tokens.tolist() == completion.tokens.tolist()
            np.testing.assert_allclose(missed.logprobs, completion.logprobs, atol=1e-4)
            reply = prompt(int(completion.tokens.sum()), 3)
            tokens = np.concatenate([tokens, completion.tokens, reply])


@pytest.mark.parametrize("length", [24, 29, 7])  # full pages, a partial last one, only a partial
def test_a_group_computes_its_prompt_once(engine, length):
    start = prompt(1, length)
    singles = [fresh(engine, (start, sampling(9), seed))[0] for seed in range(8)]
    engine.load(parameters(), version=7)
    engine.stats()
    group = run(engine, *((start, sampling(9), seed) for seed in range(8)))
    stats = engine.stats()
    assert same_bits(group, singles)
    # Six lanes: four are drawn behind the first one's prompt, and of those after them two and two
    # compute its last token again.
    assert stats.prefilled_tokens == length + 2
    assert stats.prefilled_tokens + stats.prefix_hit_tokens == 8 * length
    assert len({tuple(completion.tokens.tolist()) for completion in group}) > 4


@pytest.mark.parametrize("seed", range(3))
def test_slow_replies_change_neither_results_nor_schedule(engine, seed):
    def play(delays: random.Random | None) -> tuple[list[Completion], tuple[int, ...]]:
        engine.load(parameters(), version=7)
        engine.stats()
        episodes = asyncio.run(
            engine.gather([turns(engine, i, 1 + i % 3, delays) for i in range(7)])
        )
        stats = engine.stats()
        shape = (stats.rounds, stats.decode_steps, stats.prefilled_tokens, stats.held_places)
        return [c for episode in episodes for c in episode], shape

    prompt_results, prompt_schedule = play(None)
    slow_results, slow_schedule = play(random.Random(seed))
    assert prompt_schedule[0] > 3
    assert slow_schedule == prompt_schedule
    assert same_bits(slow_results, prompt_results)


def test_lanes_in_line_take_free_slots_without_the_host():
    engine = new_engine(OTHER)
    short = [(prompt(i, 4), sampling(4), i) for i in range(12)]
    long = [(prompt(i, 4), sampling(13), i) for i in range(12, 16)]
    results = run(engine, *short, *long)
    stats = engine.stats()
    # 16 requests for 8 slots: the short ones end after 3 steps, and others go on in their slots.
    assert [len(result.tokens) for result in results] == [4] * 12 + [13] * 4
    assert stats.rounds <= 5
    assert stats.occupied_slot_steps == 12 * 3 + 4 * 12
    assert stats.occupied_slot_steps / (stats.decode_steps * 8) > 0.5
    for case, result in zip([*short, *long], results, strict=True):
        assert result.tokens.tolist() == naive(*case)


def test_long_prompts_do_not_stall_those_that_decode():
    """One call of 64 prompt tokens a round: the others decode between the pieces of a prompt."""
    config = EngineConfig(
        slots=4,
        queue=0,
        context_tokens=512,
        page_tokens=8,
        piece_tokens=16,
        prefill_tokens=64,
        prefill_calls=1,
        decode_steps=4,
    )
    engine = new_engine(config)
    events = []

    async def request(name: str, length: int, num_tokens: int) -> None:
        await engine.generate(prompt(1, length), sampling(num_tokens), jax.random.key(0))
        events.append((name, engine._stats.rounds))

    asyncio.run(engine.gather([request("short", 4, 12), request("long", 500, 2)]))
    (first, early), (second, late) = events
    assert (first, second) == ("short", "long")
    # "short" took its 11 decode steps while "long" was at its first pieces: ceil(500 / 64) rounds.
    assert early <= 4 and 8 <= late <= 11


def test_load_drops_the_cache_and_release_lets_the_learner_donate(engine):
    start, params = prompt(1, 20), sampling(6)
    [first] = run(engine, (start, params, 1))
    learner = jax.tree.map(jnp.copy, parameters(1))
    engine.load(learner, version=8)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(learner)]
    assert engine._leaves is not None  # on one device the learner's own arrays are used
    assert [leaf.unsafe_buffer_pointer() for leaf in engine._leaves] == pointers
    engine.stats()
    [other] = run(engine, (start, params, 1))
    assert engine.stats().prefix_hit_tokens == 0
    assert other.policy_version == 8
    assert other.logprobs.tolist() != first.logprobs.tolist()
    engine.release()
    with pytest.raises(SamplerError, match="before load"):
        run(engine, (start, params, 1))
    halve = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree), donate_argnums=0)
    updated = halve(learner)
    # donated: updated in place
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(updated)] == pointers
    assert same_bits(fresh(engine, (start, params, 1)), [first])


def test_every_program_is_compiled_ahead(caplog):
    late = Engine(MODEL, CONFIG, one_device())
    late.load(parameters(), version=7)
    run(late, CASES[0])
    assert late.num_compiles == late.stats().late_compiles == 4
    assert "decode was not compiled ahead" in caplog.text
    with caplog.at_level(logging.INFO):
        late.compile()
    # allocate, place, copy, prefill, decode
    assert late.num_compiles == len(set(late.programs())) == 5
    assert "program copy: 0.1 MiB arguments" in caplog.text
    run(late, *CASES)
    assert late.stats().late_compiles == 0
    assert len(new_engine(OTHER).programs()) == 6  # prefill of 64 and of 128 tokens


def test_nothing_is_compiled_after_the_first_of_three_cycles(engine, caplog):
    """By jax's own log, whatever is asked, and with weights let go of and loaded in between."""
    cases = [*CASES, (CASES[0][0], sampling(5, 0.5, (3,), top_k=3), 1), *CASES[:2]]
    jax.config.update("jax_log_compiles", True)
    try:
        for cycle in range(3):
            caplog.clear()
            engine.release()
            engine.load(parameters(), version=cycle)
            asyncio.run(engine.gather([turns(engine, seed, 3) for seed in range(7)]))
            run(engine, *cases)
        assert "ompil" not in caplog.text
        jax.jit(lambda x: x * 3.5)(np.float32(1))
        assert "Compiling" in caplog.text  # which the log would have shown
    finally:
        jax.config.update("jax_log_compiles", False)
    assert engine.stats().late_compiles == 0


@pytest.mark.parametrize("axes", [(1, 2, 1, 4), (1, 2, 4, 1)], ids=["tensor", "experts"])
def test_same_tokens_on_eight_devices(engine, axes):
    cases = [(prompt(i, 4 + 9 * i), sampling(7), i) for i in range(6)]
    expected = run(engine, *cases)
    sharded = new_engine(mesh=build_mesh(*axes))
    for result, reference in zip(run(sharded, *cases), expected, strict=True):
        assert result.tokens.tolist() == reference.tokens.tolist()
        np.testing.assert_allclose(result.logprobs, reference.logprobs, atol=1e-4)
    assert sharded.stats().late_compiles == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scanned_layers_sample_what_the_learner_scores(dtype):
    """Stacked weights and cache, in the dtype of the learner's forward, which is the yardstick."""
    execution = dataclasses.replace(PLAIN, layers="scanned", compute_dtype=dtype)
    params = layout.stacked(parameters())
    scanned = new_engine(execution=execution, params=params)
    cases = [(prompt(i, 4 + 9 * i), sampling(6), i) for i in range(5)]
    results = run(scanned, *cases)
    assert scanned.stats().late_compiles == 0
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
