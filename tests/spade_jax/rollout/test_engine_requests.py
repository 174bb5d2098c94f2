"""What one request may ask of the engine, and what is refused."""

import asyncio
import dataclasses
from typing import Any

import jax
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
)

from helpers import ByteTokenizer
from models import transformer
from models.errors import ModelError
from spade_jax.errors import SamplerError
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.record import Recorder
from spade_jax.types import Completion, SamplingParams, Stop, Thinking


class Letters(ByteTokenizer):
    """Sixty-four ids as text."""

    def decode(self, tokens) -> str:
        return "".join(chr(ord("0") + int(token)) for token in tokens)


LETTERS = Letters()


@pytest.fixture(scope="module")
def shared() -> Engine:
    return new_engine(tokenizer=LETTERS)


@pytest.fixture
def engine(shared: Engine) -> Engine:
    shared.load(parameters(), version=7)
    shared.stats()
    return shared


def test_stop_strings_end_a_completion_and_leave_no_trace(engine):
    start = prompt(3, 10)
    [free] = run(engine, (start, sampling(12), 5))
    text = LETTERS.decode(free.tokens)
    wanted = text[6:9]
    cases = [(start, sampling(12, stop_strings=("zzz", wanted)), 5)]
    cases += [(prompt(i, 20), sampling(12), i) for i in range(5)]
    stopped, *others = fresh(engine, *cases)
    assert stopped.stop is Stop.STOP_STRING
    assert stopped.tokens.tolist() == free.tokens[: text.index(wanted) + 3].tolist()
    assert same_bits(others, [fresh(engine, case)[0] for case in cases[1:]])
    # The next turn goes on from the cut: nothing of what was sampled beyond is left.
    following = np.concatenate([start, stopped.tokens, prompt(8, 3)])
    fresh(engine, cases[0])
    engine.stats()
    [found] = run(engine, (following, sampling(6), 5))
    assert engine.stats().prefix_hit_tokens == len(start) + len(stopped.tokens) - 1
    assert_teacher_forced(following, found, 1.0)
    [missed] = fresh(engine, (following, sampling(6), 5))
    assert found.tokens.tolist() == missed.tokens.tolist()


def test_a_budget_closes_the_thinking_block(engine):
    """Ids 1 and 2 open and close a block; the prompt has opened one."""
    block = Thinking(1, 2, (9, 2, 9))
    free = next(s for s in range(9) if 2 not in _free(engine, s).tokens)
    start = np.concatenate([prompt(free, 12), [1]]).astype(np.int32)
    params = sampling(14, thinking_tokens=5, thinking=block)
    [closed] = fresh(engine, (start, params, free))
    [whole] = fresh(engine, (start, sampling(14), free))
    assert closed.tokens[:5].tolist() == whole.tokens[:5].tolist()
    assert closed.tokens[5:8].tolist() == [9, 2, 9]
    assert closed.forced is not None
    assert closed.forced.tolist() == [False] * 5 + [True] * 3 + [False] * 6
    assert len(closed.tokens) == 14 and (closed.logprobs[5:8] == 0).all()
    assert_teacher_forced(start, closed, 1.0)
    strangers = [(prompt(40 + i, 5 + 6 * i), sampling(9), i) for i in range(7)]
    crowd = fresh(engine, *strangers, (start, params, free))
    assert same_bits(crowd[-1:], [closed])
    record = Recorder()
    record.add_prompt(start)
    record.add_completion(closed)
    trajectory = record.build(1.0)
    assert trajectory is not None
    assert trajectory.loss_mask[len(start) :].tolist() == (~closed.forced).tolist()


def _free(engine: Engine, seed: int) -> Completion:
    start = np.concatenate([prompt(seed, 12), [1]]).astype(np.int32)
    return fresh(engine, (start, sampling(14), seed))[0]


