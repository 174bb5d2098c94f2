from typing import Any

import pytest

from spade_jax.envs.api import (
    MAX_OBSERVATION_BYTES,
    MAX_PROGRAM_BYTES,
    MAX_SOLUTION_ACTIONS,
    check_reset,
    check_solution,
    check_step,
    is_win,
    program_problem,
)
from spade_jax.types import Fault, Outcome, Reply


def test_good_replies_pass():
    assert check_reset("start") == Reply("start", 0.0, False, False)
    assert check_step(["on", 1, True, False]) == Reply("on", 1.0, True, False)
    assert check_step(["on", -0.25, False, True]) == Reply("on", -0.25, False, True)
    assert check_solution(["a", ""]) == ["a", ""]
    assert check_reset("é" * (MAX_OBSERVATION_BYTES // 2)) == Reply(
        "é" * (MAX_OBSERVATION_BYTES // 2), 0.0, False, False
    )


@pytest.mark.parametrize(
    ("observation", "word"),
    [
        (None, "None"),
        (3, "int"),
        (["a"], "list"),
        ("", "empty"),
        ("\ud800", "surrogate"),
        ("x" * (MAX_OBSERVATION_BYTES + 1), "characters"),
        ("é" * (MAX_OBSERVATION_BYTES // 2 + 1), "bytes"),
    ],
    ids=lambda value: str(value)[:8].encode("ascii", "replace").decode(),
)
def test_bad_observations_are_schema_faults(observation: Any, word: str):
    for fault in (check_reset(observation), check_step([observation, 0.0, False, False])):
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.SCHEMA
        assert word in fault.detail


@pytest.mark.parametrize(
    "reply",
    [
        ["x", True, False, False],
        ["x", "1", False, False],
        ["x", None, False, False],
        ["x", 1.0000001, False, False],
        ["x", -2, False, False],
        ["x", 10**400, False, False],
        ["x", -(10**5000), False, False],
        ["x", float("nan"), False, False],
        ["x", float("inf"), False, False],
        ["x", 0.0, 1, False],
        ["x", 0.0, False, None],
        ["x", 0.0, False],
        ["x", 0.0, False, False, {}],
        {"observation": "x"},
        None,
    ],
    ids=lambda reply: ascii(type(reply)),
)
def test_bad_steps_are_schema_faults(reply: Any):
    fault = check_step(reply)
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.SCHEMA


def test_the_text_of_a_fault_shows_a_reward_that_can_be_shown():
    assert check_step(["x", 2, False, False]) == Fault(
        Outcome.SCHEMA, "step: the reward is 2; expected -1 to 1"
    )


def test_what_cannot_be_a_program():
    assert program_problem("x" * MAX_PROGRAM_BYTES) == ""
    assert "bytes" in program_problem("x" * (MAX_PROGRAM_BYTES + 1))
    assert "bytes" in program_problem("é" * (MAX_PROGRAM_BYTES // 2 + 1))
    assert "surrogate" in program_problem("x = '\udc80'")


@pytest.mark.parametrize(
    "solution", [None, "abc", [], ["a", 1], ["\udfff"], ["a"] * (MAX_SOLUTION_ACTIONS + 1)]
)
def test_bad_solutions_are_schema_faults(solution: Any):
    fault = check_solution(solution)
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.SCHEMA


@pytest.mark.parametrize(
    ("reply", "won"),
    [
        (Reply("x", 1.0, True, False), True),
        (Reply("x", 1 - 1e-7, True, False), True),
        (Reply("x", 0.999, True, False), False),
        (Reply("x", 1.0, False, True), False),
        (Reply("x", 1.0, False, False), False),
    ],
)
def test_win_is_terminated_with_full_reward(reply: Reply, won: bool):
    assert is_win(reply) is won
