import pytest

from spade_jax.types import Fault, Outcome, Reply


def test_right_and_wrong_answer(player):
    observation, replies = player.play("reasoning_gym", "sums", ["0"], seed=3, top=1000)
    one, other = (int(part) for part in observation.removesuffix(" = ?").split(" + "))
    assert replies == [Reply("Not correct.", 0.25, True, False)]
    assert player.solution("reasoning_gym", "sums", seed=3, top=1000) == [str(one + other)]
    _, replies = player.play("reasoning_gym", "sums", [str(one + other)], seed=3, top=1000)
    assert replies == [Reply("Correct.", 1.0, True, False)]


def test_attempts_are_not_a_setting_of_the_dataset(player):
    _, replies = player.play("reasoning_gym", "sums", ["-1", "-1"], attempts=2)
    assert [reply.terminated for reply in replies] == [False, True]


def test_scorer_that_raises_is_the_programs_error(player):
    _, (fault,) = player.play("reasoning_gym", "sums", ["four"])
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.ENV_ERROR
    assert "ValueError" in fault.detail


@pytest.mark.parametrize(("answer", "reward"), [("seven", 1.0), ("minus", -1.0)])
def test_score_is_cut(player, answer: str, reward: float):
    _, (reply,) = player.play("reasoning_gym", "sums", [answer])
    assert reply.reward == reward


def test_nan_is_refused(player):
    _, (fault,) = player.play("reasoning_gym", "sums", ["nan"])
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.SCHEMA


def test_reference_from_the_metadata(player):
    assert player.solution("reasoning_gym", "pairs", seed=4) == ['{"a": 4}']
    fault = player.solution("reasoning_gym", "pairs", known=False)
    assert fault.outcome is Outcome.ENV_ERROR
    assert "no reference answer" in fault.detail


@pytest.mark.parametrize(("name", "options"), [("nothing", {}), ("sums", {"colour": "red"})])
def test_unknown_name_or_setting_is_told(player, name: str, options: dict):
    with pytest.raises(AssertionError, match="env_error"):
        player.play("reasoning_gym", name, [], **options)
