"""Hints: written by the policy from the program, refused when they give the answer away. Measured,
not trained.

What is checked here is form and verbatim solutions; playing a copy-the-hint agent is deliberately
left to admission's growth.
"""

import re
from collections.abc import Sequence

import jax

from spade_jax.config import HintConfig
from spade_jax.roles import parsing, prompts
from spade_jax.roles.designer import Sampler
from spade_jax.rollout.chat import Chat
from spade_jax.types import SamplingParams, Stop

_WORD = re.compile(r"\w+")


async def write(
    engine: Sampler, chat: Chat, config: HintConfig, program: str, key: jax.Array
) -> tuple[str, str | None]:
    """Sample one hint for `program`: (completion text, parsed hint or None).

    A hint that was cut off at its last allowed token is no hint.
    """
    params = SamplingParams(config.temperature, config.max_tokens, chat.stop_ids)
    completion = await engine.generate(chat.open(prompts.hint(program)), params, key)
    text = chat.decode(completion.tokens)
    return text, parsing.hint(text) if completion.stop is Stop.STOP_ID else None


def refusal(hint: str | None, solutions: Sequence[Sequence[str]], max_words: int) -> str | None:
    """Why the hint may not be shown, or None when it may.

    `solutions` are the winning action lists of a few seeds. A hint that contains one of them in
    order, word for word, is a password and not a hint.
    """
    if not hint:
        return "no hint was written"
    words = _WORD.findall(hint.lower())
    if len(words) > max_words:
        return f"hint of {len(words)} words; at most {max_words} are allowed"
    if "```" in hint or "\\boxed" in hint:
        return "hint contains code or a boxed action"
    for solution in solutions:
        wanted = [word for action in solution for word in _WORD.findall(action.lower())]
        spans = (
            words[start : start + len(wanted)] for start in range(len(words) - len(wanted) + 1)
        )
        if wanted and any(span == wanted for span in spans):
            return f"hint contains the winning actions {list(solution)!r}"
    return None
