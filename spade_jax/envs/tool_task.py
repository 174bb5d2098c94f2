"""The base of programs that are played by calling tools, which import it by `from tool_task import
ToolError, ToolTask, tool`. Standard library only; runs in the worker, calls included.

    class RefundEnv(ToolTask):
        TOOLS = [tool("refund", "Pay an order back.", order="string")]  # or whole JSON schemas

        def prepare(self, rng):                       # draws the instance
            self.paid = {f"A{n}": rng.randint(1, 9) for n in range(3)}
            self.ask("Pay order A1 back.", until=lambda: self.paid["A1"] == 0)

        def tool_refund(self, order):                 # one method per tool
            if order not in self.paid:
                raise ToolError(f"there is no order {order}")
            self.paid[order] = 0
            return {"order": order, "paid": 0}

        def solution(self):
            return [self.call("refund", order="A1")]

An episode is a row of messages of a user, each shown when the one before it is met: by a state
(`until`) or by an answer (`answer`). The last one met ends it with reward 1; before, the reward is
the share met. A wrong answer ends it with reward 0, and so nothing is won by guessing. A turn in
which an answer stands makes no calls. Calls run in order, as if each had a turn of its own.

What the player does wrong is an observation that says so: an unknown tool, arguments that do not
fit the schema, a malformed call, and whatever a tool refuses by `ToolError`. Any other exception, a
result that is no JSON, a criterion that fails, and a task that breaks the rules here are mistakes
of the program and end the episode as its error. No state is rolled back when a tool raises.
"""

import copy
import inspect
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from spade_jax.envs import tool_calls, tool_schema
from spade_jax.envs.tool_calls import Call, Malformed, shown

MAX_REPLY_CHARS = 8_000  # of one call
_NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")
HOW = (
    'Call a tool as <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. '
    "Where an answer is asked for, give it as <answer>...</answer>."
)


def tool(name: str, description: str, **parameters: str | dict[str, Any]) -> dict[str, Any]:
    """An entry of TOOLS all of whose parameters are required: each a type's name or a schema."""
    properties = {
        key: {"type": kind} if isinstance(kind, str) else kind for key, kind in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"name": name, "description": description, "parameters": schema}


def tool_list(schemas: Sequence[dict[str, Any]]) -> str:
    """How a first observation shows the tools: a line of JSON for each."""
    return "\n".join(["<tools>", *map(_json, schemas), "</tools>"])


def tool_response(text: str) -> str:
    """How an observation shows what one call gave."""
    return f"<tool_response>{text}</tool_response>"


class ToolError(Exception):
    """A tool's refusal; the player reads its text."""


class CriterionError(Exception):
    """A message whose criterion cannot be evaluated, or is met before anything was done."""


@dataclass(frozen=True)
class _Tool:
    schema: dict[str, Any]  # a copy: what a tool does to TOOLS changes nothing
    run: Callable[..., Any]


@dataclass(frozen=True)
class _Message:
    text: str
    until: Callable[[], bool] | None
    answer: str | Decimal | None


