"""The packages themselves, each where it is installed; skips name the package that is not.

BUILD.md, "Public environments", tells how to install and run them. The benchmark of the same name
plays everything; here is what a new version of a package would break.
"""

import asyncio
import importlib.util
import re
from collections.abc import Coroutine
from typing import Any

import pytest

from spade_jax.envs import adapters
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Outcome

LIMITS = Limits(load_s=10, reset_s=10, step_s=5)


def installed(package: str) -> pytest.MarkDecorator:
    """Skip, by name, without the package."""
    module = adapters.PACKAGES[package]
    reason = f"{package} is not installed: see BUILD.md, Public environments"
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=reason)


def each(**values: Any) -> list[Any]:
    """A case for each package, with its mark."""
    return [pytest.param(name, value, marks=installed(name)) for name, value in values.items()]


def played(package: str, play: Any) -> Any:
    """What `play(pool)` returns with a pool of the package."""

    async def run() -> Any:
        async with Pool(LIMITS, packages=[package]) as pool:
            return await play(pool)

    coroutine: Coroutine[Any, Any, Any] = run()
    return asyncio.run(coroutine)


async def opened(pool: Pool, package: str, name: str, seed: int = 1, **options: Any) -> Instance:
    instance = await pool.open(adapters.program(package, name, **options), seed)
    assert not isinstance(instance, Fault), instance
    return instance


@pytest.mark.parametrize(
    ("package", "families"),
    each(reasoning_gym=104, rlve=400, textarena=30, gem=12, bfcl=8),
)
def test_catalogue(package: str, families: int):
    assert len({listed.family for listed in adapters.catalogue(package)}) == families


@pytest.mark.parametrize(
    ("package", "names"),
    each(
        reasoning_gym=("chain_sum", "graph_color", "propositional_logic", "rubiks_cube"),
        rlve=("Multiplication", "Knapsack", "Differentiate", "Integral"),
        bfcl=("GorillaFileSystem", "TravelAPI"),
    ),
)
def test_reference_wins_where_there_is_one(package: str, names: tuple[str, ...]):
    async def play(pool: Pool) -> None:
        for name in names:
            for seed in range(3):
                instance = await opened(pool, package, name, seed)
                solution = await instance.solution()
                if isinstance(solution, Fault):
                    assert (name, "no reference answer" in solution.detail) == ("Knapsack", True)
                    continue
                replies = [await instance.step(action) for action in solution]
                assert (replies[-1].reward, replies[-1].terminated) == (1.0, True), name

    played(package, play)


@installed("reasoning_gym")
def test_hard_settings_reach_the_dataset():
    async def play(pool: Pool) -> None:
        hard = {"min_digits": 6, "max_digits": 6, "min_terms": 8, "max_terms": 8}
        instance = await opened(pool, "reasoning_gym", "chain_sum", **hard)
        numbers = [part for part in instance.observation.split() if part.isdigit()]
        assert [len(number) for number in numbers] == [6] * 8

    played("reasoning_gym", play)


@installed("reasoning_gym")
def test_no_question_asks_for_a_form_beside_the_box():
    """Questions say what an answer looks like; the agent's prompt alone says where it is put."""

    async def play(pool: Pool) -> None:
        for listed in adapters.catalogue("reasoning_gym"):
            if listed.id != "composite":  # a mixture of the others, by settings
                instance = await opened(pool, "reasoning_gym", listed.id)
                assert not re.search(r"</?answer|\\box", instance.observation.lower()), listed.id
                await instance.close()

    played("reasoning_gym", play)


@installed("reasoning_gym")
def test_scorer_that_cannot_read_an_answer_is_an_outcome():
    async def play(pool: Pool) -> None:
        instance = await opened(pool, "reasoning_gym", "prime_factorization")
        fault = await instance.step("two times three")
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.ENV_ERROR

    played("reasoning_gym", play)


@pytest.mark.parametrize(
    ("package", "game"),
    each(
        textarena=("Mastermind-v0", ["[1 2 3 4]", "2 3 4 5"], "peg"),
        gem=("game:GuessTheNumber-v0-easy", ["5", "6"], "guess"),
    ),
)
def test_game_answers(package: str, game: tuple[str, list[str], str]):
    name, actions, word = game

    async def play(pool: Pool) -> None:
        instance = await opened(pool, package, name)
        for action in actions:
            reply = await instance.step(action)
            assert not isinstance(reply, Fault)
            assert word in reply.observation

    played(package, play)


@pytest.mark.parametrize(
    ("package", "name"), each(textarena="Hangman-v0", gem="game:Hangman-v0-random")
)
@installed("reasoning_gym")
def test_games_of_words_use_the_list_that_is_there(package: str, name: str):
    async def play(pool: Pool) -> None:
        assert "_" in (await opened(pool, package, name)).observation

    played(package, play)
