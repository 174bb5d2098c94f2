"""What is taken from model text: the program, the hint, the verdict, the action. Model text is
untrusted; nothing here executes it.

Text inside a thinking block is never obeyed, and among several candidates the last complete one
counts, so that quoting the instructions or drafting an answer does not act on the quote (reference
weakness 24). Reading takes time linear in the length of the text, however often it opens what it
never closes: an endpoint may send megabytes.
"""

import ast
import json
import re
import warnings

from spade_jax.envs.api import MAX_PROGRAM_BYTES
from spade_jax.envs.tool_calls import outside_thinking

_FENCE = re.compile(r"^```(\w*)[ \t]*$", re.MULTILINE)
_BOX = "\\boxed{"
_GROUP = re.compile(r"(?<!\{)\{([^{}]*)\}(?!\})")  # braces without others in them, not doubled
_MAX_REPAIRS = 20  # lines of a program whose braces are doubled


def program(completion: str) -> str | None:
    """Source in the last complete ```python fence outside thinking, its braces repaired, or None.

    Whether it is a class with the right methods is the gate `parse`'s to say.
    """
    source = _last_block(outside_thinking(completion), "python")
    return repair_braces(source) if source and source.strip() else None


def _last_block(text: str, label: str | None) -> str | None:
    """Content of the last complete block whose fence has this label, or any; None without one."""
    start, found = None, None
    for fence in _FENCE.finditer(text):
        if start is not None and not fence[1]:
            start, found = None, text[start : fence.start()]
        elif start is None and label in (None, fence[1]):
            start = fence.end() + 1  # after the line break
    return found


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
    return (_last_block(outside_thinking(completion), "hint") or "").strip() or None


def verdict(completion: str) -> bool | None:
    """What the last box outside thinking says: yes, no, or neither."""
    return {"yes": True, "no": False}.get((action(completion) or "").strip(" .").lower())


def action(completion: str) -> str | None:
    """Content of the last complete `\\boxed{...}` outside thinking, braces balanced, stripped; None
    without one.
    """
    text = outside_thinking(completion)
    open_at, close_at = text.rfind("{"), text.rfind("}")
    closing: list[int] = []  # braces that the ones before them may match
    while open_at >= 0:
        if close_at > open_at:
            closing.append(close_at)
            close_at = text.rfind("}", 0, close_at)
            continue
        if closing:
            end = closing.pop()
            if text.endswith(_BOX, 0, open_at + 1):
                return text[open_at + 1 : end].strip()
        open_at = text.rfind("{", 0, open_at)
    return None


def hint(completion: str) -> str | None:
    """Hint text outside thinking; a (fenced) JSON object with a "hint" string is unwrapped. None if
    nothing is left.
    """
    text = outside_thinking(completion).strip()
    block = _last_block(text, None)
    candidate = text if block is None else block.strip()
    if candidate.startswith("{"):
        try:
            value = json.loads(candidate)
        except (json.JSONDecodeError, RecursionError):
            return text or None
        if isinstance(value, dict) and isinstance(value.get("hint"), str):
            return value["hint"].strip() or None
    return text or None
