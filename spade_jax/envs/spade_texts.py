"""Programs of the SPADE reference turned into ours, and back, by adding and removing fixed text.

The reference loads the first class whose name ends in Env, hands it the whole of `\\boxed{...}`,
and puts some forty names into its namespace; ours loads the last such class and hands it what was
in the box. So a text that comes in (`adopt`) gets imports and a last class that boxes; one that
goes out (`release`) gets a first class that unboxes. Each takes the other's additions away exactly.

No program is run here, only parsed.
"""

import ast
import builtins
import re
import warnings
from dataclasses import dataclass

BASES = {"ToolUseBaseEnv": "tool_use_base_env"}
"""Base classes that the reference puts into a program's reach, and the module that a program here
imports each from; their actions are not boxed. A program whose base is neither among them nor its
own is not adopted."""

_SKIPPED = frozenset({"Env", "ToolUseBaseEnv"})  # the reference never loads these
_INJECTED = """\
# -- names that the SPADE loader provides
import abc, bisect, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools
import hashlib, heapq, itertools, json, math, operator, random, re, statistics, string, textwrap
import time, typing
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple, Union
try:
    import numpy, numpy as np
except ImportError:
    pass
"""
_START = "# -- the program\n"
_ADOPTED = """

# -- plays the class above as the SPADE loader does
class AdoptedEnv:
    def __init__(self):
        self._game = {name}()

    def reset(self, seed):
        return self._game.reset(seed=seed)

    def step(self, action):
        if {boxed} and "\\\\boxed" not in action:
            action = "\\\\boxed{{" + action + "}}"
        observation, reward, *rest = self._game.step(action)
        if type(reward) in (int, float) and abs(reward) > 1:
            reward = 1.0 if reward > 0 else -1.0
        return observation, reward, *rest
"""
_RELEASED = """\
# -- for the SPADE loader, which takes the first class; spade_jax takes the last
class ReleasedEnv:
    def __init__(self, max_turns=25):
        self._game = {name}()
        self.max_turns = max_turns

    def reset(self, seed=None):
        result = self._game.reset(0 if seed is None else seed)
        return result if isinstance(result, tuple) else (result, {{}})

    def step(self, action):
        start = action.rfind("\\\\boxed{{")
        if start >= 0:
            start += len("\\\\boxed{{")
            depth, end = 1, start
            while end < len(action) and depth:
                depth += {{"{{": 1, "}}": -1}}.get(action[end], 0)
                end += 1
            action = action[start : end - (not depth)]
        return self._game.step(action)
# -- the program
"""


class NotAdoptable(Exception):
    """Why a text cannot be played; for a report, not for a crash."""


@dataclass(frozen=True)
class _Found:
    name: str  # of the class
    bases: frozenset[str]  # not defined in the text
    start: int  # line after which other text may begin


def adopt(code: str) -> str:
    """A text of the reference as a program of ours.

    Raises:
        NotAdoptable: it cannot be parsed, has no environment, or builds on something unknown.
    """
    if (program := _unreleased(code)) is not None:
        return program
    found = _look(code, first=True)
    unknown = sorted(found.bases - BASES.keys())
    if unknown:
        raise NotAdoptable(f"{found.name} builds on {', '.join(unknown)}, which is not known here")
    imports = "".join(
        f"from {BASES[base]} import {base}\n" for base in sorted(found.bases & BASES.keys())
    )
    head = _INJECTED + imports + _START
    footer = _ADOPTED.format(name=found.name, boxed=not imports)
    return _insert(code, found.start, head) + footer


def release(program: str) -> str:
    """A program of ours as a text that the reference can load.

    Raises:
        NotAdoptable: it cannot be parsed or has no environment.
    """
    if (code := _unadopted(program)) is not None:
        return code
    found = _look(program, first=False)
    return _insert(program, found.start, _RELEASED.format(name=found.name))


def is_adopted(program: str) -> bool:
    """Whether `adopt` made a program out of a text of the reference."""
    return _unadopted(program) is not None


def _look(text: str, first: bool) -> _Found:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotAdoptable(f"{type(error).__name__}: {error}"[:200]) from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    names = [name for name in classes if name.endswith("Env") and name not in _SKIPPED]
    if not names:
        raise NotAdoptable("no class whose name ends in Env")
    name = names[0] if first else names[-1]
    start = 0
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            start = node.end_lineno or node.lineno
    return _Found(name, frozenset(_foreign_bases(name, classes, _own_names(tree))), start)


def _foreign_bases(
    name: str, classes: dict[str, ast.ClassDef], own: frozenset[str]
) -> frozenset[str]:
    """Base classes, near and far, that neither the text nor Python provides."""
    foreign, waiting, seen = set(), [name], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        for base in classes[current].bases:
            if isinstance(base, ast.Subscript):  # Generic[T]
                base = base.value
            if isinstance(base, ast.Attribute):
                continue  # of a module that the text imports
            shown = base.id if isinstance(base, ast.Name) else ast.unparse(base)
            if shown in classes:
                waiting.append(shown)
            elif shown not in own:
                foreign.add(shown)
    return frozenset(foreign)


def _own_names(tree: ast.Module) -> frozenset[str]:
    """Names that a text can use as a base: its imports, what is injected, what Python has."""
    names = set(dir(builtins))
    for node in [*ast.walk(tree), *ast.walk(ast.parse(_INJECTED))]:
        if isinstance(node, ast.ImportFrom) and node.module in BASES.values():
            continue  # a base like any other
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
    return frozenset(names)


def _insert(text: str, after_line: int, addition: str) -> str:
    lines = re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text)  # as Python counts them
    return "".join(lines[:after_line]) + addition + "".join(lines[after_line:])


def _unreleased(code: str) -> str | None:
    """The program in a text that `release` made; None for other texts."""
    match = re.search(re.escape(_RELEASED.format(name="NAME")).replace("NAME", r"\w+"), code)
    return code[: match.start()] + code[match.end() :] if match else None


def _unadopted(program: str) -> str | None:
    """The text in a program that `adopt` made; None for other programs."""
    head = re.search(
        re.escape(_INJECTED) + r"(?:from [\w.]+ import \w+\n)*" + re.escape(_START), program
    )
    footers = [_ADOPTED.format(name="NAME", boxed=boxed) for boxed in (True, False)]
    footer = re.search(
        "(?:" + "|".join(re.escape(text).replace("NAME", r"\w+") for text in footers) + r")\Z",
        program,
    )
    if head is None or footer is None:
        return None
    return program[: head.start()] + program[head.end() : footer.start()]
