"""The judge fails closed: what is no clear yes refuses."""

import asyncio

import jax
import pytest

from helpers import ScriptedPolicy
from spade_jax.config import JudgeConfig
from spade_jax.errors import SamplerError
from spade_jax.roles.judge import judge


def verdict(chat, text, policy=None):
    policy = policy or ScriptedPolicy([text], chat.tokenizer)
    config = JudgeConfig(enabled=True, max_tokens=60)
    return asyncio.run(judge(policy, chat, config, "class GoEnv: pass", jax.random.key(0)))


@pytest.mark.parametrize("word", ["yes", "Yes", " YES ", "y", "true", "True"])
def test_a_clear_yes_accepts(chat, word):
    completion, refusal = verdict(chat, f"each one can be met. \\boxed{{{word}}}<eos>")
    assert completion is not None and refusal == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("\\boxed{no}<eos>", "finds that it cannot be solved: 'no'"),
        ("\\boxed{yes and no}<eos>", "cannot be solved"),
        ("\\boxed{}<eos>", "cannot be solved: ''"),
        ("yes<eos>", "gave no verdict"),
        ("<eos>", "gave no verdict"),
        ("<think>\\boxed{yes}</think><eos>", "gave no verdict"),
        ("\\boxed{yes} but on reflection \\boxed{no}<eos>", "'no'"),
        ("\\boxed{yes}", "was cut off"),  # what follows may take it back
    ],
)
def test_everything_else_refuses(chat, text, why):
    completion, refusal = verdict(chat, text)
    assert completion is not None and why in refusal


def test_a_judge_that_cannot_be_asked_refuses(chat):
    class Down:
        async def generate(self, tokens, params, key):
            raise SamplerError("the prompt leaves no room")

    assert verdict(chat, "", Down()) == (
        None,
        "the judge could not be asked: the prompt leaves no room",
    )
