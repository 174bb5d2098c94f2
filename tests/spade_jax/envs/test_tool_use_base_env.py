"""A program in the manner of SPADE's pools plays through our pool on the base it expects."""

from pathlib import Path

import pytest

from spade_jax.envs.tool_task import ToolTask
from spade_jax.types import Fault, Outcome, Reply

PANTRY = (Path(__file__).parent / "tool_programs" / "imported.py").read_text()
call = ToolTask.call


def play(shared, program: str, *actions: str, seed: int = 1, replica: int = 0):
    async def run():
        instance = await shared.pool.open(program, seed, replica)
        assert not isinstance(instance, Fault), instance
        replies = [await instance.step(action) for action in actions]
        await instance.close()
        return instance.observation, replies

    return shared.run(run())


def scarcest(reply: Reply) -> str:
    shelf = {}
    for pair in reply.observation.partition("{")[2].partition("}")[0].split(", "):
        name, count = pair.split(": ")
        shelf[name.strip('"')] = int(count)
    return min(shelf, key=lambda name: (shelf[name], name))


def test_it_is_won_by_calls_in_both_forms_and_an_answer(shared):
    observation, (reply,) = play(shared, PANTRY, call("shelf"))
    assert observation.startswith('<tools>\n{"name": "shelf"')
    assert observation.endswith("\n\nLook at the shelf.")
    assert observation.count("<tools>") == 1  # the constructor's reset adds none
    assert "next: Put three" in reply.observation
    thing = scarcest(reply)
    for add in (
        call("add", thing=thing, count=3),
        f"<tool_call><function=add><parameter=thing>{thing}</parameter>"
        "<parameter=count>3</parameter></function></tool_call>",
    ):
        _, replies = play(shared, PANTRY, call("shelf") + add, "<answer> Done</answer>")
        assert "all steps complete" in replies[0].observation
        assert replies[0].observation.count("<tool_response>") == 2
        assert replies[1] == Reply("That is right.", 1.0, True, False)


def test_it_is_deterministic_across_workers_and_varies_with_the_seed(shared):
    actions = [call("shelf"), call("add", thing="rice"), "hm"]
    here, there = (play(shared, PANTRY, *actions, replica=replica) for replica in (0, 1))
    assert here == there
    assert play(shared, PANTRY, *actions, seed=2) != here


@pytest.mark.parametrize(
    ("action", "said", "reward"),
    [
        ("hm", "No call and no answer was found", -0.1),
        ("<tool_call>{</tool_call>", "This is no call: this is not JSON", -0.1),
        (f"<tool_call>{{</tool_call>{call('clear')}", "empty", 0.0),
        (call("drop"), "no tool 'drop'; the tools are: shelf, add, clear", 0.0),
        (call("add", thing="salt"), "add failed: 'salt'", 0.0),
        (call("add"), "add failed: PantryEnv.tool_add() missing 1 required", 0.0),
        (call("clear", all=True), "clear failed: PantryEnv.tool_clear() got an unexpected", 0.0),
        ("<answer>done</answer>", "message 1 of 2 is not met yet: Look at the shelf.", 0.0),
        (f"<answer>done</answer>{call('shelf')}", "message 1 of 2 is not met yet", 0.0),
        (f"<think>{call('clear')}</think>", "No call and no answer was found", -0.1),
    ],
)
def test_what_goes_wrong_is_said(shared, action: str, said: str, reward: float):
    _, (reply,) = play(shared, PANTRY, action)
    assert said in reply.observation
    assert (reply.reward, reply.terminated, reply.truncated) == (reward, False, False)


def test_its_own_turn_limit_counts_every_step(shared):
    _, replies = play(shared, PANTRY, *[call("clear")] * 7, "hm")
    assert [reply.truncated for reply in replies] == [False] * 7 + [True]
    assert replies[-1].reward == 0.0


SMALL = """
from tool_use_base_env import ToolUseBaseEnv

class BaseEnv(ToolUseBaseEnv):
    def reset(self, seed=None):
        self._expected_answer = {expected}
        return "Which?"

class SmallEnv(BaseEnv):
    def reset(self, seed=None):
        self.turn_count = 0
        return super().reset(seed)
"""


@pytest.mark.parametrize(
    ("expected", "answer", "right"),
    [
        ("'Archive/Report'", "archive/report ", True),
        ("1234.5", "$1,234.50", True),
        ("1234.5", "1234.505", True),
        ("1234.5", "1234.52", False),
        ("'K7'", "K8", False),
        ("None", "", False),
        ("7", "nan", False),
    ],
)
def test_answers_are_checked_tolerantly(shared, expected: str, answer: str, right: bool):
    program = SMALL.replace("{expected}", expected)
    observation, replies = play(shared, program, f"<answer>{answer}</answer>")
    assert observation.count("<tools>") == 1  # of two resets, the outer one lists them
    assert observation.endswith("\n\nWhich?")
    assert replies[0].terminated == right
    if not right:
        assert replies[0].observation == "Not right. Go on with the tools."


def test_a_program_that_lacks_a_reset_or_has_a_hanging_tool_is_at_fault(shared):
    bare = "from tool_use_base_env import ToolUseBaseEnv\nclass AEnv(ToolUseBaseEnv): pass"
    fault = shared.run(shared.pool.open(bare, 1))
    assert isinstance(fault, Fault)
    assert "NotImplementedError: AEnv has no reset" in fault.detail
    hanging = PANTRY.replace('self._state["list"] = []', "import time; time.sleep(60)")
    _, (fault,) = play(shared, hanging, call("clear"))
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.TIMEOUT
