"""A talk with a policy in the terminal: a reply appears as it is sampled, with control characters
escaped.
"""

import asyncio
import dataclasses
import signal
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from spade_jax.generate.options import Options
from spade_jax.generate.policy import Policy
from spade_jax.rollout.chat import Chat
from spade_jax.rollout.engine import Engine
from spade_jax.rollout.keys import episode_key
from spade_jax.rollout.templates import THINK_CLOSE, THINK_OPEN
from spade_jax.terminal import say, typed, visible_lines
from spade_jax.types import Stop

CONTEXT = 4096  # tokens of a conversation, where the model can
STREAM_TOKENS = 32  # sampled between two looks at the terminal
MAX_MESSAGE_BYTES = 2**20


class Conversation:
    """A person's talk with a policy: one growing list of token ids."""

    def __init__(self, policy: Policy, options: Options) -> None:
        self._chat = policy.chat  # refuses a checkpoint without a known format
        self._policy = policy
        self._options = options
        self._context = options.context or min(CONTEXT, policy.config.max_positions)
        self._interrupted = False
        self._begin()

    def _begin(self) -> None:
        self._tokens = np.zeros(0, np.int32)
        self._completion: list[int] = []  # what the policy said last

    def run(self) -> int:
        """Answer line after line; returns the exit code."""
        engine = self._policy.engine(
            slots=1, context=self._context, queue=0, decode_steps=STREAM_TOKENS
        )
        say(f"{self._options.checkpoint}, {self._context} tokens of context")
        note = "/new begins anew, Ctrl-C ends a reply, /quit or Ctrl-D leaves"
        messages = typed(note, MAX_MESSAGE_BYTES)
        with asyncio.Runner() as runner:
            while (message := next(messages, None)) is not None:
                if message.strip() == "/quit":
                    break
                if message.strip() == "/new":
                    self._begin()
                    say("(a new conversation)")
                    continue
                piece = self._piece(message)
                if piece is None:
                    continue
                self._tokens = np.concatenate([self._tokens, self._completion, piece])
                self._tokens, self._completion = self._tokens.astype(np.int32), []
                runner.run(self._answer(engine))
        return 0

    async def _answer(self, engine: Engine) -> None:
        """Have a reply sampled; an interrupt, or several, end it after the round under way."""
        loop = asyncio.get_running_loop()
        self._interrupted = False
        loop.add_signal_handler(signal.SIGINT, self._interrupt, engine)
        try:
            await engine.gather([self._reply(engine)])
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _interrupt(self, engine: Engine) -> None:
        self._interrupted = True
        engine.stop()

    def _piece(self, message: str) -> Int[np.ndarray, " seq"] | None:
        """What the message adds to the tokens; None, and a word on it, if there is no room."""
        if len(self._tokens) == 0:
            piece = self._chat.open(message, self._options.system)
        else:
            piece = self._chat.reply(np.array(self._completion, np.int32), message)
        size = len(self._tokens) + len(self._completion) + len(piece)
        if size >= self._context:
            say(
                f"(that would make {size} tokens, and the context has {self._context}; shorten it, "
                "or begin anew with /new)"
            )
            return None
        return piece

    async def _reply(self, engine: Engine) -> None:
        """Sample a reply in short calls, and show each as it comes.

        A call goes on where the last one ended: keys belong to positions, and the engine finds the
        pages of what was sampled before.
        """
        key = episode_key(self._options.seed, "conversation")
        params = self._policy.sampling(())
        shown = _Shown(self._chat, hide=self._options.hide_thinking)
        left = self._options.max_tokens
        stop: str = Stop.MAX_TOKENS
        while left > 0 and not self._interrupted:
            tokens = np.concatenate([self._tokens, np.array(self._completion, np.int32)])
            if len(tokens) >= self._context:
                stop = Stop.CONTEXT
                break
            part = dataclasses.replace(params, max_tokens=min(left, STREAM_TOKENS))
            completion = await engine.generate(tokens, part, key)
            new = completion.tokens.tolist()
            end = self._stop_string(new)
            new = new[:end]
            self._completion += new
            left -= len(new)
            shown.add(new)
            if end is not None or completion.stop is not Stop.MAX_TOKENS:
                stop = completion.stop if end is None else Stop.STOP_STRING
                break
        if stop in (Stop.STOP_ID, Stop.STOP_STRING):
            shown.close("")
        else:
            shown.close("(interrupted)" if self._interrupted else f"(ended by {stop})")

    def _stop_string(self, new: list[int]) -> int | None:
        """How many of the new tokens it takes to complete a stop string; None if they do not."""
        if not self._options.stop:
            return None
        said = self._completion
        for count in range(1, len(new) + 1):
            text = self._policy.tokenizer.decode([*said, *new[:count]])
            if any(string in text for string in self._options.stop):
                return count
        return None


class _Shown:
    """A reply on the terminal, as far as it is known."""

    def __init__(self, chat: Chat, *, hide: bool) -> None:
        self._stream = chat.tokenizer.stream()
        self._text = f"{THINK_OPEN}\n" if chat.template.thinks == "always" else ""
        self._hide = hide
        self._length = 0  # of what is shown

    def add(self, tokens: Sequence[int]) -> None:
        self._show(self._stream.add(tokens))

    def close(self, note: str) -> None:
        self._show(self._stream.close())
        say("", *([note] if note else []))

    def _show(self, text: str) -> None:
        self._text += text
        shown = _without_thinking(self._text) if self._hide else self._text
        say("\n".join(visible_lines(shown[self._length :])), end="")
        self._length = len(shown)


def _without_thinking(text: str) -> str:
    """What is said outside of the first thinking block, closed or not."""
    before, _, rest = text.partition(THINK_OPEN)
    return before + rest.partition(THINK_CLOSE)[2].lstrip("\n")
