import pytest

from spade_jax.types import Fault, Outcome, Reply


def test_answer_is_put_between_the_markers(player):
    (answer,) = player.solution("rlve", "Doubling", seed=3)
    observation, replies = player.play("rlve", "Doubling", [answer], seed=3)
    assert int(answer) == 2 * int(observation.removeprefix("Double ").removesuffix("."))
    assert replies == [Reply("Correct.", 1.0, True, False)]
    _, replies = player.play("rlve", "Doubling", ["none"], seed=3)
    assert replies == [Reply("Not correct.", -1.0, True, False)]


def test_scorer_that_raises_voids_the_episode(player):
    """The package's verifier would make it the reward of a wrong answer."""
    _, (fault,) = player.play("rlve", "Doubling", ["twelve"], seed=3)
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.ENV_ERROR and fault.outcome.void
    assert "ValueError" in fault.detail


def test_difficulty_raises_the_controller(player):
    numbers = [
        int(player.solution("rlve", "Doubling", seed=seed, difficulty=1)[0]) // 2
        for seed in range(8)
    ]
    assert 10 < max(numbers) <= 100


def test_failed_generation_and_missing_reference_are_told(player):
    with pytest.raises(AssertionError, match="could not generate an instance"):
        player.play("rlve", "Doubling", [], difficulty=2)
    fault = player.solution("rlve", "Unsolved")
    assert fault.outcome is Outcome.ENV_ERROR
    assert "no reference answer" in fault.detail
