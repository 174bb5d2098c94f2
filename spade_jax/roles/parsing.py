"""What is taken from model text: the program, the hint, the verdict, the action. Model text is
untrusted; nothing here executes it.

Text inside a thinking block is never obeyed, and among several candidates the last complete one
counts, so that quoting the instructions or drafting an answer does not act on the quote (reference
weakness 24).
"""

import ast
import json
import re
import warnings

from spade_jax.envs.api import MAX_PROGRAM_BYTES
from spade_jax.envs.tool_calls import outside_thinking

_FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_HINT_FENCE = re.compile(r"^```hint[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_ANY_FENCE = re.compile(r"^```\w*[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_BOX = "\\boxed{"
_GROUP = re.compile(r"(?<!\{)\{([^{}]*)\}(?!\})")  # braces without others in them, not doubled
_MAX_REPAIRS = 20  # lines of a program whose braces are doubled


def program(completion: str) -> str | None:
    """Source in the last complete ```python fence outside thinking, its braces repaired, or None.

    Whether it is a class with the right methods is the gate `parse`'s to say.
    """
    fences = _FENCE.findall(outside_thinking(completion))
    return repair_braces(fences[-1]) if fences and fences[-1].strip() else None


def repair_braces(source: str) -> str:
    """`source` with those brace groups of its f-strings doubled that hold no expression, such as
    f"say {go north}"; as it was unless that makes it parse.

    A group is looked at only in a line where Python reports an error, and at most `_MAX_REPAIRS`
    lines are changed: what parses, or is wrong in another way, stays.
    """
    if len(source) > MAX_PROGRAM_BYTES:
        return source
    lines = source.split("\n")
    for _ in range(_MAX_REPAIRS + 1):
        number = _error_line("\n".join(lines))
        if number is None:
            return "\n".join(lines)
        if not 0 < number <= len(lines):
            break
        doubled = _GROUP.sub(_doubled, lines[number - 1])
        if doubled == lines[number - 1]:
            break
        lines[number - 1] = doubled
    return source


def _error_line(source: str) -> int | None:
    """The line of the first syntax error; None without one, 0 for what has no line."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of its escapes: it is not our text
            ast.parse(source)
    except SyntaxError as error:
        return error.lineno or 0
    except (ValueError, RecursionError, MemoryError):
        return 0
    return None


def _doubled(group: re.Match[str]) -> str:
    """A brace group as it is if an f-string can hold it, else with doubled braces."""
    return f"{{{group[0]}}}" if _error_line(f'f"""{group[0]}"""') is not None else group[0]


def written_hint(completion: str) -> str | None:
    """Text in the last complete ```hint fence outside thinking, or None."""
    fences = _HINT_FENCE.findall(outside_thinking(completion))
    return fences[-1].strip() or None if fences else None


def verdict(completion: str) -> bool | None:
    """What the last box outside thinking says: yes, no, or neither."""
    return {"yes": True, "no": False}.get((action(completion) or "").strip(" .").lower())


def action(completion: str) -> str | None:
    """Content of the last complete `\\boxed{...}` outside thinking, braces balanced, stripped; None
    without one.
    """
    text = outside_thinking(completion)
    start = text.rfind(_BOX)
    while start >= 0:
        depth = 0
        for index in range(start + len(_BOX) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[index], 0)
            if depth == 0:
                return text[start + len(_BOX) : index].strip()
        start = text.rfind(_BOX, 0, start)
    return None


def hint(completion: str) -> str | None:
    """Hint text outside thinking; a (fenced) JSON object with a "hint" string is unwrapped. None if
    nothing is left.
    """
    text = outside_thinking(completion).strip()
    fences = _ANY_FENCE.findall(text + "\n")
    candidate = fences[-1].strip() if fences else text
    if candidate.startswith("{"):
        try:
            value = json.loads(candidate)
        except (json.JSONDecodeError, RecursionError):
            return text or None
        if isinstance(value, dict) and isinstance(value.get("hint"), str):
            return value["hint"].strip() or None
    return text or None