def test_deadlines_end_requests_with_what_there_is(engine):
    hurried = sampling(50, deadline_s=1e-6)
    late, *others = run(
        engine, (prompt(0, 10), hurried, 0), *((prompt(i, 9), sampling(9), i) for i in range(5))
    )
    assert late.stop is Stop.DEADLINE and late.stop.cut
    assert len(late.tokens) == len(late.logprobs) < 50
    assert [len(other.tokens) for other in others] == [9] * 5
    [patient] = fresh(engine, (prompt(0, 10), sampling(9, deadline_s=1000.0), 0))
    assert same_bits([patient], fresh(engine, (prompt(0, 10), sampling(9), 0)))
    assert engine.num_held_pages == 0
    record = Recorder()
    record.add_completion(late)
    assert (record.build(1.0) is None) == (len(late.tokens) == 0)


def test_a_deadline_holds_while_another_environment_is_slow(engine):
    """Rounds wait for all that were answered; a request that is out of time does not."""

    async def slow() -> None:
        await engine.generate(prompt(0, 5), sampling(2), jax.random.key(0))
        await asyncio.wait_for(ended.wait(), 60)

    async def hurried() -> Completion:
        await engine.generate(prompt(1, 5), sampling(2), jax.random.key(1))
        late = await engine.generate(prompt(2, 5), sampling(50, deadline_s=0.2), jax.random.key(2))
        ended.set()
        return late

    async def main() -> list[Any]:
        return await engine.gather([slow(), hurried()])

    ended = asyncio.Event()
    _, late = asyncio.run(main())
    assert late.stop is Stop.DEADLINE and len(late.tokens) < 50
    assert engine.num_held_pages == 0


def test_router_choices_of_every_token_in_the_cache():
    engine = new_engine(dataclasses.replace(CONFIG, routing=True))
    record, key = Recorder(), jax.random.key(3)

    async def episode() -> None:
        record.add_prompt(prompt(5, 21))
        for turn in range(2):
            completion = await engine.generate(record.tokens, sampling(7, routing=True), key)
            known = len(record) + len(completion.tokens) - 1
            assert completion.routing is not None and completion.routing.shape == (known, 2, 2)
            record.add_completion(completion)
            record.add_prompt(prompt(turn, 4))

    others = [engine.generate(prompt(5, 21), sampling(4), jax.random.key(i)) for i in range(3)]
    asyncio.run(engine.gather([episode(), *others]))
    trajectory = record.build(1.0)
    assert trajectory is not None and trajectory.routing is not None
    assert trajectory.routing.shape == (len(trajectory.tokens), 2, 2)
    length = len(trajectory.tokens)
    forward = jax.jit(lambda params, *rows: transformer.forward(MODEL, params, *rows).routing)
    positions = np.arange(length, dtype=np.int32)[None]
    chosen = np.asarray(forward(parameters(), trajectory.tokens[None], positions).chosen)
    # [layers, rows, seq, chosen] of the learner's forward; the last token's are not known yet
    expected = chosen[:, 0].transpose(1, 0, 2)[:-1]
    assert np.array_equal(trajectory.routing[:-1], expected)
    assert sorted(trajectory.routing[-1, 0].tolist()) == [0, 1]


def test_routing_needs_routers():
    dense = dataclasses.replace(MODEL, num_experts=1, experts_per_token=1)
    engine = Engine(dense, dataclasses.replace(CONFIG, routing=True), one_device())
    with pytest.raises(ModelError, match="num_experts=1 has no router"):
        engine.compile()


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
    refuse("top_p=0", good, sampling(top_p=0.0))
    refuse("9 stop ids", good, sampling(stop_ids=tuple(range(9))))
    refuse("empty string", good, sampling(stop_strings=("a", "")))
    refuse("thinking_tokens=3 with thinking=None", good, sampling(thinking_tokens=3))
    refuse("deadline_s=-1", good, sampling(deadline_s=-1.0))
    refuse("set engine.routing", good, sampling(routing=True))
    plain = new_engine()
    refuse("has no tokenizer", good, sampling(stop_strings=("a",)), plain)
    scarce = Engine(MODEL, dataclasses.replace(CONFIG, kv_tokens=40), one_device())
    scarce._leaves = ()
    refuse(
        "max_tokens=40 may come to 45, but the cache holds 40 in 5 pages of 8; raise",
        good,
        sampling(40),
        scarce,
    )
    plain.release()
    refuse("before load", good, sampling(), plain)
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
