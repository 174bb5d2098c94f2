"""What admission sees in a program's text, which is parsed and never run: its form and what
it imports."""

import ast
import warnings
from collections.abc import Collection, Iterator
from typing import NoReturn

from spade_jax.envs import api, tool_gate
from spade_jax.envs.limits import ALLOWED_IMPORTS
from spade_jax.envs.trial import Refused
from spade_jax.types import Gate

_METHODS = frozenset({"reset", "step", "solution"})
_CLOCKS = frozenset({"now", "today", "utcnow"})  # of `datetime`, the one allowed way to the time
_OUTSIDE = frozenset({"__import__", "__builtins__", "__loader__", "__spec__"})
_REACHING = frozenset({"delattr", "setattr", "vars"})  # change a module without an assignment
_MAX_LITERALS = 512
_MAX_LITERAL_CHARS = 60


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
    """The gate `imports`: rules that keep programs portable and their instances apart. Walls are
    around the worker.

    The clock is asked for here because replay cannot show a dependence on the day; what a module
    hides, and changes to one, because they could tell an instance what happened to others before.
    """
    modules: set[str] = set()
    taken: set[str] = set()
    for node, names in _imports(tree):
        for name in names:
            if name.partition(".")[0] not in ALLOWED_IMPORTS:
                _refuse(node, f"import of {name} is not allowed")
        for alias in node.names:
            whole = isinstance(node, ast.Import)
            if not whole and alias.name.startswith("_"):
                _refuse(node, f"{alias.name} is private to its module")
            given = alias.asname or (alias.name.partition(".")[0] if whole else alias.name)
            (modules if whole else taken).add(given)
    reads_clock = any("datetime" in names for _, names in _imports(tree))
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in _OUTSIDE:
            _refuse(node, f"{node.id} reaches outside the program")
        elif isinstance(node, ast.Attribute):
            _check_attribute(node, modules, taken)
        elif isinstance(node, ast.Call):
            _check_call(node, modules | taken, reads_clock)
            if isinstance(node.func, ast.Name) and node.func.id == "open" and "open" not in own:
                _refuse(node, "open() reaches outside the program")


def _check_attribute(node: ast.Attribute, modules: set[str], taken: set[str]) -> None:
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if owner in modules and node.attr.startswith("_"):
        _refuse(node, f"{owner}.{node.attr} is private to its module")
    if owner in modules | taken and not isinstance(node.ctx, ast.Load):
        _refuse(node, f"{owner}.{node.attr} is changed for all instances; keep state in self")


def _check_call(node: ast.Call, imported: set[str], reads_clock: bool) -> None:
    function = node.func
    if isinstance(function, ast.Name) and function.id in _REACHING and node.args:
        first = node.args[0]
        if isinstance(first, ast.Name) and first.id in imported:
            _refuse(node, f"{function.id}({first.id}) reaches into what it imports")
    if reads_clock and isinstance(function, ast.Attribute) and function.attr in _CLOCKS:
        own = isinstance(function.value, ast.Name) and function.value.id == "self"
        if not own:
            reason = f"{function.attr}() reads the clock; draw times from the seed"
            _refuse(node, reason)


def _refuse(node: ast.stmt | ast.expr, reason: str) -> NoReturn:
    raise Refused(Gate.IMPORTS, f"line {node.lineno}: {reason}")


def _imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield node, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield node, ["." * node.level + (node.module or "")]


def literals(tree: ast.Module) -> list[str]:
    """Short texts and numbers that the program is written with, in order: a word that it waits for
    is among them, unless it takes pains to hide it."""
    found: dict[str, None] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Constant):
            value = node.value
            if isinstance(value, str | int) and not isinstance(value, bool):
                text = str(value) if not isinstance(value, int) or abs(value) < 10**18 else ""
                if 0 < len(text) <= _MAX_LITERAL_CHARS:
                    found[text] = None
        else:
            waiting += reversed(list(ast.iter_child_nodes(node)))
    return list(found)[:_MAX_LITERALS]
