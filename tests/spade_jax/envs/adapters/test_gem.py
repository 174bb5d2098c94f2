from spade_jax.envs import adapters
from spade_jax.envs.adapters import Listed
from spade_jax.types import Reply


def test_only_games_are_listed(fakes: str):
    assert adapters.catalogue("gem", [fakes]) == [
        Listed("game:Flip-v0-easy", "game/flip", ""),
        Listed("game:Flip-v0-hard", "game/flip", ""),
    ]


def test_actions_are_boxed_and_flags_are_the_games(player):
    observation, replies = player.play("gem", "game:Flip-v0-easy", ["edge", "\\boxed{edge}"])
    assert observation == "Guess the flip.\nHeads or tails?"
    first, last = replies
    assert first.observation.endswith("\\boxed{edge}.\nAgain?")
    assert (first.reward, first.terminated, first.truncated) == (-0.5, False, False)
    assert last.observation.endswith("\\boxed{edge}.")
    assert (last.reward, last.terminated, last.truncated) == (-0.5, False, True)


def test_win(player):
    side = player.play("gem", "game:Flip-v0-easy", ["edge"])[1][0].observation.split()[2][:-1]
    _, (reply,) = player.play("gem", "game:Flip-v0-easy", [side], turns=1)
    assert reply == Reply(f"It was {side}; \\boxed{{{side}}}.", 1.0, True, True)
