"""What all adapters share, outside of a worker."""

import math
import random

import numpy as np
import pytest

from spade_jax.envs.adapters.base import AnswerEnv, PublicEnv


class Draws(PublicEnv):
    reward = 0.0

    def begin(self, seed):
        return f"{random.random()} {np.random.random()}"

    def act(self, action):
        return f"{random.random()} {np.random.random()}", self.reward, False, False


def test_generators_are_put_in_place_for_each_call():
    one, other = Draws(), Draws()
    first, _ = one.reset(1)
    second, _ = other.reset(2**33 + 1)  # numpy takes 32 bits
    assert first != second
    expected = [one.step("a")[0] for _ in range(2)]
    again = Draws()
    assert again.reset(1)[0] == first
    seen = []
    for _ in range(2):
        random.seed(99)
        np.random.seed(99)
        other.step("a")
        seen.append(again.step("a")[0])
    assert seen == expected


def test_state_is_kept_when_a_call_raises():
    class Raises(Draws):
        def act(self, action):
            random.random()
            if action == "raise":
                raise KeyError
            return super().act(action)

    env, plain = Raises(), Raises()
    env.reset(1)
    plain.reset(1)
    with pytest.raises(KeyError):
        env.step("raise")
    random.seed(5)
    plain._states = env._states
    assert env.step("a") == plain.step("a")


@pytest.mark.parametrize(
    ("given", "expected"), [(0.5, 0.5), (7, 1.0), (-7, -1.0), (math.inf, 1.0), (np.float32(1), 1.0)]
)
def test_reward_is_cut(given, expected):
    env = Draws()
    env.reset(1)
    env.reward = given
    reward = env.step("a")[1]
    assert reward == expected
    assert type(reward) is float


def test_nan_is_not_made_a_win():
    env = Draws()
    env.reset(1)
    env.reward = math.nan
    assert math.isnan(env.step("a")[1])


class Guess(AnswerEnv):
    def begin(self, seed):
        return "Guess."

    def score(self, answer):
        return 1.0 if answer == "right" else 0.4


def test_a_wrong_answer_ends_with_its_score():
    env = Guess()
    env.reset(1)
    assert env.step("wrong") == ("Not correct.", 0.4, True, False, {})


def test_attempts():
    class Three(Guess):
        options = {"attempts": 3}  # noqa: RUF012

    env = Three()
    env.reset(1)
    assert env.step("wrong") == ("Not correct. Attempts left: 2.", 0.4, False, False, {})
    assert env.step("right") == ("Correct.", 1.0, True, False, {})
    env = Three()
    env.reset(1)
    assert [env.step("wrong")[2] for _ in range(3)] == [False, False, True]
