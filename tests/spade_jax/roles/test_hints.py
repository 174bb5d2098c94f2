"""Hints that give the winning actions away are refused."""

import asyncio

import jax
import pytest

from helpers import ScriptedPolicy
from spade_jax.config import HintConfig
from spade_jax.roles import hints

SOLUTIONS = [["fire cheby", "ripple", "lock"], ["ripple", "lock"]]


@pytest.mark.parametrize(
    ("hint", "part"),
    [
        (None, "no hint"),
        ("", "no hint"),
        ("word " * 11, "11 words"),
        ("Say \\boxed{ripple}", "boxed"),
        ("```\ncode\n```", "code"),
        ("First fire cheby, then ... no: Fire Cheby, ripple, lock!", "winning actions"),
        ("just RIPPLE lock", "winning actions"),
    ],
)
def test_refusals(hint, part):
    assert part in (hints.refusal(hint, SOLUTIONS, max_words=10) or "")


@pytest.mark.parametrize(
    "hint", ["lock comes last", "ripple never locks", "cheby fire ripple lock it"]
)
def test_a_hint_about_the_rule_is_shown(hint):
    # "ripple lock" in order is a solution of one seed, so only the last is refused
    expected = "winning actions" if "ripple lock" in hint else ""
    assert expected in (hints.refusal(hint, SOLUTIONS, max_words=10) or "")
    assert bool(hints.refusal(hint, SOLUTIONS, max_words=10)) == bool(expected)


def test_write_parses_what_the_policy_said(chat):
    policy = ScriptedPolicy(['{"hint": "Halve the range."}<eos>'], chat.tokenizer)
    key = jax.random.key(0)
    text, hint = asyncio.run(hints.write(policy, chat, HintConfig(), "class AEnv: pass", key))
    assert text == '{"hint": "Halve the range."}'
    assert hint == "Halve the range."
    assert "class AEnv: pass" in chat.decode(policy.requests[0])
