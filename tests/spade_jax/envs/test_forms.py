"""Calls are formed of the words that are said, and of nothing where no tools are shown."""

from spade_jax.envs import forms
from spade_jax.envs.tool_task import ToolTask, tool, tool_list

call = ToolTask.call
TOOLS = tool_list(
    [
        tool("look", "Look."),
        tool("pour", "Pour.", cups="integer", into={"enum": ["jar", "jug"]}),
        tool("say", "Say.", word="string"),
    ]
)
LIMITS = "\nThere are 9 turns, of at most 2 calls.\n"


def test_a_named_tool_comes_first_and_takes_what_follows_its_name():
    said = ["Pour", "2", "jug", "say", "hey"]
    assert forms.actions(TOOLS + LIMITS, said) == [
        call("pour", cups=2, into="jug") + call("pour", cups=2, into="jar"),
        call("say", word="hey") + call("say", word="jug"),
        call("say", word="2") + call("say", word="Pour"),
        call("look"),
    ]


def test_a_tool_has_not_too_many_calls():
    said = [f"w{n}" for n in range(30)]
    wide = tool_list([tool("mix", "Mix.", **dict.fromkeys("abc", "string"))]) + LIMITS
    assert len(forms.actions(wide, said)) == 32
    assert forms.actions(TOOLS + "\n", ["say"])[0] == call("look")  # a call a turn if untold


def test_what_shows_no_tools_can_be_called_nothing():
    assert forms.actions("Say <tools>\n{}\n</tools>\n", ["hey"]) == []
    odd = '<tools>\n[1]\n{"name": 3\n{"a": 1}\n</tools>\n'
    assert forms.actions(odd, ["hey"]) == []
