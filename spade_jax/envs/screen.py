"""What admission sees in a program's text, which is parsed and never run: its form and what
it imports."""

import ast
import warnings
from collections.abc import Collection, Iterator

from spade_jax.envs import api, tool_gate
from spade_jax.envs.limits import ALLOWED_IMPORTS
from spade_jax.envs.trial import Refused
from spade_jax.types import Gate

_METHODS = frozenset({"reset", "step", "solution"})
_CLOCKS = frozenset({"now", "today", "utcnow"})  # of `datetime`, the one allowed way to the time


def parse(program: str, methods: Collection[str] = _METHODS) -> ast.Module:
    """The gate `parse`; `methods` are those that the class must have."""
    if problem := api.program_problem(program):
        raise Refused(Gate.PARSE, problem)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Refused(Gate.PARSE, f"{type(error).__name__}: {error}"[:200]) from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    name = next((name for name in reversed(classes) if name.endswith("Env")), None)
    if name is None:
        raise Refused(Gate.PARSE, "the program defines no class whose name ends in Env")
    if missing := sorted(set(methods) - _methods(name, classes)):
        raise Refused(Gate.PARSE, f"{name} has no {', '.join(missing)}")
    return tree


def _methods(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Methods of a class, and of those of its bases that the program defines or that are ours."""
    found: set[str] = set()
    waiting, seen = [name], set()
    while waiting:
        current = waiting.pop()
        if current in seen or current not in classes:
            continue
        seen.add(current)
        found |= {node.name for node in classes[current].body if isinstance(node, ast.FunctionDef)}
        for base in tool_gate.base_names(classes[current]):
            found |= tool_gate.PROVIDES.get(base, frozenset())
            waiting.append(base)
    return found


def check_imports(tree: ast.Module) -> None:
    """The gate `imports`: rules that keep programs portable. Walls are around the worker.

    The clock is asked for here because replay cannot show a dependence on the day.
    """
    imported = set()
    for node, names in _imports(tree):
        for name in names:
            if name.partition(".")[0] not in ALLOWED_IMPORTS:
                reason = f"line {node.lineno}: import of {name} is not allowed"
                raise Refused(Gate.IMPORTS, reason)
        imported |= set(names)
    if "datetime" not in imported:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            own = isinstance(node.func.value, ast.Name) and node.func.value.id == "self"
            if node.func.attr in _CLOCKS and not own:
                reason = f"line {node.lineno}: {node.func.attr}() reads the clock"
                raise Refused(Gate.IMPORTS, f"{reason}; draw times from the seed")


def _imports(tree: ast.Module) -> Iterator[tuple[ast.stmt | ast.Name, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield node, ["." * node.level + (node.module or "")]
        elif isinstance(node, ast.Name) and node.id == "__import__":
            yield node, [node.id]
