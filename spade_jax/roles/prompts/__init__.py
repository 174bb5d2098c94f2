"""The text of every prompt, and nothing else: which words the designer, the hint writer and the
agent are given.

    compact    short texts for a policy of any size
    games      long ones for games: from a document, of many turns, of a single answer
    tools      long ones for tool tasks: a row of messages, a single task
    talk       refusals, and the requests for hints and verdicts
    agent      the first message of an episode

Each long prompt holds a complete program that admission admits (`worked_games`, `worked_tools`).
"""

from collections.abc import Callable

from spade_jax.roles.prompts import compact, contract, games, tools, worked_games, worked_tools
from spade_jax.roles.prompts.agent import HINT_LABEL, first_observation
from spade_jax.roles.prompts.material import Material, Prompt
from spade_jax.roles.prompts.talk import hint, hint_refusal, judge, refusal
from spade_jax.roles_config import DesignPrompt

__all__ = [
    "HINT_LABEL",
    "WORKED",
    "Material",
    "Prompt",
    "designer",
    "first_observation",
    "hint",
    "hint_refusal",
    "judge",
    "refusal",
]

_LONG: dict[DesignPrompt, Callable[[Material, int], Prompt]] = {
    "corpus": games.corpus,
    "multi_turn": games.multi_turn,
    "single_answer": games.single_answer,
    "tools": tools.progressive,
    "tools_single": tools.single,
}

WORKED: dict[DesignPrompt, str] = {
    "corpus": worked_games.WORKSHOP,
    "multi_turn": worked_games.CAULDRON,
    "single_answer": worked_games.ROUNDS,
    "tools": worked_tools.LOAN_DESK,
    "tools_single": worked_tools.SEED_BANK,
}
"""The complete program in each long prompt; a design that is like it is a copy."""


def designer(material: Material, hint_words: int) -> Prompt:
    """The prompt for one design; a hint that it asks for has at most `hint_words` words."""
    if material.kind in _LONG:
        return _LONG[material.kind](material, hint_words)
    prompt = compact.design(material)
    if not material.asks_hint:
        return prompt
    return Prompt(f"{prompt.text}\n{contract.HINT_REQUEST.format(max_words=hint_words)}")
