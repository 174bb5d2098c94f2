"""The Environment Designer: one completion that should be one program. Judging the program is
admission's work.
"""

from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jaxtyping import Int

from spade_jax.config import DesignerConfig
from spade_jax.errors import SamplerError
from spade_jax.roles import parsing, prompts
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.record import Recorder
from spade_jax.types import Completion, EnvironmentSource, SamplingParams, Trajectory

MAX_TERMS = 8  # rare words of the excerpt that the prompt names


class Sampler(Protocol):
    """What a role needs of the engine."""

    async def generate(
        self, tokens: Int[np.ndarray, " seq"], params: SamplingParams, key: jax.Array
    ) -> Completion: ...


@dataclass(frozen=True)
class Request:
    """What one design is asked for; `excerpt` is the part of the document the designer sees."""

    design_id: str
    cycle: int
    skill: str
    difficulty: str
    document_id: str
    excerpt: str
    terms: tuple[str, ...]  # rare words of the excerpt, named in the prompt
    memory: tuple[str, ...]


async def write(
    engine: Sampler, chat: Chat, config: DesignerConfig, request: Request, key: jax.Array
) -> tuple[str, Trajectory, EnvironmentSource | None]:
    """Sample one design: its text, its trajectory, and the program if one could be parsed."""
    record = Recorder()
    chat = chat.with_thinking(config.thinking)
    record.add_prompt(
        chat.open(
            prompts.designer(
                request.skill, request.difficulty, request.excerpt, request.terms, request.memory
            )
        )
    )
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
    completion = await engine.generate(record.tokens, params, key)
    record.add_completion(completion)
    trajectory = record.build(config.temperature)
    if trajectory is None or completion.stop.cut:
        raise SamplerError(f"the design {request.design_id} was ended by {completion.stop}")
    text = chat.decode(completion.tokens)
    program = parsing.program(text)
    if program is None:
        return text, trajectory, None
    source = EnvironmentSource(program, request.skill, request.difficulty, request.document_id)
    return text, trajectory, source
