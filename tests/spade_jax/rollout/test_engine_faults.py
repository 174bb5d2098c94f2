"""What goes wrong around the engine ends cleanly: pages come back, and the rest goes on."""

import asyncio
import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from samplers import (
    CONFIG,
    MODEL,
    fresh,
    new_engine,
    one_device,
    parameters,
    prompt,
    run,
    same_bits,
    sampling,
)

from models.transformer import init_params
from spade_jax.errors import SamplerError
from spade_jax.rollout.engine import Engine
from spade_jax.types import Completion, Stop

CASES = [(prompt(i, 10), sampling(8), i) for i in range(4)]


@pytest.fixture(scope="module")
def shared() -> Engine:
    return new_engine()


@pytest.fixture
def engine(shared: Engine):
    shared.load(parameters(), version=7)
    shared.stats()
    yield shared
    assert shared.num_held_pages == 0
    shared.load(parameters(), version=7)  # refused if any page were still in use


@pytest.fixture(scope="module")
def expected(shared: Engine) -> list[Completion]:
    return fresh(shared, *CASES)


def calls(engine: Engine, max_tokens: int = 40):
    return [engine.generate(t, sampling(max_tokens), jax.random.key(s)) for t, _, s in CASES]


def test_a_coroutine_that_raises(engine, expected):
    async def fail_later() -> None:
        await engine.generate(prompt(9, 5), sampling(2), jax.random.key(0))
        raise LookupError("environment broke")

    with pytest.raises(LookupError, match="environment broke"):
        asyncio.run(engine.gather([fail_later(), *calls(engine)]))
    assert engine.num_held_pages == 0
    assert same_bits(fresh(engine, *CASES), expected)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_cancelled_episode(engine, expected, rounds):
    """Cancelled while it waits, in its prefill or while it decodes; its coroutine goes on."""

    async def gives_up() -> Completion:
        call = asyncio.create_task(engine.generate(prompt(8, 50), sampling(13), jax.random.key(0)))
        while engine._stats.rounds < rounds:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return await engine.generate(*CASES[0][:2], jax.random.key(0))

    others = [engine.generate(t, p, jax.random.key(s)) for t, p, s in CASES[1:]]
    first, *rest = asyncio.run(engine.gather([gives_up(), *others]))
    assert same_bits([first, *rest], expected)


def test_a_cancelled_leader_leaves_its_followers_whole(engine):
    start = prompt(3, 29)
    alone = [fresh(engine, (start, sampling(9), seed))[0] for seed in range(4)]

    async def gives_up() -> None:
        call = asyncio.create_task(engine.generate(start, sampling(9), jax.random.key(9)))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call

    engine.load(parameters(), version=7)
    others = [engine.generate(start, sampling(9), jax.random.key(seed)) for seed in range(4)]
    _, *rest = asyncio.run(engine.gather([gives_up(), *others]))
    assert same_bits(rest, alone)


