"""The chat template as token pieces around a turn: a conversation only ever grows by appended ids.

    <|bos|><|user|>message<|end|><|assistant|>completion<|end|><|user|>text<|end|><|assistant|>
    `---------------- open -----------------' `--- sampled ---'`------------ reply -----------'

Nothing is re-tokenised or re-rendered (design decision 1). There is no system message: both roles
speak without one.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from models.tokenizer import Tokenizer


class Chat:
    """The pieces of one tokenizer's chat template, as int32 arrays."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._bos, self._user, self._assistant, self._end = (
            tokenizer.control(name) for name in ("bos", "user", "assistant", "end")
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the pieces are made with."""
        return self._tokenizer

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a completion."""
        return (self._end,)

    def open(self, text: str) -> Int[np.ndarray, " seq"]:
        """Begin a conversation with the user's first message and hand the word to the model."""
        return self._piece([self._bos], text)

    def reply(
        self, completion: Int[np.ndarray, " completion"], text: str
    ) -> Int[np.ndarray, " seq"]:
        """Return what follows `completion`: the end mark if it was cut, the user's next message."""
        ended = completion.size > 0 and int(completion[-1]) == self._end
        return self._piece([] if ended else [self._end], text)

    def finish(self, text: str) -> Int[np.ndarray, " seq"]:
        """Return a complete completion that says `text`: what supervised examples teach."""
        return np.array([*self._tokenizer.encode(text), self._end], np.int32)

    def decode(self, completion: Int[np.ndarray, " seq"] | Sequence[int]) -> str:
        """Return the text of a completion, without its marks."""
        return self._tokenizer.decode([int(token) for token in completion])

    def _piece(self, head: list[int], text: str) -> Int[np.ndarray, " seq"]:
        ids = [*head, self._user, *self._tokenizer.encode(text), self._end, self._assistant]
        return np.array(ids, np.int32)
