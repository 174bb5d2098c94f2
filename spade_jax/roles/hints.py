"""Hints: written by the policy from the program, for all its instances or for one of them.
Measured, not trained.

Who writes it reads the program without its comments and docstrings (`digests.code`): what a
designer wrote there would reach the player by way of the hint. A hint that was refused is written
once more: in the same conversation, or, by the compact prompt, from its beginning. Refusing those
that give the answer away is `envs.hint_gates`' work.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import jax
import numpy as np

from spade_jax.config import HintConfig
from spade_jax.errors import SamplerError
from spade_jax.roles import asking, digests, parsing, prompts
from spade_jax.roles.designer import Sampler, opening
from spade_jax.roles_config import COMPACT_PROMPTS, DesignPrompt
from spade_jax.rollout.chat import Chat
from spade_jax.types import Gate, GateResult, Stop, Verdict


@dataclass(frozen=True)
class Written:
    """What became of one hint. `hint` is None unless the verdict admits it."""

    hint: str | None
    verdict: Verdict
    completion: str | None  # the last one
    tokens: int  # sampled, refused hints included


async def write(
    engine: Sampler,
    chat: Chat,
    config: HintConfig,
    kind: DesignPrompt,
    program: str,
    observation: str | None,
    keys: Callable[[int], jax.Array],
    judge: Callable[[str | None], Awaitable[Verdict]],
) -> Written:
    """Write a hint to `program`, and again if it is refused, `config.attempts` times in all.

    Args:
        observation: the first one of the instance that the hint is for; None for all instances.
        keys: the sampling key of each attempt.
        judge: the gates of hints; None is a hint that could not be read.
    """
    chat = chat.with_thinking(config.thinking)
    prompt = prompts.hint(kind, digests.code(program), observation, config.max_words)
    first = opening(chat, prompt)
    tokens, text, sampled = first, None, 0
    verdict = _unwritten("no hint was asked for")
    for attempt in range(config.attempts):
        params = asking.sampling(config, chat, config.max_tokens)
        try:
            completion = await engine.generate(tokens, params, keys(attempt))
        except SamplerError as error:  # a program that fills the context leaves a hint no room
            return Written(None, _unwritten(str(error)), text, sampled)
        sampled += len(completion.tokens)
        text = chat.decode(completion.tokens)
        # what was cut off at its last allowed token is no hint
        hint = parsing.hint(text) if completion.stop is Stop.STOP_ID else None
        verdict = await judge(hint)
        if verdict.admitted:
            return Written(hint, verdict, text, sampled)
        if kind in COMPACT_PROMPTS:
            continue
        reply = chat.reply(completion.tokens, prompts.hint_refusal(verdict.gate, verdict.reason))
        tokens = np.concatenate([tokens, completion.tokens, reply])
    return Written(None, verdict, text, sampled)


def _unwritten(reason: str) -> Verdict:
    return Verdict(False, Gate.HINT, reason, gates={Gate.HINT: GateResult.REFUSED})