class ToolTask:
    """See the module. A program defines TOOLS, `prepare`, `solution` and a `tool_NAME` per tool.

    TOOLS may also be set in `prepare`, where a schema depends on the instance.
    """

    TOOLS: Sequence[dict[str, Any]] = ()
    MAX_TURNS = 20
    MAX_CALLS = 8  # that one turn may make

    def prepare(self, rng: random.Random) -> None:
        """Draw the instance from `rng`, set the state, and `ask` at least one message."""
        raise NotImplementedError(f"{type(self).__name__} has no prepare(self, rng)")

    def ask(
        self,
        message: str,
        *,
        until: Callable[[], bool] | None = None,
        answer: str | int | float | None = None,
    ) -> None:
        """Add a message, met when `until()` is True or when `answer` is given.

        A text must be given as it is, a number by value; neither is tolerant.
        """
        if not isinstance(message, str) or not message.strip():
            raise ValueError(f"the message is {shown(message)}; expected text")
        if (until is None) == (answer is None):
            raise ValueError(f"{shown(message)} needs either until= or answer=")
        if until is not None and not callable(until):
            raise TypeError(f"until is {shown(until)}; expected a function without arguments")
        self._messages.append(_Message(message, until, _expected(answer)))

    def called(self, name: str, **arguments: Any) -> bool:
        """Whether a call of tool `name` with these arguments, among others, has succeeded."""
        return any(
            name == past and arguments.items() <= given.items() for past, given in self._history
        )

    @staticmethod
    def call(name: str, **arguments: Any) -> str:
        """The action that calls a tool, for `solution`."""
        return f"<tool_call>{_json({'name': name, 'arguments': arguments})}</tool_call>"

    @staticmethod
    def answer(value: Any) -> str:
        """The action that gives an answer, for `solution`."""
        return f"<answer>{value}</answer>"

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Draw the instance of `seed`; every message must be open then."""
        self._messages: list[_Message] = []
        self._history: list[tuple[str, dict[str, Any]]] = []
        self._num_met = 0
        self._num_turns = 0
        self._lost = False
        self.prepare(random.Random(seed))
        self._tools = {tool.schema["name"]: tool for tool in map(self._tool, self.TOOLS)}
        if not self._messages or len(self._tools) < len(self.TOOLS):
            raise ValueError("prepare asked no message, or two tools have one name")
        for index, message in enumerate(self._messages):
            if message.until is not None and self._holds(index):
                raise CriterionError(f"message {index} is met at reset, before anything was done")
        tools = tool_list([tool.schema for tool in self._tools.values()])
        limits = f"There are {self.MAX_TURNS} turns, of at most {self.MAX_CALLS} calls."
        return f"{tools}\n{HOW} {limits}\n\n{self._user()}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """One turn: the calls, or the answer, that `action` holds outside thinking."""
        self._num_turns += 1
        move = tool_calls.parse(action)
        num_met = self._num_met
        if self._over:
            said = ["The task is over."]
        elif move.answer is not None:
            said = [self._take_answer(move.answer, bool(move.calls))]
        elif move.calls:
            said = self._make_calls(move.calls)
        else:
            said = [f"No call and no answer was found. {HOW}"]
        if self._lost:
            return "\n".join(said), 0.0, True, False, {}
        if self._over:
            return "\n".join([*said, "Everything is done."]), 1.0, True, False, {}
        if self._num_met > num_met:
            said.append(self._user())
        truncated = self._num_turns >= self.MAX_TURNS
        if truncated:
            said.append("There are no turns left.")
        return "\n".join(said), self._num_met / len(self._messages), False, truncated, {}

    @property
    def _over(self) -> bool:
        return self._lost or self._num_met == len(self._messages)

    def _user(self) -> str:
        return f"User: {self._messages[self._num_met].text}"

    def _take_answer(self, answer: str, has_calls: bool) -> str:
        uncalled = " Calls beside an answer are not made." if has_calls else ""
        expected = self._messages[self._num_met].answer
        if expected is None:
            return f"No answer is asked for now, but: {self._user()}{uncalled}"
        if not _same(answer, expected):
            self._lost = True
            return "That is not the answer. The task is lost."
        self._num_met += 1
        self._advance()
        return f"That is right.{uncalled}"

    def _make_calls(self, calls: Sequence[Call | Malformed]) -> list[str]:
        said = []
        for index, call in enumerate(calls):
            if self._over:
                break
            if isinstance(call, Malformed):
                reply = {"error": call.problem}
            elif index >= self.MAX_CALLS:
                reply = {"error": f"not called: at most {self.MAX_CALLS} calls a turn"}
            else:
                reply = self._run(call)
                self._advance()
            said.append(tool_response(_told(reply)))
        return said

    def _run(self, call: Call) -> dict[str, Any]:
        """Check one call and make it; returns what the player is told."""
        tool = self._tools.get(call.name)
        if tool is None:
            return {"error": f"no tool {shown(call.name)}; the tools are: {', '.join(self._tools)}"}
        reply: dict[str, Any] = {"name": call.name}
        parameters, arguments = tool.schema["parameters"], call.arguments
        if call.is_text:
            properties = parameters.get("properties", {})
            arguments = {
                name: tool_schema.from_text(properties.get(name, {}), text)
                for name, text in arguments.items()
            }
        problems: list[str] = []
        arguments = tool_schema.check_object(parameters, arguments, "", problems)
        if problems:
            return reply | {"error": "; ".join(problems[: tool_schema.MAX_PROBLEMS])}
        given = copy.deepcopy(arguments)
        try:
            result = tool.run(**arguments)
        except ToolError as error:
            return reply | {"error": str(error)}
        self._history.append((call.name, given))
        return reply | {"result": _plain(call.name, result)}

    def _advance(self) -> None:
        """Go on to the first message that is not met."""
        while not self._over and self._messages[self._num_met].until and self._holds(self._num_met):
            self._num_met += 1

    def _holds(self, index: int) -> bool:
        until = self._messages[index].until
        try:
            met = until() if until else False
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise CriterionError(f"message {index} cannot be evaluated: {problem}") from error
        if type(met) is not bool:
            raise CriterionError(
                f"message {index} evaluates to {shown(met)}; expected True or False"
            )
        return met

    def _tool(self, schema: Any) -> _Tool:
        """The tool of one entry of TOOLS, which may be wrapped as {"function": ...}."""
        if not isinstance(schema, dict):
            raise TypeError(f"TOOLS holds {shown(schema)}; expected an object for each tool")
        schema = schema.get("function", schema)
        name, parameters = schema.get("name"), schema.get("parameters", {"type": "object"})
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"a tool is called {shown(name)}; expected a name such as find_order")
        if not isinstance(schema.get("description"), str):
            raise ValueError(f"tool {name} has no description")
        if problem := tool_schema.schema_problem(parameters, f"{name}.parameters"):
            raise ValueError(problem)
        if parameters.get("type") != "object":
            raise ValueError(f"{name}.parameters.type is not 'object'")
        run = getattr(self, f"tool_{name}", None)
        if run is None:
            raise ValueError(f"tool {name} has no method tool_{name}")
        _check_signature(name, run, parameters)
        kept = {"name": name, "description": schema["description"], "parameters": parameters}
        return _Tool(copy.deepcopy(kept), run)


def _check_signature(name: str, run: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """A method must take what its schema lets through, so that a call never fails on its names."""
    most = list(parameters.get("properties", {}))
    if parameters.get("additionalProperties"):
        most.append("any other")
    signature = inspect.signature(run)
    for names in (parameters.get("required", []), most):
        try:
            signature.bind(**dict.fromkeys(names))
        except TypeError as error:
            raise ValueError(f"tool_{name} does not fit its schema: {error}") from error


def _plain(name: str, result: Any) -> Any:
    """`result`, if it is JSON."""
    try:
        json.dumps(result, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"tool_{name} returned {type(result).__name__}, no JSON: {error}"
        ) from error
    return result


def _told(reply: dict[str, Any]) -> str:
    """The text of a reply. A long one is cut, so that what a player can make a tool collect never
    outgrows an observation."""
    text = _json(reply)
    if len(text) > MAX_REPLY_CHARS:
        cut = {"cut": f"{len(text)} characters, of which {MAX_REPLY_CHARS} are shown"}
        text = _json(cut | {"start": text[:MAX_REPLY_CHARS]})
    return text


def _json(value: Any) -> str:
    """JSON in which no tag ends: what a tool returns must not pass for the text around it."""
    return json.dumps(value, ensure_ascii=False).replace("</", "<\\/")


def _expected(answer: Any) -> str | Decimal | None:
    if answer is None:
        return None
    if isinstance(answer, str) and answer.strip():
        return answer.strip()
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        if not _NUMBER.fullmatch(str(answer)):
            raise ValueError(f"the answer is {answer}; expected a number that can be written out")
        return Decimal(str(answer))
    raise TypeError(f"the answer is {shown(answer)}; expected text or a number")


def _same(answer: str, expected: str | Decimal) -> bool:
    if isinstance(expected, str):
        return answer == expected
    return bool(_NUMBER.fullmatch(answer)) and Decimal(answer) == expected
