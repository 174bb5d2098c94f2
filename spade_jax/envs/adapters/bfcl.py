"""The eight tool APIs of BFCL's multi-turn dialogues (`bfcl-eval`, its plain category).

A seed picks a dialogue that uses the API. The user's messages come one by one; an action is a call,
or a list of calls, in Python or JSON, and `done` asks for the next message. After each message the
package's own checks compare state and results with those of its answer: the first that fails ends
the episode with 0, the last that passes with 1. The clock is used by the APIs for time stamps that
are not shown, and to tell who is of age.

No options. Calls are looked up among the documented tools and their arguments must be literals;
nothing of an action is evaluated. The categories with missing tools or parameters are not here.
"""

import ast
import copy
import decimal
import functools
import importlib
import json
from importlib import resources
from typing import Any

from spade_jax.envs.adapters.base import PublicEnv

_MAX_ACTIONS = 20  # for one message, as in the benchmark
_DONE = "done"
_CATEGORY = "BFCL_v4_multi_turn_base.json"
_HELP = """You act for a user by calling tools. Each action is one call such as
name(argument="value"), or several in a list: [first(a=1), second(b="x")]. When a message of the
user has been dealt with, act with the single word done. The tools, with JSON schemas:"""


def prepare() -> None:
    """Import the package's APIs and checks, and read its dialogues."""
    _checks()
    for api in _files():
        _api(api)
        _tools(api)


def listing() -> list[list[str]]:
    """Identifier, family and why it is unseeded, of every API."""
    used = {api for row in _dialogues() for api in row["involved_classes"]}
    return [[api, f"bfcl/{api}", ""] for api in sorted(used)]


class Adapter(PublicEnv):
    """The dialogues that use one API."""

    def begin(self, seed: int) -> str:
        rows = [row for row in _dialogues() if self.identifier in row["involved_classes"]]
        if not rows:
            raise LookupError(f"no dialogue uses {self.identifier!r}")
        self._row = rows[seed % len(rows)]
        self._mine, self._theirs = self._instances(), self._instances()
        self._results: list[str] = []
        self._message = self._num_actions = 0
        hidden = self._row.get("excluded_function", ())
        self._known = {
            tool["name"]: (api, tool)
            for api in self._row["involved_classes"]
            for tool in _tools(api)
            if tool["name"] not in hidden
        }
        tools = "\n".join(json.dumps(tool) for _, tool in self._known.values())
        return f"{_HELP}\n{tools}\n\n{self._user()}"

    def act(self, action: str) -> tuple[str, float, bool, bool]:
        if action.strip().lower() == _DONE:
            return self._next_message()
        self._num_actions += 1
        if self._num_actions > _MAX_ACTIONS:
            return f"More than {_MAX_ACTIONS} actions for one message.", 0.0, True, False
        try:
            calls = _parse(action)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"This is not a call that can be read: {error}", 0.0, False, False
        results = [self._call(self._mine, *call) for call in calls]
        self._results += results
        return "\n".join(results) or "No call was made.", 0.0, False, False

    def solution(self) -> list[str]:
        return [action for calls in self._row["answer"] for action in (*calls, _DONE)]

    def _user(self) -> str:
        return "User: " + " ".join(part["content"] for part in self._row["question"][self._message])

    def _next_message(self) -> tuple[str, float, bool, bool]:
        expected = [
            self._call(self._theirs, *call)
            for text in self._row["answer"][self._message]
            for call in _parse(text)
        ]
        checks = _checks()
        acted = self._num_actions > 0 or not expected
        state = checks.state_checker(self._mine, self._theirs)
        results = checks.response_checker(self._results, expected, self._message)
        if not (acted and state["valid"] and results["valid"]):
            return "The message was not dealt with as it asks.", 0.0, True, False
        self._message += 1
        self._num_actions = 0
        if self._message == len(self._row["question"]):
            return "Every message was dealt with.", 1.0, True, False
        return self._user(), 0.0, False, False

    def _instances(self) -> dict[str, Any]:
        instances = {}
        for api in self._row["involved_classes"]:
            instances[api] = _api(api)()
            if hasattr(instances[api], "_load_scenario"):
                scenario = copy.deepcopy(self._row["initial_config"].get(api, {}))
                instances[api]._load_scenario(scenario)
        return instances

    def _call(
        self, instances: dict[str, Any], name: str, positional: list[Any], named: dict[str, Any]
    ) -> str:
        if name not in self._known:
            return f"Error: there is no tool {name!r}"
        api, _ = self._known[name]
        try:
            with decimal.localcontext():  # one API sets the precision of the whole process
                result = getattr(instances[api], name)(*positional, **named)
        except Exception as error:
            return f"Error: {error}"
        if isinstance(result, str):
            return result
        try:
            return json.dumps(result) if isinstance(result, dict) else str(result)
        except TypeError:
            return str(result)


def _parse(action: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """The calls in an action: name, positional and named arguments.

    Raises:
        ValueError, SyntaxError: it holds something else.
    """
    text = action.strip()
    if text.startswith(("{", "[{")):
        found = json.loads(text)
        return [_from_json(item) for item in (found if isinstance(found, list) else [found])]
    node = ast.parse(text, mode="eval").body
    return [_from_python(item) for item in (node.elts if isinstance(node, ast.List) else [node])]


def _from_json(item: Any) -> tuple[str, list[Any], dict[str, Any]]:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        raise ValueError('expected {"name": ..., "arguments": {...}}')
    arguments = item.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    return item["name"], [], arguments


def _from_python(node: ast.expr) -> tuple[str, list[Any], dict[str, Any]]:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("expected name(argument=value)")
    named = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** is not allowed")
        named[keyword.arg] = ast.literal_eval(keyword.value)
    return node.func.id, [ast.literal_eval(item) for item in node.args], named


@functools.cache
def _files() -> dict[str, tuple[str, str]]:
    """Module and documentation file of each API."""
    known = importlib.import_module("bfcl_eval.constants.executable_backend_config")
    used = {api for row in _dialogues() for api in row["involved_classes"]}
    return {
        api: (known.CLASS_FILE_PATH_MAPPING[api], known.MULTI_TURN_FUNC_DOC_FILE_MAPPING[api])
        for api in sorted(used)
    }


def _api(name: str) -> Any:
    return getattr(importlib.import_module(_files()[name][0]), name)


@functools.cache
def _tools(name: str) -> list[dict[str, Any]]:
    return [
        {key: tool[key] for key in ("name", "description", "parameters")}
        for tool in _lines("multi_turn_func_doc", _files()[name][1])
    ]


@functools.cache
def _dialogues() -> list[dict[str, Any]]:
    answers = {row["id"]: row["ground_truth"] for row in _lines("possible_answer", _CATEGORY)}
    return [row | {"answer": answers[row["id"]]} for row in _lines(_CATEGORY)]


def _lines(*path: str) -> list[dict[str, Any]]:
    text = resources.files("bfcl_eval").joinpath("data", *path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _checks() -> Any:
    return importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
