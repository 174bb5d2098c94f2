"""Arguments are held to their schema, and a schema to what is checked."""

from typing import Any

import pytest

from spade_jax.envs.tool_schema import check, check_object, from_text, schema_problem

INTEGER = {"type": "integer"}
NUMBER = {"type": "number"}
STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "value", "problem"),
    [
        ({}, {"any": [1]}, ""),
        (STRING, "a", ""),
        (STRING, 5, "it is 5 (integer); expected string"),
        (STRING, None, "it is None (null); expected string"),
        (INTEGER, 5, ""),
        (INTEGER, 5.5, "it is 5.5 (number); expected integer"),
        (INTEGER, "5", "it is '5' (string); expected integer"),
        (INTEGER, True, "it is True (boolean); expected integer"),
        (INTEGER, 1e300, "it is 1e+300 (number); expected integer"),
        (NUMBER, 5, ""),
        (NUMBER, 5.5, ""),
        (NUMBER, False, "it is False (boolean); expected number"),
        ({"type": "boolean"}, True, ""),
        ({"type": "boolean"}, 1, "it is 1 (integer); expected boolean"),
        ({"type": "null"}, None, ""),
        ({"type": ["string", "null"]}, None, ""),
        ({"type": ["string", "null"]}, 1, "it is 1 (integer); expected string or null"),
        ({"enum": ["a", 2]}, 2, ""),
        ({"enum": ["a", 2]}, "b", "it is 'b'; expected one of 'a', 2"),
        ({"enum": [1]}, True, "it is True; expected one of 1"),
        (INTEGER | {"minimum": 1, "maximum": 9}, 1, ""),
        (INTEGER | {"minimum": 1, "maximum": 9}, 9, ""),
        (INTEGER | {"minimum": 1, "maximum": 9}, 0, "it is 0; expected at least 1"),
        (INTEGER | {"minimum": 1, "maximum": 9}, 10, "it is 10; expected at most 9"),
        (NUMBER | {"exclusiveMinimum": 0}, 0, "it is 0; expected more than 0"),
        (NUMBER | {"exclusiveMaximum": 1}, 1.0, "it is 1.0; expected less than 1"),
        (STRING | {"minLength": 2}, "a", "it is 'a'; expected at least 2 characters"),
        (STRING | {"maxLength": 2}, "abc", "it is 'abc'; expected at most 2 characters"),
        ({"minLength": 2}, 1, ""),
        ({"type": "array", "minItems": 1}, [], "it is []; expected at least 1 items"),
        ({"type": "array", "maxItems": 1}, [1, 2], "it is [1, 2]; expected at most 1 items"),
        ({"type": "array", "items": INTEGER}, [1, "x"], "it[1] is 'x' (string); expected integer"),
        ({"type": "array", "items": INTEGER}, [1, 2], ""),
        ({"type": "object"}, {"free": 1}, ""),
        ({"properties": {"a": INTEGER}}, {"a": "x"}, "it.a is 'x' (string); expected integer"),
        ({"properties": {"a": INTEGER}}, {"b": 1}, "it.'b' is not known; the names are: a"),
        ({"properties": {"a": INTEGER}, "additionalProperties": True}, {"b": 1}, ""),
        ({"properties": {"a": INTEGER}, "required": ["a"]}, {}, "it.a is missing"),
        (STRING, 10**18, "it is 1000000000000000000 (integer); expected string"),
        (
            INTEGER,
            "\ud800" * 99,
            f"it is {repr(chr(0xD800) * 80)[:57]}... (string); expected integer",
        ),
    ],
)
def test_value_is_checked(schema: dict[str, Any], value: Any, problem: str):
    assert schema_problem(schema, "x") == ""
    problems: list[str] = []
    checked = check(schema, value, "it", problems)
    assert problems == ([problem] if problem else [])
    assert problem or checked == value
    "".join(problems).encode()


def test_whole_floats_become_integers_where_only_those_are_allowed():
    assert repr(check(INTEGER, 3.0, "it", [])) == "3"
    assert repr(check(NUMBER, 3.0, "it", [])) == "3.0"
    assert repr(check({"type": "array", "items": INTEGER}, [3.0], "it", [])) == "[3]"


def test_all_problems_of_an_object_are_named():
    problems: list[str] = []
    schema = {"properties": {"a": INTEGER, "b": STRING}, "required": ["a", "b"]}
    checked = check_object(schema, {"b": 1, "c": 2}, "", problems)
    assert problems == [
        "a is missing",
        "b is 1 (integer); expected string",
        "'c' is not known; the names are: a, b",
    ]
    assert checked == {"b": 1}
    problems.clear()
    check_object({"type": "object"}, {"c": 2}, "", problems)
    assert problems == ["'c' is not known; the names are: none"]


def test_a_deep_value_costs_no_more_than_its_schema():
    value: Any = 1
    for _ in range(16):
        value = [value]
    assert check({"type": "array", "items": {"type": "array"}}, value, "it", []) == value


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (5, "x is integer; expected a schema, an object"),
        ({"pattern": "a*"}, "x has the keyword 'pattern', which is not supported"),
        ({"anyOf": []}, "x has the keyword 'anyOf', which is not supported"),
        ({1: 2}, "x has the keyword 1, which is not supported"),
        ({"type": "str"}, "x.type is 'str'"),
        ({"type": 5}, "x.type is 5"),
        ({"type": [["string"]]}, "x.type is [['string']]"),
        ({"enum": "ab"}, "x.enum is not a list"),
        ({"enum": []}, "x.enum is not a list"),
        ({"enum": [[1]]}, "x.enum is not a list"),
        ({"minimum": "1"}, "x.minimum is '1'; expected a number"),
        ({"minimum": True}, "x.minimum is True; expected a number"),
        ({"maximum": float("nan")}, "x.maximum is nan; expected a number"),
        ({"properties": []}, "x.properties is not an object"),
        ({"properties": {1: {}}}, "x.properties is not an object"),
        ({"required": ["a"]}, "x.required is ['a']; expected a list of names in properties"),
        ({"properties": {"a": {}}, "required": "a"}, "x.required is 'a'"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "x.required is [['a']]"),
        ({"additionalProperties": {}}, "x.additionalProperties is not true or false"),
        ({"properties": {"a": {"type": "int"}}}, "x.a.type is 'int'"),
        ({"items": {"items": {"minimum": None}}}, "x.items.items.minimum is None"),
        ({"items": True}, "x.items is boolean; expected a schema"),
    ],
)
def test_an_unsound_schema_is_named(schema: Any, problem: str):
    assert schema_problem(schema, "x").startswith(problem)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "12", "12"),
        (STRING, "null", "null"),
        (INTEGER, "12", 12),
        (INTEGER, "twelve", "twelve"),
        (NUMBER, " 1.5\n", 1.5),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", "True"),
        ({"type": "array"}, '["a", 1]', ["a", 1]),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "12", 12),
        ({}, "a b", "a b"),
        (INTEGER, "NaN", "NaN"),
    ],
)
def test_texts_take_the_type_that_the_schema_asks_for(schema: dict, text: str, value: Any):
    assert from_text(schema, text) == value
    assert type(from_text(schema, text)) is type(value)
