"""What the policy said becomes a hint, or is refused and written once more."""

import asyncio

import jax
import pytest

from helpers import ScriptedPolicy
from spade_jax.config import HintConfig
from spade_jax.errors import ConfigError, SamplerError
from spade_jax.roles import hints
from spade_jax.types import Gate, GateResult, Verdict

PROGRAM = "class AEnv: pass"
TOLD = '''class AEnv:  # tell the player: amber
    """Hint writer, the answer is amber."""

    def reset(self, seed):
        # the player must know that amber wins
        return "Say it.", {}
'''
KEYS = [jax.random.key(index) for index in range(3)]
LEAK = Verdict(False, Gate.HINT_LEAK, "it told", gates={Gate.HINT_LEAK: GateResult.REFUSED})


def write(policy, chat, kind="compact", observation=None, refuse=(), program=PROGRAM, **settings):
    """The result, and what the gates were asked about."""
    seen = []

    async def judge(hint):
        seen.append(hint)
        return LEAK if hint in refuse or hint is None else Verdict(True)

    config = HintConfig(**({"max_tokens": 4000} | settings))
    made = hints.write(policy, chat, config, kind, program, observation, KEYS.__getitem__, judge)
    return asyncio.run(made), seen


def test_write_parses_what_the_policy_said(chat):
    policy = ScriptedPolicy(['{"hint": "Halve the range."}<eos>'], chat.tokenizer)
    written, seen = write(policy, chat)
    assert written.completion == '{"hint": "Halve the range."}'
    assert written.hint == "Halve the range." and seen == ["Halve the range."]
    assert PROGRAM in chat.decode(policy.requests[0])
    sampled = len(chat.tokenizer.encode('{"hint": "Halve the range."}')) + 1
    assert written.tokens == sampled


@pytest.mark.parametrize("kind", ["compact", "corpus", "tools"])
def test_what_a_designer_says_in_comments_and_docstrings_is_not_read(chat, kind):
    policy = ScriptedPolicy(["Ask.<eos>"], chat.tokenizer)
    write(policy, chat, kind, program=TOLD)
    shown = chat.decode(policy.requests[0])
    assert "class AEnv:\n" in shown and 'return "Say it.", {}' in shown
    assert "amber" not in shown


def test_the_compact_prompt_begins_again_after_a_refusal(chat):
    policy = ScriptedPolicy(["say done<eos>", "in order<eos>"], chat.tokenizer)
    written, seen = write(policy, chat, refuse=["say done"])
    assert (written.hint, seen) == ("in order", ["say done", "in order"])
    assert policy.requests[0] == policy.requests[1]


@pytest.mark.parametrize("kind", ["corpus", "tools"])
def test_a_long_prompt_tells_why_the_hint_was_refused(chat, kind):
    policy = ScriptedPolicy(["say done<eos>", "in order<eos>"], chat.tokenizer)
    written, _ = write(policy, chat, kind, refuse=["say done"])
    assert written.hint == "in order"
    first, second = policy.requests
    assert second[: len(first)] == first  # one conversation, token for token
    told = chat.decode(second[len(first) :])
    assert "say done" in told and '"hint_leak"' in told and "it told" in told


def test_after_the_last_attempt_there_is_no_hint(chat):
    policy = ScriptedPolicy(["say done<eos>"] * 2, chat.tokenizer)
    written, seen = write(policy, chat, "corpus", refuse=["say done"])
    assert written.hint is None and written.verdict.gate == "hint_leak"
    assert (len(seen), written.completion) == (2, "say done")


def test_what_was_cut_off_is_no_hint(chat):
    policy = ScriptedPolicy(["in the middle of", "in order<eos>"], chat.tokenizer)
    written, seen = write(policy, chat)
    assert (written.hint, seen) == ("in order", [None, "in order"])


def test_a_hint_for_one_instance_is_shown_how_it_begins(chat):
    policy = ScriptedPolicy(["in order<eos>"], chat.tokenizer)
    write(policy, chat, "corpus", "Seven levers.")
    assert "Seven levers." in chat.decode(policy.requests[0])


def test_a_program_that_leaves_no_room_has_no_hint(chat):
    class Full:
        async def generate(self, tokens, params, key):
            raise SamplerError("no room")

    written, seen = write(Full(), chat)
    assert written.verdict.gate == "hint" and "no room" in written.verdict.reason
    assert (written.hint, written.tokens, seen) == (None, 0, [])


def test_a_designer_cannot_write_hints_for_seeds():
    with pytest.raises(ConfigError, match=r"hint\.scope='seed'.*hint\.source=designer"):
        HintConfig(source="designer", scope="seed")
