"""The play loop against scripted policies and scripted environments: every ending is its own
outcome.
"""

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest

from helpers import ScriptedPolicy
from spade_jax.config import AgentConfig
from spade_jax.roles import agent
from spade_jax.types import (
    Arm,
    Environment,
    EnvironmentSource,
    Fault,
    Outcome,
    Reply,
    Verdict,
)


class ScriptedInstance:
    """Answers each step with its next reply and keeps the actions."""

    def __init__(self, replies):
        self.observation = "Say go twice."
        self.replies, self.actions, self.closed = list(replies), [], False

    async def step(self, action):
        self.actions.append(action)
        return self.replies.pop(0)

    async def close(self):
        self.closed = True


class ScriptedPool:
    def __init__(self, opened):
        self.opened = opened

    async def open(self, program, seed):
        return self.opened


ENVIRONMENT = Environment(
    EnvironmentSource("class GoEnv: pass", "Optimization", "easy", "d"),
    "say go",
    0,
    "design",
    Verdict(True),
)
PLAN = agent.Play("episode", ENVIRONMENT, Arm.UNHINTED, 3, 0, 7)
GOING = Reply("again", 0.1, False, False)


def play(chat, texts, replies, plan=PLAN, config=None, context=200):
    instance = replies if isinstance(replies, Fault) else ScriptedInstance(replies)
    policy = ScriptedPolicy(texts, chat.tokenizer)
    config = config or AgentConfig(max_turns=3, max_tokens=40)
    episode = asyncio.run(
        agent.play(policy, chat, ScriptedPool(instance), config, context, plan, jax.random.key(0))
    )
    return episode, instance, policy


def test_a_won_episode(chat):
    episode, instance, policy = play(
        chat, ["\\boxed{go}<eos>", "now \\boxed{go}<eos>"], [GOING, Reply("won", 1.0, True, False)]
    )
    assert (episode.outcome, episode.episode_return, episode.win) == (Outcome.FINISHED, 1.0, True)
    assert instance.actions == ["go", "go"] and instance.closed
    trajectory = episode.trajectory
    # the second request is the record of the first turn, its completion, and the observation, token
    # for token
    sampled = trajectory.tokens[trajectory.loss_mask]
    assert chat.decode(sampled) == "\\boxed{go}now \\boxed{go}"
    assert trajectory.tokens[: len(policy.requests[1])].tolist() == policy.requests[1]
    assert trajectory.turn_index[trajectory.loss_mask].max() == 1
    assert trajectory.loss_mask[-1] and not trajectory.loss_mask[0]
    assert np.all(trajectory.sampler_logprobs[~trajectory.loss_mask] == 0)


def test_the_return_is_the_last_reward_of_a_terminated_episode(chat):
    lost, _, _ = play(chat, ["\\boxed{go}<eos>"], [Reply("lost", -0.25, True, False)])
    assert (lost.outcome, lost.episode_return, lost.win) == (Outcome.FINISHED, -0.25, False)
    cut, _, _ = play(chat, ["\\boxed{go}<eos>"], [Reply("over", 0.9, False, True)])
    assert (cut.outcome, cut.episode_return) == (Outcome.ENV_TRUNCATED, 0.0)
    endless, _, _ = play(chat, ["\\boxed{go}<eos>"] * 3, [GOING] * 3)
    assert (endless.outcome, endless.episode_return) == (Outcome.TURN_LIMIT, 0.0)


def test_running_out_of_tokens_does_not_step(chat):
    episode, instance, _ = play(chat, ["\\boxed{go}"], [])
    assert (episode.outcome, episode.episode_return) == (Outcome.TOKEN_LIMIT, 0.0)
    assert instance.actions == []
    full, _, policy = play(chat, ["\\boxed{go}<eos>"], [GOING], context=20)
    assert full.outcome is Outcome.TOKEN_LIMIT and policy.requests == [] and full.trajectory is None


def test_no_action_costs_a_turn_and_is_said(chat):
    episode, instance, policy = play(
        chat, ["I wonder<eos>", "\\boxed{go}<eos>"], [Reply("won", 1.0, True, False)]
    )
    assert episode.win and instance.actions == ["go"]
    assert episode.turns[0].action is None
    assert "No action was found" in chat.decode(policy.requests[1])


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.void])
def test_faults_are_void(chat, outcome):
    if outcome is not Outcome.SAMPLER_ERROR:
        at_reset, _, _ = play(chat, [], Fault(outcome, "why"))
        assert (at_reset.outcome, at_reset.episode_return, at_reset.trajectory) == (
            outcome,
            None,
            None,
        )
    in_step, instance, _ = play(chat, ["\\boxed{go}<eos>"], [Fault(outcome, "why")])
    assert (in_step.outcome, in_step.episode_return, in_step.detail) == (outcome, None, "why")
    assert instance.closed and not in_step.win


def test_only_the_hinted_arm_sees_the_hint(chat):
    texts, replies = ["\\boxed{go}<eos>"], [Reply("won", 1.0, True, False)]
    _, _, plain = play(chat, texts, replies)
    _, _, hinted = play(chat, texts, replies, plan=replace(PLAN, arm=Arm.HINTED))
    assert "HINT: say go" in chat.decode(hinted.requests[0])
    assert "HINT" not in chat.decode(plain.requests[0])


def test_both_arms_have_the_same_room(chat):
    """The hint takes nothing from the tokens that the play itself has."""
    replies, spoken = [GOING, GOING, GOING], ["\\boxed{go}<eos>"] * 3
    ends = set()
    for context in range(60, 200, 5):
        plain, hinted = (
            play(chat, spoken, replies, plan=replace(PLAN, arm=arm), context=context)[0]
            for arm in (Arm.UNHINTED, Arm.HINTED)
        )
        assert (plain.outcome, len(plain.turns)) == (hinted.outcome, len(hinted.turns)), context
        ends.add((plain.outcome, len(plain.turns)))
    assert len(ends) > 2, "the contexts tried must cut plays at different turns"
