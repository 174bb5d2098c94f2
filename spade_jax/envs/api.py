"""What a program must be, and the check of everything it says.

A program is Python text that defines a class whose name ends in `Env` (the last such class counts),
made without arguments, with `reset(seed) -> (str, dict)` or a bare `str`, `step(str) -> (str,
float, bool, bool, dict)` and `solution() -> list[str]`: after `reset(seed)`, the actions that win.
Info dicts are dropped. A reply is never repaired: one that breaks the contract is a `Fault`, not a
value to guess from.
"""

from typing import Any

from spade_jax.types import Fault, Outcome, Reply

MAX_PROGRAM_BYTES = 64 * 1024
MAX_OBSERVATION_BYTES = 256 * 1024
MAX_TRIAL_BYTES = 1 << 27  # memory of all observations of one admission, which are kept for long
MAX_ACTION_CHARS = 16 * 1024  # a longer action is cut
MAX_SOLUTION_ACTIONS = 200
_WIN = 1 - 1e-6


def is_win(reply: Reply) -> bool:
    """Whether an episode that ends with this reply is won (design decision 8)."""
    return reply.terminated and reply.reward >= _WIN


def program_problem(program: str) -> str:
    """Why a text cannot be a program, seen before it is parsed; "" if it may be one."""
    if _not_text(program):
        return "the program is not encodable text (a lone surrogate)"
    size = len(program.encode())
    if size > MAX_PROGRAM_BYTES:
        return f"the program has {size} bytes; at most {MAX_PROGRAM_BYTES}"
    return ""


def check_reset(value: Any) -> Reply | Fault:
    """The reply to `reset`, from the observation a worker sent."""
    problem = _observation_problem(value)
    return _schema(f"reset: {problem}") if problem else Reply(value, 0.0, False, False)


def check_step(value: Any) -> Reply | Fault:
    """The reply to `step`, from the four values a worker sent; the reward lies in [-1, 1]."""
    if type(value) is not list or len(value) != 4:
        return _schema("step: the reply is not [observation, reward, terminated, truncated]")
    observation, reward, terminated, truncated = value
    if problem := _observation_problem(observation):
        return _schema(f"step: {problem}")
    if type(reward) not in (int, float):  # bool is not a number here
        return _schema(f"step: the reward is {_name(reward)}; expected a number")
    if not -1 <= reward <= 1:  # false for NaN, and right for an int that no float can hold
        shown = f"{reward:.6g}" if abs(reward) < 1e9 else "no small number"
        return _schema(f"step: the reward is {shown}; expected -1 to 1")
    if type(terminated) is not bool or type(truncated) is not bool:
        return _schema(
            f"step: the flags are {_name(terminated)} and {_name(truncated)}; expected two bools"
        )
    return Reply(observation, float(reward), terminated, truncated)


def check_solution(value: Any) -> list[str] | Fault:
    """The actions of `solution`."""
    if type(value) is not list or not all(type(action) is str for action in value):
        return _schema(f"solution: {_name(value)}; expected a list of str")
    if not 1 <= len(value) <= MAX_SOLUTION_ACTIONS:
        return _schema(f"solution: {len(value)} actions; expected 1 to {MAX_SOLUTION_ACTIONS}")
    if any(_not_text(action) for action in value):
        return _schema("solution: an action that is not encodable text")
    return value


def _observation_problem(value: Any) -> str:
    if type(value) is not str:
        return f"the observation is {_name(value)}; expected str"
    if not value:
        return "the observation is empty"
    if len(value) > MAX_OBSERVATION_BYTES:
        return f"the observation has {len(value)} characters; at most {MAX_OBSERVATION_BYTES} bytes"
    if _not_text(value):
        return "the observation is not encodable text (a lone surrogate)"
    if len(value.encode()) > MAX_OBSERVATION_BYTES:
        return f"the observation has {len(value.encode())} bytes; at most {MAX_OBSERVATION_BYTES}"
    return ""


def _not_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return True
    return False


def _name(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _schema(detail: str) -> Fault:
    return Fault(Outcome.SCHEMA, detail)
