"""Calls of tools whose arguments are words of a text: what a player can say who copies from a hint
to a tool task. Which tools there are, an instance's first observation shows.

Answers are not formed: a wrong one loses the task, so nobody tries them in turn.
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from spade_jax.envs.tool_task import ToolTask

_TOOLS = re.compile(r"\A<tools>\n(.*?)\n</tools>\n", re.DOTALL)
_CALLS = re.compile(r"of at most (\d{1,3}) calls")
_MAX_VALUES = 8  # tried for an argument: the words after the tool's name, then those before it
_MAX_CALLS = 64  # formed of a tool


def actions(observation: str, said: Sequence[str]) -> list[str]:
    """Turns full of calls with the words that are said, of the tools that are named before the
    others; none where the observation shows no tools."""
    shown = _TOOLS.match(observation)
    if shown is None:
        return []
    tools = [tool for line in shown[1].split("\n") if (tool := _tool(line))]
    names = [word.lower() for word in said]
    at = {name: [*names, name.lower()].index(name.lower()) for name, _ in tools}
    calls = [
        call
        for name, parameters in sorted(tools, key=lambda tool: at[tool[0]])
        for call in _calls(name, parameters, [*said[at[name] + 1 :], *reversed(said[: at[name]])])
    ]
    limit = _CALLS.search(observation, shown.end())
    size = max(1, int(limit[1])) if limit else 1
    return ["".join(calls[start : start + size]) for start in range(0, len(calls), size)]


def _tool(line: str) -> tuple[str, dict[str, Any]] | None:
    """Name and parameters of a tool; None for a line that is none."""
    try:
        tool = json.loads(line)
        return str(tool["name"]), dict(tool.get("parameters") or {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _calls(name: str, parameters: dict[str, Any], said: Sequence[str]) -> Iterator[str]:
    """Calls with a value for each argument that is required."""
    properties = parameters.get("properties", {})
    needed = list(parameters.get("required", ()))
    values = [_values(properties.get(each, {}), said)[:_MAX_VALUES] for each in needed]
    for chosen in itertools.islice(itertools.product(*values), _MAX_CALLS):
        yield ToolTask.call(name, **dict(zip(needed, chosen, strict=True)))


def _values(schema: dict[str, Any], said: Sequence[str]) -> list[Any]:
    """What a parameter can be: of a list, first what is said."""
    if "enum" in schema:
        return sorted(schema["enum"], key=lambda value: str(value) not in said)
    words = list(dict.fromkeys(said))
    numbers = [int(word) for word in words if word.isdecimal()]
    return {"integer": numbers, "number": numbers, "boolean": [True, False]}.get(
        schema.get("type", ""), words
    )
