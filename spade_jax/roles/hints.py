"""Hints: written by the policy from the program. Measured, not trained.

Refusing those that give the answer away is admission's work (`envs.hint_gates`).
"""

import jax

from spade_jax.config import HintConfig
from spade_jax.roles import parsing, prompts
from spade_jax.roles.designer import Sampler
from spade_jax.rollout.chat import Chat
from spade_jax.types import SamplingParams, Stop


async def write(
    engine: Sampler, chat: Chat, config: HintConfig, program: str, key: jax.Array
) -> tuple[str, str | None]:
    """Sample one hint for `program`: (completion text, parsed hint or None).

    A hint that was cut off at its last allowed token is no hint.
    """
    chat = chat.with_thinking(config.thinking)
    params = SamplingParams(
        config.temperature,
        config.max_tokens,
        chat.stop_ids,
        config.top_p,
        config.top_k,
        config.min_p,
        thinking_tokens=config.thinking_tokens,
        thinking=chat.thinking_block,
    )
    completion = await engine.generate(chat.open(prompts.hint(program)), params, key)
    text = chat.decode(completion.tokens)
    return text, parsing.hint(text) if completion.stop is Stop.STOP_ID else None
