"""The comparisons and stand-ins that other tests trust."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import ByteTokenizer, ScriptedPolicy, make_episode, make_group, tree_allclose, untimed
from spade_jax.types import Completion, Outcome, SamplingParams, Stop


@pytest.mark.parametrize(
    "other",
    [
        {"a": np.array([1.0, 2.1], np.float32)},
        {"a": np.array([1.0, 2.0], np.float64)},
        {"a": np.array([[1.0, 2.0]], np.float32)},
        {"a": np.array([1.0, np.nan], np.float32)},
        {"b": np.array([1.0, 2.0], np.float32)},
        {"a": np.array([1.0, 2.0], np.float32), "b": np.zeros(1)},
    ],
)
def test_tree_allclose_sees_a_difference(other: dict[str, np.ndarray]):
    tree = {"a": np.array([1.0, 2.0], np.float32)}
    assert tree_allclose(tree, tree)
    assert not tree_allclose(tree, other)


def test_tree_allclose_compares_integers_and_bfloat16():
    assert not tree_allclose(jnp.array([10**9]), jnp.array([10**9 + 1]))
    assert tree_allclose(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16))
    assert not tree_allclose(jnp.ones(2, jnp.bfloat16), 2 * jnp.ones(2, jnp.bfloat16))


def test_makers_take_overrides():
    assert make_episode().win
    assert not make_episode(outcome=Outcome.TURN_LIMIT).win
    assert len(make_group().trajectories) == len(make_group().advantages)


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    text = "caf\u00e9\n"
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]) == text


def test_policy_recites_in_order():
    policy = ScriptedPolicy(["ab<eos>", "cdef"])
    params = SamplingParams(temperature=1.0, max_tokens=3, stop_ids=(2,))

    async def ask(tokens: list[int]) -> Completion:
        return await policy.generate(np.array(tokens), params, key=None)

    first, second = asyncio.run(policy.gather([ask([7]), ask([8, 9])]))
    assert (first.tokens.tolist(), first.stop) == ([100, 101, 2], Stop.STOP_ID)
    assert (second.tokens.tolist(), second.stop) == ([102, 103, 104], Stop.MAX_TOKENS)
    assert policy.requests == [[7], [8, 9]]
    with pytest.raises(AssertionError, match="2 texts"):
        asyncio.run(ask([1]))


def test_untimed_drops_what_a_clock_gave():
    metrics = {"time/play_s": 1.0, "sampler/tokens_per_s": 2.0, "loss/agent": 3.0}
    assert untimed(metrics) == {"loss/agent": 3.0}
