"""The Environment Designer: a conversation whose answers should each be one program.

The first message asks for a design; each further one says why the last answer was refused. Every
answer is a training sample of its own: its trajectory holds all tokens before it, just as they were
sampled, and its loss mask marks the answer alone. Judging programs is admission's work.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Int

from spade_jax.config import DesignerConfig
from spade_jax.errors import SamplerError
from spade_jax.roles import asking, parsing, prompts
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.record import Recorder
from spade_jax.types import Completion, SamplingParams, Stop, Trajectory

MAX_TERMS = 8  # rare words of the excerpt that the compact prompt names
MIN_ANSWER_TOKENS = 64  # with less room than this a refusal is not answered


@runtime_checkable  # for the type checks of the tests
class Sampler(Protocol):
    """What a role needs of the engine."""

    async def generate(
        self, tokens: Int[np.ndarray, " seq"], params: SamplingParams, key: jax.Array
    ) -> Completion: ...


@dataclass(frozen=True)
class Request:
    """One attempt: what it is called, and what it is asked for."""

    design_id: str
    cycle: int
    document_id: str
    material: prompts.Material


@dataclass(frozen=True)
class Answer:
    """One completion of the designer, and the program it holds if one could be parsed."""

    text: str
    trajectory: Trajectory
    program: str | None

    @property
    def hint(self) -> str | None:
        """The hint that stands in the same completion."""
        return parsing.written_hint(self.text)


def opening(chat: Chat, prompt: prompts.Prompt) -> Int[np.ndarray, " seq"]:
    """The tokens of a first message; where the template has no system message, the persona stands
    at the head of the user's."""
    if prompt.persona is None:
        return chat.open(prompt.text)
    if chat.template.has_system:
        return chat.open(prompt.text, prompt.persona)
    return chat.open(f"{prompt.persona}\n\n{prompt.text}")


class Conversation:
    """One attempt from its prompt to its last answer; token ids only ever grow at the end."""

    def __init__(
        self,
        engine: Sampler,
        chat: Chat,
        config: DesignerConfig,
        context_tokens: int,
        prompt: prompts.Prompt,
        key: jax.Array,
    ) -> None:
        self._engine = engine
        self._chat = chat.with_thinking(config.thinking)
        self._config = config
        self._context_tokens = context_tokens
        self._key = key
        self._record = Recorder()
        self._record.add_prompt(opening(self._chat, prompt))
        self._last: Completion | None = None

    async def answer(self) -> Answer:
        """Sample the next answer."""
        room = self._context_tokens - len(self._record)
        params = asking.sampling(self._config, self._chat, min(self._config.max_tokens, room))
        completion = await self._engine.generate(self._record.tokens, params, self._key)
        self._record.add_completion(completion)
        self._last = completion
        trajectory = self._record.build(self._config.temperature)
        if trajectory is None or completion.stop.cut:
            raise SamplerError(f"a design was ended by {completion.stop}")
        own = trajectory.turn_index == trajectory.turn_index[-1]
        trajectory = replace(trajectory, loss_mask=trajectory.loss_mask & own)
        text = self._chat.decode(completion.tokens)
        return Answer(text, trajectory, parsing.program(text))

    def refuse(self, message: str) -> bool:
        """Say why the last answer was refused; False, and nothing is said, where the context has no
        room for another answer."""
        assert self._last is not None, "there is no answer to refuse"
        piece = self._chat.reply(self._last.tokens, message)
        full = self._last.stop is Stop.CONTEXT
        if full or self._context_tokens - len(self._record) - len(piece) < MIN_ANSWER_TOKENS:
            return False
        self._record.add_prompt(piece)
        return True
