"""One request to the sampler while it grows: its tokens, and the host's word on where it ends.

The device ends a sequence at its stop ids. What only text shows (stop strings) and what needs a
look back (the budget of a thinking block) is judged here after each round; tokens sampled beyond
such an end are dropped, as if they had never been.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Integer, UInt32

from spade_jax.types import SamplingParams, Stop

Decode = Callable[[Sequence[int]], str]
"""Turns token ids into text."""

TOKENS_PER_CHARACTER = 4
"""Most tokens that one character of text takes: one for each byte."""


@dataclass(eq=False)
class Request:
    """One generate call in flight."""

    tokens: list[int]  # the prompt, then what was sampled
    params: SamplingParams
    key: UInt32[np.ndarray, "2"]
    context_tokens: int
    decode: Decode | None = None  # needed for stop strings
    order: int = 0  # requests are admitted in this order
    stop: Stop | None = None  # set when finished
    error: str = ""  # set when it failed
    cancelled: bool = False  # nobody waits for it any more
    num_prompt: int = 0
    logprobs: list[float] = field(default_factory=list)
    untruncated: list[float] = field(default_factory=list)
    forced: list[bool] = field(default_factory=list)
    close_thinking: bool = False  # the budget is spent: closing ids are to be appended
    pages: tuple[int, ...] = ()  # when finished: where its keys were
    num_known: int = 0  # tokens whose keys were there
    routing: Integer[np.ndarray, "known layers chosen"] | None = None

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be sampled."""
        return self.stop is not None or bool(self.error) or self.cancelled

    @property
    def num_sampled(self) -> int:
        """Tokens sampled so far, forced ones included."""
        return len(self.tokens) - self.num_prompt

    @property
    def most(self) -> int:
        """Most tokens that the whole sequence may come to."""
        return min(self.context_tokens, self.num_prompt + self.params.max_tokens)

    def absorb(
        self, tokens: Sequence[int], logprobs: Sequence[float], untruncated: Sequence[float]
    ) -> int:
        """Append what was sampled, up to where it ends; return how many tokens were kept."""
        before = len(self.tokens)
        if tokens and tokens[-1] < 0:
            self.error = (
                f"the scores of the token at position {before + len(tokens) - 1} were not numbers "
                f"(a request of {self.num_prompt} tokens, {self.num_sampled} sampled); the weights "
                "have diverged: go back to an earlier checkpoint or lower learner.lr"
            )
            return 0
        self.tokens += tokens
        self.logprobs += logprobs
        self.untruncated += untruncated
        self.forced += [False] * len(tokens)
        spent = self._thinking_spent(before)
        if spent is not None:
            self._cut(spent)
        stopped = self._stop_string(before)
        if stopped is not None:
            self._cut(stopped)
            self.stop = Stop.STOP_STRING
        elif self._settle() is None and spent is not None:
            self.close_thinking = True
        return len(self.tokens) - before

    def force_closing(self) -> None:
        """Append the ids that close the thinking block, as far as there is room."""
        assert self.params.thinking is not None
        closing = self.params.thinking.closing[: self.most - len(self.tokens)]
        self.tokens += closing
        self.logprobs += [0.0] * len(closing)
        self.untruncated += [0.0] * len(closing)
        self.forced += [True] * len(closing)
        self.close_thinking = False
        self._settle()

    def rewind(self, num_sampled: int) -> None:
        """Drop what was sampled beyond the first `num_sampled` tokens."""
        self._cut(self.num_prompt + num_sampled)

    def limit(self) -> int:
        """Position of the last token that may be sampled before the host has to look."""
        start = self._open_block(len(self.tokens))
        if start is not None:
            return min(self.most, max(start, self.num_prompt) + self.params.thinking_tokens) - 1
        return self.most - 1

    def _settle(self) -> Stop | None:
        """Set why the sequence ends with its last token, if it does."""
        if self.tokens[-1] in self.params.stop_ids and not self.forced[-1]:
            self.stop = Stop.STOP_ID
        elif self.num_sampled == self.params.max_tokens:
            self.stop = Stop.MAX_TOKENS
        elif len(self.tokens) == self.context_tokens:
            self.stop = Stop.CONTEXT
        return self.stop

    def _cut(self, length: int) -> None:
        del self.tokens[length:]
        kept = length - self.num_prompt
        del self.logprobs[kept:], self.untruncated[kept:], self.forced[kept:]

    def _open_block(self, length: int) -> int | None:
        """Index of the first token in the thinking block that is open at `length`; None if none.

        A turn that ended leaves no block open, whatever it held.
        """
        thinking = self.params.thinking
        if not self.params.thinking_tokens or thinking is None or any(self.forced):
            return None  # a block is closed once: what opens later is the policy's own affair
        start = None  # opening an open block again gains nothing
        for index in range(length - 1, -1, -1):
            if self.tokens[index] in (thinking.close_id, *self.params.stop_ids):
                break
            if self.tokens[index] == thinking.open_id:
                start = index + 1
        return start

    def _thinking_spent(self, before: int) -> int | None:
        """Length at which a thinking block has spent its budget, of the tokens behind `before`."""
        thinking, start = self.params.thinking, self._open_block(before)
        if thinking is None or any(self.forced):
            return None
        for index in range(before, len(self.tokens)):
            if self.tokens[index] == thinking.close_id:
                start = None
            elif self.tokens[index] == thinking.open_id and start is None:
                start = index + 1
            budget = self.params.thinking_tokens
            if budget and start is not None and index + 1 - max(start, self.num_prompt) >= budget:
                return index + 1
        return None

    def _stop_string(self, before: int) -> int | None:
        """Length at which the sampled text first holds a stop string, looking behind `before`; what
        was forced, and what came before it, is not looked at.
        """
        strings = self.params.stop_strings
        if not strings or self.decode is None:
            return None
        longest = max(map(len, strings))
        forced = max((i + 1 for i, each in enumerate(self.forced) if each), default=0)
        start = max(self.num_prompt + forced, before - 2 * TOKENS_PER_CHARACTER * longest)

        def holds(length: int) -> bool:
            assert self.decode is not None
            text = self.decode(self.tokens[start:length])
            return any(string in text for string in strings)

        if not holds(len(self.tokens)):
            return None
        return next(n for n in range(before + 1, len(self.tokens) + 1) if holds(n))
