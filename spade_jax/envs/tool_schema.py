"""JSON Schema, as far as tools need it: is a schema sound, and what is wrong with the arguments of
a call. Standard library only, for the worker.

Checked: type, enum, minimum, maximum, exclusiveMinimum, exclusiveMaximum, minLength, maxLength,
items, minItems, maxItems, properties, required, additionalProperties. An unknown keyword makes a
schema unsound: a rule that is silently not checked would be worse. Unlike in the standard, an
object with `properties` takes no others unless `additionalProperties` is true.
"""

import math
from collections.abc import Callable
from typing import Any

from spade_jax.envs.tool_calls import parse_json, shown

MAX_PROBLEMS = 4  # named of one call
_NAMES = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_Rule = Callable[[Any, Any], bool]
_BOUNDS: dict[str, tuple[tuple[type, ...], _Rule, str]] = {
    "minimum": ((int, float), lambda value, bound: value >= bound, "at least {}"),
    "maximum": ((int, float), lambda value, bound: value <= bound, "at most {}"),
    "exclusiveMinimum": ((int, float), lambda value, bound: value > bound, "more than {}"),
    "exclusiveMaximum": ((int, float), lambda value, bound: value < bound, "less than {}"),
    "minLength": ((str,), lambda value, bound: len(value) >= bound, "at least {} characters"),
    "maxLength": ((str,), lambda value, bound: len(value) <= bound, "at most {} characters"),
    "minItems": ((list,), lambda value, bound: len(value) >= bound, "at least {} items"),
    "maxItems": ((list,), lambda value, bound: len(value) <= bound, "at most {} items"),
}
_OTHERS = {"type", "enum", "items", "properties", "required", "additionalProperties"}
_REMARKS = {"title", "description", "default", "examples", "format"}


def schema_problem(schema: Any, where: str) -> str:
    """Why `schema` is unsound, or ""."""
    if not isinstance(schema, dict):
        return f"{where} is {_kind(schema)}; expected a schema, an object"
    if unknown := [key for key in schema if key not in _OTHERS | _REMARKS | _BOUNDS.keys()]:
        return f"{where} has the keyword {shown(unknown[0])}, which is not supported"
    types = _types(schema)
    if types is None or not all(isinstance(name, str) and name in _NAMES for name in types):
        return f"{where}.type is {shown(schema['type'])}; expected of {', '.join(_NAMES)}"
    choices = schema.get("enum", [None])
    if not isinstance(choices, list) or not choices or not all(map(_is_scalar, choices)):
        return f"{where}.enum is not a list of texts, numbers or flags"
    for key in filter(schema.__contains__, _BOUNDS):
        if not _is(schema[key], (int, float)) or not math.isfinite(schema[key]):
            return f"{where}.{key} is {shown(schema[key])}; expected a number"
    properties = schema.get("properties", {})
    if not isinstance(properties, dict) or not all(isinstance(name, str) for name in properties):
        return f"{where}.properties is not an object of schemas"
    required = schema.get("required", [])
    if not isinstance(required, list) or any(name not in [*properties] for name in required):
        return f"{where}.required is {shown(required)}; expected a list of names in properties"
    if type(schema.get("additionalProperties", False)) is not bool:
        return f"{where}.additionalProperties is not true or false"
    inner = [(item, f"{where}.{name}") for name, item in properties.items()]
    inner += [(schema["items"], f"{where}.items")] if "items" in schema else []
    return next(filter(None, (schema_problem(item, name) for item, name in inner)), "")


def check(schema: dict[str, Any], value: Any, where: str, problems: list[str]) -> Any:
    """Add what is wrong with `value` to `problems`; returns it, with 3.0 as 3 for an integer.

    As deep as the schema goes, however deep the value is.
    """
    types = _types(schema) or ()
    if types and not any(_fits(value, name) for name in types):
        problems.append(
            f"{where} is {shown(value)} ({_kind(value)}); expected {' or '.join(types)}"
        )
        return value
    if isinstance(value, float) and "integer" in types and "number" not in types:
        value = int(value)
    if "enum" in schema and not any(_equal(value, item) for item in schema["enum"]):
        choices = ", ".join(map(repr, schema["enum"]))
        problems.append(f"{where} is {shown(value)}; expected one of {choices}")
    for key, (kinds, holds, wanted) in _BOUNDS.items():
        if key in schema and _is(value, kinds) and not holds(value, schema[key]):
            problems.append(f"{where} is {shown(value)}; expected {wanted.format(schema[key])}")
    if isinstance(value, list) and "items" in schema:
        return [
            check(schema["items"], item, f"{where}[{index}]", problems)
            for index, item in enumerate(value)
        ]
    if isinstance(value, dict) and ("properties" in schema or "required" in schema):
        return check_object(schema, value, f"{where}.", problems)
    return value


def check_object(
    schema: dict[str, Any], value: dict[str, Any], prefix: str, problems: list[str]
) -> dict[str, Any]:
    """`check` of the members of an object, each called by its name after `prefix`."""
    properties = schema.get("properties", {})
    problems += [
        f"{prefix}{name} is missing" for name in schema.get("required", []) if name not in value
    ]
    checked = {}
    for name, item in value.items():
        if name in properties:
            checked[name] = check(properties[name], item, f"{prefix}{name}", problems)
        elif schema.get("additionalProperties", False):
            checked[name] = item
        else:
            known = ", ".join(properties) or "none"
            problems.append(f"{prefix}{shown(name)} is not known; the names are: {known}")
    return checked


def from_text(schema: dict[str, Any], text: str) -> Any:
    """The value that a text stands for where `schema` is expected.

    Text where text is allowed alone; else the JSON value if it has one of the types, else the text.
    """
    types = _types(schema) or tuple(_NAMES)
    if types == ("string",) or text in schema.get("enum", ()):
        return text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    fits = any(_fits(value, name) for name in types if name != "string")
    return value if fits or "string" not in types else text


def _types(schema: dict[str, Any]) -> tuple[Any, ...] | None:
    """Allowed types; () for any, None if the entry is no type or list of types."""
    types = schema.get("type", [])
    if isinstance(types, str):
        return (types,)
    return tuple(types) if isinstance(types, list) else None


def _fits(value: Any, name: str) -> bool:
    if name == "integer" and isinstance(value, float):
        return value.is_integer() and abs(value) < 2**53
    return _is(value, _NAMES[name]) if name != "boolean" else isinstance(value, bool)


def _is(value: Any, kinds: Any) -> bool:
    """isinstance, but a bool is no number."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _equal(value: Any, other: Any) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _kind(value: Any) -> str:
    """The JSON name of a value's type."""
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kind in _NAMES.items() if isinstance(value, kind)), "not JSON")
