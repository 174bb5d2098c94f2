import pytest

from spade_jax.envs import adapters
from spade_jax.envs.adapters import Listed, bfcl
from spade_jax.types import Reply

DONE = Reply("Every message was dealt with.", 1.0, True, False)
FAILED = Reply("The message was not dealt with as it asks.", 0.0, True, False)


def test_apis_in_use_are_listed(fakes: str):
    expected = [Listed("Lamp", "bfcl/Lamp", ""), Listed("Sums", "bfcl/Sums", "")]
    assert adapters.catalogue("bfcl", [fakes]) == expected


def test_dialogue_is_won_by_the_answer(player):
    assert player.solution("bfcl", "Lamp", seed=2) == [
        "switch(lit=True)", "done", "look()", "done",
    ]  # fmt: skip
    observation, replies = player.play(
        "bfcl", "Lamp", ["switch(lit=True)", "done", "look()", " Done "], seed=2
    )
    assert observation.endswith("\n\nUser: Put the light on.")
    assert '{"name": "switch"' in observation
    assert "smash" not in observation
    assert replies == [
        Reply('{"lit": true}', 0.0, False, False),
        Reply("User: Is it on?", 0.0, False, False),
        Reply('{"lit": true}', 0.0, False, False),
        DONE,
    ]


@pytest.mark.parametrize(
    "action",
    [
        "[look(), switch(True)]",
        '{"name": "switch", "arguments": {"lit": true}}',
        '[{"name": "switch", "arguments": {"lit": true}}, {"name": "look"}]',
    ],
)
def test_forms_of_calls(player, action: str):
    _, replies = player.play("bfcl", "Lamp", [action, "done"], seed=2)
    assert replies[1] == Reply("User: Is it on?", 0.0, False, False)


@pytest.mark.parametrize("actions", [["done"], ["switch(lit=False)", "done"], ["look()", "done"]])
def test_wrong_state_or_nothing_done_ends_with_nothing(player, actions: list[str]):
    _, replies = player.play("bfcl", "Lamp", actions, seed=2)
    assert replies[-1] == FAILED


def test_what_was_found_before_does_not_count_without_acting(player):
    actions = ["switch(lit=True)", "look()", "done", "done"]
    _, replies = player.play("bfcl", "Lamp", actions, seed=2)
    assert replies[-1] == FAILED


def test_message_that_asks_for_no_call(player):
    _, replies = player.play("bfcl", "Sums", ["third(precision=3)", "done", "done"])
    assert replies[0].observation == "0.333"
    assert replies[-1] == DONE


def test_precision_that_a_call_sets_ends_with_it(player):
    _, replies = player.play("bfcl", "Sums", ["third(precision=3)", "third_as_set()"])
    assert replies[1].observation == "0." + "3" * 28


@pytest.mark.parametrize(
    ("action", "shown"),
    [
        ("smash()", "Error: there is no tool 'smash'"),
        ("_load_scenario(scenario=1)", "Error: there is no tool '_load_scenario'"),
        ("switch(off=True)", "Error: "),
        ("look().lit", "This is not a call that can be read"),
        ("look", "This is not a call that can be read"),
        ("switch(lit=__import__('os'))", "This is not a call that can be read"),
        ("switch(**{'lit': True})", "This is not a call that can be read"),
        ("(", "This is not a call that can be read"),
        ('{"name": 3}', "This is not a call that can be read"),
        ('{"name": "look", "arguments": [1]}', "This is not a call that can be read"),
        ("(" * 5000, "This is not a call that can be read"),
        ("[]", "No call was made."),
        ("switch(lit='\ud800')", "This is not a call that can be read"),
        ('{"name": "switch", "arguments": {"lit": "\\ud800"}}', '{"lit": "\\ud800"}'),
    ],
)
def test_bad_actions_are_answered(player, action: str, shown: str):
    _, (reply,) = player.play("bfcl", "Lamp", [action], seed=2)
    assert reply.observation.startswith(shown)
    assert (reply.reward, reply.terminated) == (0.0, False)


def test_too_many_actions_for_one_message(player):
    _, replies = player.play("bfcl", "Lamp", ["look()"] * 21, seed=2)
    assert [reply.terminated for reply in replies] == [False] * 20 + [True]
    assert replies[-1].reward == 0.0


def test_unknown_api_is_told(player):
    with pytest.raises(AssertionError, match="no dialogue uses 'Oven'"):
        player.play("bfcl", "Oven", [])


def test_parse_of_nested_values():
    assert bfcl._parse("f([1, {'a': None}], x=-2.5)") == [("f", [[1, {"a": None}]], {"x": -2.5})]
