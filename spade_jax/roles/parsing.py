"""What is taken from model text: the program, the hint, the action. Model text is untrusted;
nothing here executes it.

Text inside a thinking block is never obeyed, and among several candidates the last complete one
counts, so that quoting the instructions or drafting an answer does not act on the quote (reference
weakness 24).
"""

import json
import re

from spade_jax.envs.tool_calls import outside_thinking

_FENCE = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_ANY_FENCE = re.compile(r"^```\w*[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_BOX = "\\boxed{"


def program(completion: str) -> str | None:
    """Source in the last complete ```python fence outside thinking, or None."""
    fences = _FENCE.findall(outside_thinking(completion))
    return fences[-1] if fences and fences[-1].strip() else None


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
