"""How the agent speaks with tool programs: schemas through the chat template, several calls a turn,
results in a tool's turn; played through a real pool with a scripted policy.
"""

import asyncio
import dataclasses
from pathlib import Path

import jax
import pytest

from helpers import ScriptedPolicy
from models.tokenizer import load_tokenizer
from spade_jax import measures
from spade_jax.config import AgentConfig
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.tool_task import ToolTask, tool_response
from spade_jax.roles import agent, protocol
from spade_jax.rollout.chat import Chat
from spade_jax.types import Arm, Environment, EnvironmentSource, Outcome, Verdict

TESTS = Path(__file__).resolve().parents[2]
REFUNDS = (TESTS / "spade_jax" / "envs" / "tool_programs" / "refunds.py").read_text()
GAME = "class GoEnv:\n    def reset(self, seed): return '<tools>\\n{}\\n</tools>\\nGo.', {}\n"
CONFIG = AgentConfig(max_turns=6, max_tokens=400, max_observation_tokens=2000)
call = ToolTask.call


@pytest.fixture(scope="module")
def qwen() -> Chat:
    return Chat(load_tokenizer(TESTS / "golden" / "chat" / "qwen3"))


def spelt(chat, ids):
    names = {number: name for name, number in chat.tokenizer.control_ids.items()}
    text, run = "", []
    for token in [*ids, None]:
        if token is None or int(token) in names:
            text += chat.tokenizer.decode(run) + ("" if token is None else names[int(token)])
            run = []
        else:
            run.append(int(token))
    return text


def play(chat, texts, arm=Arm.UNHINTED, config=CONFIG, program=REFUNDS):
    """An episode of `program` at seed 1 against a policy that recites, and that policy."""
    environment = Environment(
        EnvironmentSource(program, "State Modification", "easy", "d"), "look first", 0, "x",
        Verdict(True),
    )  # fmt: skip
    plan = agent.Play("episode", environment, arm, 1, 0, 0)
    policy = ScriptedPolicy(texts, chat.tokenizer)

    async def run():
        pool = Pool(Limits(max_workers=2))
        await pool.start()
        try:
            return await agent.play(policy, chat, pool, config, 8000, plan, jax.random.key(0))
        finally:
            await pool.close()

    return asyncio.run(run()), policy


def solution():
    """What wins at seed 1, found by a play of the program outside of any pool."""
    namespace: dict = {}
    source = REFUNDS.replace("from tool_task", "from spade_jax.envs.tool_task")
    exec(source, namespace)  # a program of these tests
    environment = namespace["RefundEnv"]()
    environment.reset(1)
    return [f"{action}<eos>" for action in environment.solution()]


def test_a_tool_task_is_won_over_several_calls_and_an_answer(qwen):
    episode, policy = play(qwen, solution())
    assert (episode.outcome, episode.episode_return, episode.win) == (Outcome.FINISHED, 1.0, True)
    assert len(episode.turns) == 3
    first, second, third = (spelt(qwen, request) for request in policy.requests)
    # the schemas stand where the template puts tools, and nowhere else
    system, user = first.split("<|im_start|>user\n", 1)
    assert system.count('{"type": "function", "function": {"name": "find_orders"') == 1
    assert "find_orders" not in user and "<tools>" not in user
    assert "Call a tool as <tool_call>" in user and "Please pay it back." in user
    # three calls in one turn come back in one turn of results
    results = second.removeprefix(first).split("<|im_start|>user\n")[-1]
    assert results.count("<tool_response>\n{") == results.count("}\n</tool_response>") == 3
    assert results.startswith("<tool_response>\n")
    # what the user says next has a turn of its own
    said = third.removeprefix(second).split("<|im_start|>user\n")
    assert said[-2].startswith('<tool_response>\n{"name": "refund"')
    assert said[-1].startswith("User: And how many euros has")
    assert episode.trajectory is not None
    sampled = episode.trajectory.tokens[episode.trajectory.loss_mask]
    assert qwen.decode(sampled) == "".join(text.removesuffix("<eos>") for text in solution())


def test_without_a_form_for_tools_the_observation_is_the_message(chat):
    episode, policy = play(chat, ["I wait<eos>"] * 6)
    assert episode.outcome is Outcome.TURN_LIMIT and episode.turns[0].action == "I wait"
    assert "<tools>" in spelt(chat, policy.requests[0])
    assert "No call and no answer was found" in spelt(chat, policy.requests[1])