def test_cancelling_the_whole_gather_mid_round(engine, expected):
    async def main() -> None:
        task = asyncio.create_task(engine.gather(calls(engine)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.num_held_pages == 0
    assert same_bits(fresh(engine, *CASES), expected)


@pytest.mark.parametrize("times", [1, 2])
def test_what_a_cancelled_round_wrote_over_is_not_found_again(times):
    """One lane, and a cache that a prompt fills: the round that is cancelled, once or again while
    it is waited for, takes the pages in which the prompt would be found.
    """
    engine = new_engine(
        dataclasses.replace(CONFIG, slots=1, queue=0, kv_tokens=64, decode_steps=32)
    )
    case = (prompt(0, 40), sampling(6), 0)
    [expected] = run(engine, case)
    inside, go_on = threading.Event(), threading.Event()
    whole = engine._execute

    def slow(plan):
        inside.set()
        assert go_on.wait(60)
        return whole(plan)

    async def main() -> None:
        call = engine.generate(prompt(1, 9), sampling(40), jax.random.key(1))
        task = asyncio.create_task(engine.gather([call]))
        while not inside.is_set():
            await asyncio.sleep(0.001)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "_execute", slow)
        asyncio.run(main())
    assert engine.num_held_pages == 0
    [again] = run(engine, case)
    assert again.tokens.tolist() == expected.tokens.tolist()
    assert np.abs(again.logprobs - expected.logprobs).max() < 1e-4


def test_stopping_mid_round(engine, expected):
    async def stop_soon() -> None:
        await engine.generate(prompt(9, 5), sampling(2), jax.random.key(0))
        engine.stop()

    async def goes_on() -> Completion:
        first = await engine.generate(prompt(7, 5), sampling(50), jax.random.key(0))
        with pytest.raises(SamplerError, match="was stopped"):
            await engine.generate(prompt(7, 5), sampling(50), jax.random.key(0))
        return first

    results = asyncio.run(engine.gather([stop_soon(), goes_on(), *calls(engine, 50)]))
    assert {result.stop for result in results[1:]} == {Stop.CANCELLED}
    assert all(len(result.tokens) < 50 for result in results[1:])
    assert any(len(result.tokens) > 0 for result in results[1:])
    assert engine.num_held_pages == 0
    assert same_bits(fresh(engine, *CASES), expected)


def test_weights_that_are_no_numbers_fail_a_request(engine):
    engine.load(jax.tree.map(lambda leaf: leaf * np.float32(np.nan), parameters()), version=8)

    async def fails() -> str:
        with pytest.raises(SamplerError) as error:
            await engine.generate(CASES[2][0], sampling(8), jax.random.key(2))
        return str(error.value)

    [text] = asyncio.run(engine.gather([fails()]))
    assert "position 10 were not numbers (a request of 10 tokens, 0 sampled)" in text
    assert engine.stats().failed_count == 1
    assert engine.num_held_pages == 0


def test_scores_of_one_row_that_are_no_numbers():
    """The embedding of one id is not a number: on the device, only the row that holds it fails."""
    model = dataclasses.replace(MODEL, tied_head=False)
    engine = Engine(model, CONFIG, one_device())
    engine.compile()
    params = init_params(model, jax.random.key(0))
    engine.load(params, version=7)
    expected = run(engine, *CASES)
    bad = min(set(range(64)) - {int(token) for start, _, _ in CASES for token in start})
    assert all(bad not in completion.tokens for completion in expected)
    engine.load(
        jax.tree.map_with_path(
            lambda path, leaf: leaf.at[bad].set(np.nan) if "embedding" in str(path) else leaf,
            params,
        ),
        version=8,
    )

    async def fails() -> str:
        with pytest.raises(SamplerError) as error:
            await engine.generate(np.array([1, bad, 3], np.int32), sampling(8), jax.random.key(2))
        return str(error.value)

    text, *rest = asyncio.run(engine.gather([fails(), *calls(engine, 8)]))
    assert "position 3 were not numbers" in text
    assert same_bits(rest, expected)
    assert engine.stats().failed_count == 1 and engine.num_held_pages == 0


def test_a_failed_row_leaves_its_neighbours_alone(engine, expected, monkeypatch):
    """The program reports no token for one row of a prefill and for one row of a decode run."""
    whole = engine._execute

    def spoil(plan):
        results = whole(plan)
        lanes = {lane.request.tokens[0]: lane.index for lane in engine._rounds._lanes.values()}
        drawn = [tuple(map(np.array, call)) for call in results.drawn]
        for call, (tokens, *_) in zip(plan.calls, drawn, strict=True):
            for row, (_, lane) in enumerate(call.ends):
                if lane.request.tokens[0] == first:
                    tokens[row] = -1
        decoded = results.decoded
        if decoded is not None and second in lanes:
            fields = [np.array(field) for field in decoded]
            rows = np.argwhere(fields[0] == lanes[second])
            if len(rows):
                fields[1][tuple(rows[-1])] = -1
            decoded = tuple(fields)
        return results._replace(drawn=drawn, decoded=decoded)

    first, second = int(CASES[1][0][0]), int(CASES[3][0][0])
    assert len({int(tokens[0]) for tokens, _, _ in CASES}) == 4
    monkeypatch.setattr(engine, "_execute", spoil)

    async def guarded(case) -> Completion | str:
        try:
            return await engine.generate(case[0], case[1], jax.random.key(case[2]))
        except SamplerError as error:
            return str(error)

    results = asyncio.run(engine.gather([guarded(case) for case in CASES]))
    assert isinstance(results[1], str) and isinstance(results[3], str)
    assert "position 10 were not numbers" in results[1]
    assert "the weights have diverged" in results[3]
    assert same_bits([results[0], results[2]], [expected[0], expected[2]])
    assert engine.stats().failed_count == 2


def test_an_error_on_the_device_is_raised_and_weights_begin_anew(engine, expected, monkeypatch):
    def broken(plan):
        engine._state = None
        raise RuntimeError("device lost")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_execute", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            asyncio.run(engine.gather(calls(engine)))
    with pytest.raises(SamplerError, match="load weights to begin anew"):
        asyncio.run(engine.gather(calls(engine)))
    assert same_bits(fresh(engine, *CASES), expected)


def test_a_flood_of_ten_thousand_requests(engine):
    """All are served, and one costs the host no more than one of a few hundred does."""

    def flood(size: int) -> tuple[list[Completion], float]:
        engine.stats()
        key = np.zeros(2, np.uint32)
        requests = [
            engine.generate(prompt(i % 7, 4 + i % 5), sampling(2), key) for i in range(size)
        ]
        results = asyncio.run(engine.gather(requests))
        return results, engine.stats().host_s / size

    _, few = flood(300)
    started = time.perf_counter()
    results, many = flood(10_000)
    assert len(results) == 10_000 and all(len(result.tokens) == 2 for result in results)
    assert many < 3 * few
    assert time.perf_counter() - started < 400


def test_pages_run_out_under_many_long_requests():
    """Four slots, room for one and a bit: they take turns, none is lost, none is refused."""
    engine = new_engine(dataclasses.replace(CONFIG, kv_tokens=80))
    cases = [(prompt(i, 20), sampling(40), i) for i in range(12)]
    results = run(engine, *cases)
    assert [len(result.tokens) for result in results] == [40] * 12
    stats = engine.stats()
    assert stats.preempted_count > 0
    assert stats.held_pages_max <= 10
    assert engine.num_held_pages == 0
