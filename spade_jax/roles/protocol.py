"""How an environment and the agent speak: one boxed action a turn, or calls of tools.

Which one is a property of the program, never of what it shows: a game may print a list of tools and
stays a game. A tool program's list of schemas goes through the chat template where that has a form
for tools, and stays text where it has none; what a call gave comes back as a tool's turn, and what
the user says next as the user's. The action of a tool program is the whole completion outside
thinking, since the program reads calls and answers itself (`envs.tool_calls`).

Observations are untrusted: what does not look like the program's own base wrote it is plain text.
"""

import re
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from spade_jax.envs import tool_calls
from spade_jax.envs.tool_gate import uses_tools
from spade_jax.roles import parsing, prompts
from spade_jax.rollout.chat import Chat

Ids = Int[np.ndarray, " _"]

NO_ACTION = "No action was found. Put one action in \\boxed{}."
_TOOLS = re.compile(r"\A<tools>\n(.*?)\n</tools>\n", re.DOTALL)
_RESPONSE = re.compile(r"\A<tool_response>(.*?)</tool_response>(?:\n|\Z)", re.DOTALL)


@runtime_checkable
class Speech(Protocol):
    """One way to speak with an environment."""

    no_action: str
    """What the agent is told when `action` finds none."""

    def open(self, chat: Chat, observation: str, hint: str | None) -> Ids:
        """Begin an episode; the two arms differ by the hint line alone."""
        ...

    def action(self, completion: str) -> str | None:
        """What is stepped; None when the completion holds nothing that could be."""
        ...

    def write(self, thought: str, action: str) -> str:
        """The text of a completion that thinks aloud and acts, as examples teach it."""
        ...

    def reply(self, chat: Chat, completion: Ids, observation: str) -> Ids:
        """Answer a completion with the next observation."""
        ...

    def is_malformed(self, completion: str) -> bool:
        """Whether the completion tried to call tools, no call of it can be read, and it does
        nothing else.
        """
        ...


class Boxed:
    """One action in a box, observations as the user's messages."""

    no_action = NO_ACTION

    def open(self, chat: Chat, observation: str, hint: str | None) -> Ids:
        return chat.open(prompts.first_observation(observation, hint))

    def action(self, completion: str) -> str | None:
        return parsing.action(completion)

    def write(self, thought: str, action: str) -> str:
        return f"{thought} \\boxed{{{action}}}"

    def reply(self, chat: Chat, completion: Ids, observation: str) -> Ids:
        return chat.reply(completion, observation)

    def is_malformed(self, completion: str) -> bool:
        return False


class Tools:
    """Calls and answers in the protocol of tools; no wrapper around what the program says."""

    no_action = ""  # there is always one: a program says itself that it found no call

    def open(self, chat: Chat, observation: str, hint: str | None) -> Ids:
        label = prompts.HINT_LABEL + hint if hint else ""
        if chat.template.tools is None:
            return chat.open(observation + label)
        schemas, rest = split_tools(observation)
        return chat.open(rest + label, tools=schemas)

    def action(self, completion: str) -> str | None:
        return tool_calls.outside_thinking(completion)

    def write(self, thought: str, action: str) -> str:
        return f"{thought} {action}"

    def reply(self, chat: Chat, completion: Ids, observation: str) -> Ids:
        if chat.template.tools is None:
            return chat.reply(completion, observation)
        results, rest = split_responses(observation)
        if not results:
            return chat.reply(completion, rest)
        return chat.reply_tools(completion, results, rest)

    def is_malformed(self, completion: str) -> bool:
        move = tool_calls.parse(completion)
        calls = [isinstance(call, tool_calls.Call) for call in move.calls]
        return move.answer is None and bool(calls) and not any(calls)  # an answer is obeyed


def speech(program: str) -> Speech:
    """The way in which `program` is spoken with."""
    return Tools() if uses_tools(program) else Boxed()


def split_tools(observation: str) -> tuple[list[dict[str, Any]], str]:
    """Take the schemas off a first observation, as chat templates list them; none and the whole
    observation if it does not begin with a list of JSON objects.
    """
    found = _TOOLS.match(observation)
    if found is None:
        return [], observation
    schemas = []
    for line in found[1].split("\n"):
        try:
            schema = tool_calls.parse_json(line)
        except ValueError:
            return [], observation
        if not isinstance(schema, dict):
            return [], observation
        schemas.append({"type": "function", "function": schema})
    return schemas, observation[found.end() :]


def split_responses(observation: str) -> tuple[list[str], str]:
    """Take what the calls gave off an observation: their texts, and what follows them."""
    results = []
    while found := _RESPONSE.match(observation):
        results.append(found[1])
        observation = observation[found.end() :]
    return results, observation