@pytest.mark.parametrize("thinking", [False, True])
def test_the_arms_differ_by_the_hint_line_alone(qwen, thinking):
    config = dataclasses.replace(CONFIG, thinking=thinking)
    plain, hinted = (
        spelt(qwen, play(qwen, ["stop"], arm, config)[1].requests[0])
        for arm in (Arm.UNHINTED, Arm.HINTED)
    )
    assert plain != hinted and hinted.replace("\nHINT: look first", "") == plain
    assert plain.endswith("</think>\n\n") != thinking


def test_calls_inside_thinking_are_not_made(qwen):
    thought = f"<think>{call('refund', order_id='K1', reason='late')}</think>nothing<eos>"
    episode, policy = play(qwen, [thought, "stop"])
    assert episode.turns[0].action == "nothing"
    assert "No call and no answer was found" in spelt(qwen, policy.requests[1])


@pytest.mark.parametrize("masked", [False, True])
def test_malformed_calls_are_masked_as_an_option(qwen, masked):
    config = dataclasses.replace(CONFIG, mask_malformed_calls=masked)
    texts = ["<tool_call>{oh</tool_call><eos>", *solution()]
    episode, policy = play(qwen, texts, config=config)
    assert episode.win
    trajectory = episode.trajectory
    assert trajectory is not None
    turns = set(trajectory.turn_index[trajectory.loss_mask].tolist())
    assert turns == ({1, 2, 3} if masked else {0, 1, 2, 3})
    # masked or not, what was sampled stays in the record
    assert spelt(qwen, policy.requests[1]).count("<tool_call>{oh</tool_call>") == 1
    # one call that can be read makes the turn a fair one
    mixed = f"<tool_call>{{oh</tool_call>{call('find_orders', customer='Ada')}<eos>"
    kept, _ = play(qwen, [mixed, "stop"], config=config)
    assert kept.trajectory.loss_mask.sum() > 10


def test_an_answer_beside_a_malformed_call_is_obeyed_and_trained_on(qwen):
    config = dataclasses.replace(CONFIG, mask_malformed_calls=True)
    *calls, done = solution()
    episode, _ = play(qwen, [*calls, f"<tool_call>{{oh</tool_call>{done}"], config=config)
    assert episode.win and episode.trajectory is not None
    trajectory = episode.trajectory
    assert trajectory.loss_mask[trajectory.turn_index == len(calls)].any()
    assert trajectory.num_untrained == 0


def test_an_episode_of_malformed_calls_alone_has_a_record_without_loss(qwen):
    config = dataclasses.replace(CONFIG, mask_malformed_calls=True, max_turns=1)
    episode, _ = play(qwen, ["<tool_call>{oh</tool_call><eos>"], config=config)
    assert episode.outcome is Outcome.TURN_LIMIT
    assert episode.trajectory is not None and not episode.trajectory.loss_mask.any()
    # it was sampled all the same
    plain, _ = play(
        qwen, ["<tool_call>{oh</tool_call><eos>"], config=dataclasses.replace(CONFIG, max_turns=1)
    )
    assert episode.trajectory.num_sampled == plain.trajectory.loss_mask.sum() > 3
    found, expected = (measures.episodes([each]) for each in (episode, plain))
    assert found == expected and found["sampler/unhinted_tokens_count"] > 3


def test_a_game_that_prints_tools_is_a_game(qwen):
    assert isinstance(protocol.speech(GAME), protocol.Boxed)
    assert isinstance(protocol.speech("no ( python"), protocol.Boxed)
    assert isinstance(protocol.speech(REFUNDS), protocol.Tools)
    text = spelt(qwen, protocol.speech(GAME).open(qwen, "<tools>\n{}\n</tools>\nGo.", None))
    assert "<|im_start|>system" not in text and "<tools>\n{}\n</tools>\nGo." in text


@pytest.mark.parametrize(
    "observation",
    ["", "<tools>", "<tools>\n</tools>\nx", "<tools>\n[1]\n</tools>\nx", "<tools>\n{\n</tools>\nx"],
)
def test_what_is_no_list_of_schemas_stays_text(observation):
    assert protocol.split_tools(observation) == ([], observation)


def test_results_are_told_from_what_follows():
    said = "\n".join([tool_response('{"a": 1}'), tool_response("two\nlines"), "User: go on"])
    assert protocol.split_responses(said) == (['{"a": 1}', "two\nlines"], "User: go on")
    assert protocol.split_responses("no call") == ([], "no call")
    odd = "<tool_response>never closed"
    assert protocol.split_responses(odd) == ([], odd)
