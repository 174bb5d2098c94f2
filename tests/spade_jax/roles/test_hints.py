"""What the policy said becomes a hint."""

import asyncio

import jax

from helpers import ScriptedPolicy
from spade_jax.config import HintConfig
from spade_jax.roles import hints


def test_write_parses_what_the_policy_said(chat):
    policy = ScriptedPolicy(['{"hint": "Halve the range."}<eos>'], chat.tokenizer)
    key = jax.random.key(0)
    text, hint = asyncio.run(hints.write(policy, chat, HintConfig(), "class AEnv: pass", key))
    assert text == '{"hint": "Halve the range."}'
    assert hint == "Halve the range."
    assert "class AEnv: pass" in chat.decode(policy.requests[0])
