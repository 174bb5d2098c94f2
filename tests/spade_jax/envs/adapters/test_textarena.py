import pytest

from spade_jax.envs import adapters
from spade_jax.envs.adapters import Listed
from spade_jax.types import Reply


def test_games_for_one_player_are_listed_even_if_they_cannot_be_imported(fakes: str):
    assert adapters.catalogue("textarena", [fakes]) == [
        Listed("Broken-v0", "game/broken", ""),
        Listed("Dice-v0", "game/dice", ""),
        Listed("Dice-v0-long", "game/dice", ""),
    ]


def test_only_news_is_shown_and_the_end_brings_the_reward(player):
    observation, replies = player.play("textarena", "Dice-v0", ["throw", "quiet", "[b]", "x"])
    assert observation == "Throw the dice.\nIt is your turn."
    first, quiet, second, last = replies
    assert first.observation.startswith("[throw] makes ")
    assert quiet == Reply("Nothing new.", 0.0, False, False)
    assert second.observation.startswith("[b] makes ")
    assert (first.reward, second.reward) == (0.0, 0.0)
    assert last.observation.startswith("[x] makes ")
    assert last.observation.endswith("\nNo throws are left.")
    assert (last.reward, last.terminated, last.truncated) == (1.0, True, False)


def test_reward_and_reason_given_in_the_wrong_order(player):
    _, (reply,) = player.play("textarena", "Dice-v0", ["bad"])
    assert reply == Reply("Not allowed.", -0.5, True, False)


def test_options_and_broken_games(player):
    _, (reply,) = player.play("textarena", "Dice-v0", ["a"], throws=1)
    assert reply.terminated
    with pytest.raises(AssertionError, match="RuntimeError"):
        player.play("textarena", "Broken-v0", [])
