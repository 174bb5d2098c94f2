"""The designer's conversation is token-exact: answers, refusals and thinking stay as they were."""

import asyncio
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import ScriptedPolicy
from models.tokenizer import load_tokenizer
from spade_jax.config import DesignerConfig
from spade_jax.roles import designer, prompts
from spade_jax.roles.prompts import tools
from spade_jax.roles_config import SKILLS, TOOL_SKILLS
from spade_jax.rollout.chat import Chat

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "chat"
FIRST = "Here.\n```python\nclass AEnv:\n    x = f'{go north}'\n```<eos>"
SECOND = "```python\nclass BEnv: pass\n```\n```hint\nLook twice.\n```<eos>"
ROOM = 100_000


def prompt_of(kind):
    return prompts.designer(
        prompts.Material(
            kind, "Tool Selection" if kind == "tools" else "Optimization", "easy", 25,
            document="A document.", domain=tools.DOMAINS[0],
        ),
        80,
    )  # fmt: skip


def talk_of(policy, chat, kind="corpus", room=ROOM, **settings):
    skills = TOOL_SKILLS if kind == "tools" else SKILLS
    config = DesignerConfig(**{"prompt": kind, "skills": skills, "max_tokens": 400, **settings})
    return designer.Conversation(policy, chat, config, room, prompt_of(kind), jax.random.key(0))


@pytest.fixture(scope="module")
def qwen3():
    return Chat(load_tokenizer(GOLDEN / "qwen3"))


def test_the_persona_is_the_system_message_where_there_is_one(qwen3, chat):
    prompt = prompt_of("corpus")
    with_system = qwen3.decode(designer.opening(qwen3, prompt))
    assert with_system.startswith(f"system\n{prompt.persona}") or prompt.persona in with_system
    assert designer.opening(qwen3, prompt).tolist() == (
        qwen3.open(prompt.text, prompt.persona).tolist()
    )
    assert designer.opening(chat, prompt).tolist() == (
        chat.open(f"{prompt.persona}\n\n{prompt.text}").tolist()
    )
    bare = replace(prompt, persona=None)
    assert designer.opening(qwen3, bare).tolist() == qwen3.open(prompt.text).tolist()


@pytest.mark.parametrize("kind", ["corpus", "tools", "compact"])
@pytest.mark.parametrize("thinking", [False, True])
def test_every_answer_is_a_sample_of_its_own_in_one_growing_conversation(qwen3, kind, thinking):
    thought = "<think>\nfirst a draft\n```python\nclass DraftEnv: pass\n```\n</think>\n\n"
    texts = [thought * thinking + FIRST, thought * thinking + SECOND]
    policy = ScriptedPolicy(texts, qwen3.tokenizer)
    talk = talk_of(policy, qwen3, kind, thinking=thinking)

    first = asyncio.run(talk.answer())
    assert first.program == "class AEnv:\n    x = f'{{go north}}'\n" and first.hint is None
    assert talk.refuse("It was refused.")
    second = asyncio.run(talk.answer())
    assert second.program == "class BEnv: pass\n" and second.hint == "Look twice."

    spoken = qwen3.with_thinking(thinking)
    opened = designer.opening(spoken, prompt_of(kind)).tolist()
    assert policy.requests[0] == opened
    one, other = first.trajectory, second.trajectory
    said = [t.tokens[t.loss_mask].tolist() for t in (one, other)]
    assert [spoken.decode(ids) for ids in said] == [first.text, second.text]
    reply = spoken.reply(np.array(said[0], np.int32), "It was refused.").tolist()
    # what the second answer was sampled from: the first as it was sampled, thinking included
    assert policy.requests[1] == opened + said[0] + reply
    assert other.tokens.tolist() == policy.requests[1] + said[1]
    assert ("first a draft" in qwen3.decode(policy.requests[1])) == thinking
    assert not other.loss_mask[: len(policy.requests[1])].any()
    assert set(one.turn_index) == {0} and set(other.turn_index[other.loss_mask]) == {1}
    assert (other.sampler_logprobs[other.loss_mask] == -0.25).all()


def test_an_answer_that_was_cut_off_is_closed_before_the_refusal(qwen3):
    policy = ScriptedPolicy([FIRST.removesuffix("<eos>"), SECOND], qwen3.tokenizer)
    talk = talk_of(policy, qwen3)
    first = asyncio.run(talk.answer())
    assert talk.refuse("It was cut off.")
    asyncio.run(talk.answer())
    end = qwen3.stop_ids[0]
    cut = len(first.trajectory.tokens)
    assert first.trajectory.tokens[-1] != end and policy.requests[1][cut] == end


def test_without_room_there_is_no_further_answer(qwen3):
    opened = len(designer.opening(qwen3, prompt_of("corpus")))
    policy = ScriptedPolicy([FIRST, SECOND], qwen3.tokenizer)
    talk = talk_of(policy, qwen3, room=opened + 100)
    first = asyncio.run(talk.answer())
    assert first.trajectory.loss_mask.sum() <= 100  # never more than there is room for
    assert not talk.refuse("It was refused.")
    assert len(policy.requests) == 1
