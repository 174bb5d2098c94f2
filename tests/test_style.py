"""The house style that no linter checks: sizes, docstrings, and nothing left open."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted(
    path
    for top in ("models", "spade_jax", "configs", "launch")
    for path in (ROOT / top).rglob("*.py")
)


def problems(source: str) -> list[str]:
    """What is wrong with one module."""
    found = []
    num_lines = source.count("\n")
    if num_lines >= 500:
        found.append(f"{num_lines} lines; files stay under 500")
    tree = ast.parse(source)
    if tree.body and not ast.get_docstring(tree):
        found.append("no module docstring")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines >= 80:
                found.append(f"function {node.name} has {num_lines} lines; functions stay under 80")
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            found.append("imports from __future__, which jaxtyping does not bear")
    found += [f"{word} is left open" for word in re.findall(r"\b(?:TODO|FIXME|XXX)\b", source)]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_keeps_the_style(path: Path):
    assert problems(path.read_text()) == []


def test_sources_are_found():
    assert {ROOT / "models/config.py", ROOT / "spade_jax/types.py"} <= set(SOURCES)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Doc."""\n' + "x = 1\n" * 499, "500 lines"),
        ('"""Doc."""\ndef f():\n' + "    x = 1\n" * 79, "function f has 80 lines"),
        ("x = 1\n", "docstring"),
        ('"""Doc."""\nfrom __future__ import annotations\n', "__future__"),
        ('"""Doc."""\n# TODO: more\n', "TODO"),
    ],
)
def test_planted_problem_is_caught(source: str, expected: str):
    (problem,) = problems(source)
    assert expected in problem


def test_largest_module_that_is_allowed_passes():
    body = "    x = 1\n" * 78
    source = '"""Doc."""\ndef f():\n' + body
    assert problems(source + "y = 1\n" * (499 - source.count("\n"))) == []
