"""The base class that SPADE's released tool programs subclass, with the names they use; they import
it as `tool_use_base_env`. Standard library only; runs in the worker. New programs use `tool_task`.

A program sets `_tools`, `_state`, `_expected_answer` and often `_user_messages`,
`_message_criteria`, `_current_msg` in `reset`, and has a `tool_NAME` for each tool. As there:
arguments are not checked against the schemas, an exception of a tool is a text, a wrong answer may
be given again, an answer in a turn suppresses its calls, the default check of answers is tolerant.

Otherwise than there: all calls of a turn are made, not one; the first observation lists the tools,
which there reach the model beside it; calls and answers inside thinking are not obeyed; every step
counts as a turn; no solution is shown at the last one, which nobody plays on from.
"""

import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

from spade_jax.envs import tool_calls
from spade_jax.envs.tool_calls import Malformed, shown
from spade_jax.envs.tool_task import HOW, tool_list, tool_response

_NO_PARAMETERS = {"type": "object", "properties": {}}
_TOLERANCE = 0.01
_BAD_FORMAT_REWARD = -0.1
_MAX_REASON = 200


class ToolUseBaseEnv:
    """See the module."""

    def __init__(self, max_turns: int = 10, **_: Any) -> None:
        self.max_turns = max_turns
        self.turn_count = 0
        self._tools: dict[str, Any] = {}
        self._state: Any = {}
        self._call_history: list[dict[str, Any]] = []
        self._expected_answer: Any = None
        self._depth = 0
        self.reset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Have the outermost `reset` list the tools."""
        super().__init_subclass__(**kwargs)
        if "reset" in cls.__dict__:
            cls.reset = _listing_tools(cls.__dict__["reset"])

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no reset(self, seed)")

    def solution(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no solution(self)")

    def get_tools(self) -> list[dict[str, Any]]:
        """The tools as function schemas."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.get("description", ""),
                    "parameters": tool.get("parameters", _NO_PARAMETERS),
                },
            }
            for name, tool in self._tools.items()
        ]

    def execute_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call one tool: {"output": text, "returncode": 0 if it went well}."""
        method = getattr(self, f"tool_{name}", None)
        if method is None:
            known = ", ".join(map(str, self._tools))
            return {"output": f"no tool {shown(name)}; the tools are: {known}", "returncode": 1}
        try:
            output = str(method(**arguments))
        except Exception as error:
            return {"output": f"{name} failed: {error}", "returncode": 1}
        self._call_history.append({"name": name, "arguments": arguments, "result": output})
        return {"output": output, "returncode": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.turn_count += 1
        truncated = self.turn_count >= self.max_turns
        move = tool_calls.parse(action)
        reward = 0.0
        if move.answer is not None:
            if self._check_answer(move.answer):
                return "That is right.", 1.0, True, False, {}
            said = self._incorrect_answer_feedback()
        elif move.calls:
            if all(isinstance(call, Malformed) for call in move.calls):
                reward = _BAD_FORMAT_REWARD
            said = "\n".join(map(tool_response, map(self._output, move.calls)))
        else:
            reward = _BAD_FORMAT_REWARD
            said = f"No call and no answer was found. {HOW}"
        return said, 0.0 if truncated else reward, False, truncated, {}

    def close(self) -> None:
        pass

    def criteria_at_reset(self) -> str:
        """Why each message is not open now, as a list in JSON; "" for one that is. A criterion is a
        function of the state."""
        criteria: Any = getattr(self, "_message_criteria", None) or ()
        state = getattr(self, "_state", None)  # a program may not have called our constructor
        return json.dumps([_why_not_open(criterion, state) for criterion in criteria])

    def _output(self, call: tool_calls.Call | Malformed) -> str:
        if isinstance(call, Malformed):
            return f"This is no call: {call.problem}"
        arguments = call.arguments
        if call.is_text:
            arguments = {name: _from_text(text) for name, text in arguments.items()}
        return str(self.execute_tool(call.name, arguments)["output"])

    def _obs_suffix(self) -> str:
        """Nothing; old programs append it."""
        return ""

    def _incorrect_answer_feedback(self) -> str:
        """Names the message that is pending, where a program keeps messages."""
        messages: Any = getattr(self, "_user_messages", None) or ()
        current: Any = getattr(self, "_current_msg", None)
        if current not in range(len(messages)):
            return "Not right. Go on with the tools."
        place = f"{current + 1} of {len(messages)}"
        return f"Not right: message {place} is not met yet: {messages[current]}"

    def _check_answer(self, answer: str) -> bool:
        given, expected = str(answer).strip(), str(self._expected_answer).strip()
        if given.lower() == expected.lower():
            return True
        with contextlib.suppress(ValueError):
            return abs(_number(given) - _number(expected)) < _TOLERANCE
        return False


def _why_not_open(criterion: Any, state: Any) -> str:
    try:
        met = bool(criterion(state))
    except Exception as error:
        return f"cannot be evaluated: {type(error).__name__}: {error}"[:_MAX_REASON]
    return "is met at reset, before anything was done" if met else ""


def _number(text: str) -> float:
    return float(text.replace("$", "").replace(",", ""))


def _from_text(text: str) -> Any:
    with contextlib.suppress(ValueError):
        return tool_calls.parse_json(text)
    return text


def _listing_tools(reset: Callable[..., Any]) -> Callable[..., Any]:
    """`reset`, its observation preceded by the tools unless another `reset` has called it."""

    @functools.wraps(reset)
    def listing(self: ToolUseBaseEnv, *args: Any, **kwargs: Any) -> Any:
        depth = getattr(self, "_depth", 0)  # a program may not have called our constructor
        self._depth = depth + 1
        try:
            result = reset(self, *args, **kwargs)
        finally:
            self._depth = depth
        if depth:
            return result
        observation, *rest = result if isinstance(result, tuple) else (result, {})
        tools = tool_list([tool["function"] for tool in self.get_tools()])
        return (f"{tools}\n{HOW}\n\n{observation}", *rest)

    return listing
