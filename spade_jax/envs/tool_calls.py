"""What a completion says in the protocol of tools: calls and an answer, outside thinking. Standard
library only, so that a worker can use it too.

    <tool_call>{"name": "find", "arguments": {"city": "Oslo"}}</tool_call>
    <tool_call><function=find><parameter=city>Oslo</parameter></function></tool_call>
    <answer>12</answer>

Model text is untrusted: `parse` never raises, and takes time linear in the length of the text. What
is not a call is a `Malformed` in its place, never repaired. Of several answers the last complete
one counts. A tag within a call's JSON strings, a parameter's value or an answer is text; a thinking
tag is a thinking tag everywhere. Which tools exist is not known here.
"""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_CALLS = 32  # read in one completion; what follows is not
MAX_DEPTH = 16  # lists and objects in one another, the call itself included
MAX_INTEGER_CHARS = 19  # what a double or a 64-bit integer cannot hold breaks honest tools
MAX_FLOAT_CHARS = 40
_THINK_BLOCK = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
_OPENING = re.compile(r"<tool_call>|<answer>")
_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"<function=([^<>\n]*)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>")
_CALL_END, _ANSWER_END = "</tool_call>", "</answer>"
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"


@dataclass(frozen=True)
class Call:
    """One tool call, well formed; whether it fits a tool is for the task to say.

    `is_text`: the arguments came as text (the XML form), whose types the tool's schema decides.
    """

    name: str
    arguments: dict[str, Any]
    is_text: bool = False


@dataclass(frozen=True)
class Malformed:
    """What stood in place of a call: `problem` says why it is none."""

    problem: str


@dataclass(frozen=True)
class Move:
    """What one completion asks for."""

    calls: tuple[Call | Malformed, ...]
    answer: str | None  # stripped; None without a complete <answer>


class _Bad(ValueError):
    """Text that is no call; the message is for the model."""


def outside_thinking(completion: str) -> str:
    """Text after and between thinking blocks. An unclosed block runs to the end; a lone closing tag
    ends one at its place.
    """
    text = _THINK_BLOCK.sub("", completion)
    return text.rsplit("</think>", 1)[-1]


def parse(completion: str) -> Move:
    """The calls, in their order, and the answer that `completion` holds outside thinking."""
    text = outside_thinking(completion)
    calls: list[Call | Malformed] = []
    answer = None
    last_answer_end = text.rfind(_ANSWER_END)
    place = 0
    while opening := _OPENING.search(text, place):
        place = opening.end()
        if opening[0] == "<answer>":
            if place <= last_answer_end:
                end = text.index(_ANSWER_END, place)
                answer = text[place:end].strip()
                place = end + len(_ANSWER_END)
        elif len(calls) == MAX_CALLS:
            calls.append(
                Malformed(f"more than {MAX_CALLS} calls in one turn; the rest is not read")
            )
            break
        else:
            try:
                call, place = _call(text, place)
            except _Bad as problem:
                call = Malformed(str(problem))
                end = text.find(_CALL_END, place)
                place = len(text) if end < 0 else end + len(_CALL_END)
            calls.append(call)
    return Move(tuple(calls), answer)


def parse_json(text: str) -> Any:
    """The value of a JSON text, held to the limits of arguments.

    Raises:
        ValueError: it is not strict JSON, or too deep, or not encodable.
    """
    value, end = _decode(text, _skip(text, 0))
    if _skip(text, end) < len(text):
        raise _Bad(f"more text after the JSON value, at character {end}")
    return value


def shown(value: Any) -> str:
    """A short, always printable form of untrusted text or plain data, for an error message."""
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _call(text: str, start: int) -> tuple[Call, int]:
    """The call whose opening tag ends at `start`, and where its closing tag ends."""
    start = _skip(text, start)
    is_text = text.startswith("<function", start)
    name, arguments, end = (_xml if is_text else _object)(text, start)
    end = _skip(text, end)
    if not text.startswith(_CALL_END, end):
        raise _Bad(f"the call is not followed by {_CALL_END}")
    return Call(name, arguments, is_text), end + len(_CALL_END)


def _object(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    """Name and arguments of the JSON form."""
    call, end = _decode(text, start)
    if not isinstance(call, dict):
        raise _Bad("the call is not an object with 'name' and 'arguments'")
    name = call.get("name")
    if not isinstance(name, str) or not name:
        raise _Bad("the call has no 'name', the name of a tool")
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models encode them twice
        arguments = parse_json(arguments)
    if not isinstance(arguments, dict):
        raise _Bad("'arguments' is not an object with a value for each argument")
    if unknown := sorted(call.keys() - {"name", "arguments", "parameters", "id", "type"}):
        raise _Bad(f"{shown(unknown[0])} stands beside 'name'; arguments go in 'arguments'")
    return name, arguments, end


def _xml(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    """Name and arguments of the XML form; the values are text, less one line break at either end.

    Each search for an end tag either succeeds, and the next starts after it, or ends the call.
    """
    function = _FUNCTION.match(text, start)
    if function is None or not function[1].strip():
        raise _Bad("the call does not start with <function=NAME>")
    arguments: dict[str, Any] = {}
    place = _skip(text, function.end())
    while parameter := _PARAMETER.match(text, place):
        name = parameter[1].strip()
        end = text.find(_PARAMETER_END, parameter.end())
        if end < 0:
            raise _Bad(f"parameter {shown(name)} is not closed by {_PARAMETER_END}")
        if name in arguments:
            raise _Bad(f"{shown(name)} is given twice")
        arguments[name] = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        place = _skip(text, end + len(_PARAMETER_END))
    if not text.startswith(_FUNCTION_END, place):
        raise _Bad(f"the parameters are not followed by {_FUNCTION_END}")
    _check_encodable([function[1], arguments])
    return function[1].strip(), arguments, place + len(_FUNCTION_END)


def _decode(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at `start` and where it ends."""
    if text.startswith("<", start) or start == len(text):
        raise _Bad("there is no JSON object")
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise _Bad(f"this is not JSON: {error.msg}, {error.pos - start} characters on") from error
    except RecursionError as error:
        raise _Bad(_TOO_DEEP) from error
    _check_depth(value)
    _check_encodable(value)
    return value, end


def _skip(text: str, start: int) -> int:
    match = _SPACE.match(text, start)
    return match.end() if match else start


def _check_depth(value: Any) -> None:
    depth, layer = 0, [value]
    while layer := [item for item in layer if isinstance(item, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _Bad(_TOO_DEEP)
        layer = [
            item
            for container in layer
            for item in (container.values() if isinstance(container, dict) else container)
        ]


def _check_encodable(value: Any) -> None:
    """A lone surrogate that a tool repeats would make the environment break its contract."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _Bad("there is a lone surrogate, which is no text") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if name in value:
            raise _Bad(f"{shown(name)} is given twice")
        value[name] = item
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_CHARS:
        raise _Bad(f"a whole number of more than {MAX_INTEGER_CHARS} characters")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits) if len(digits) <= MAX_FLOAT_CHARS else math.inf
    if not math.isfinite(number):
        raise _Bad(f"{digits[:20]}... is too large or too long a number")
    return number


def _no_constant(name: str) -> None:
    raise _Bad(f"{name} is not JSON")


_TOO_DEEP = f"there are more than {MAX_DEPTH} lists and objects in one another"
_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_int=_integer,
    parse_float=_finite,
    parse_constant=_no_constant,
)
