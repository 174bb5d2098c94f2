"""The section `engine` of the configuration: the shapes and the memory of the sampler."""

from dataclasses import dataclass
from typing import Literal

from spade_jax.settings import Section, require

MIN_CALL_TOKENS = 64
"""Fewer rows take another path through a matrix product on CPU, and come out with other last bits.
"""

WeightFormat = Literal["same", "int8"]


@dataclass(frozen=True)
class EngineConfig(Section):
    """The sampler: fixed shapes, compiled once."""

    slots: int = 32  # sequences that decode together
    queue: int = 32  # further sequences, prefilled ahead, that take slots as they become free
    context_tokens: int = 1024  # longest sequence
    # tokens of one page of the cache: with few, decoding reads many short runs of memory; with
    # many, short sequences leave more of their last page empty
    page_tokens: int = 64
    # tokens that the cache holds; 0: (slots + queue) * context_tokens in whole pages, so that those
    # whose environments step find their pages again
    kv_tokens: int = 0
    piece_tokens: int = 32  # a prompt is cut into pieces of this size
    prefill_tokens: int = 512  # tokens of the largest prefill call; 64, 128, ... are there as well
    prefill_calls: int = 4  # prefill calls of one round: what new prompts may delay the others by
    decode_steps: int = 32  # tokens decoded before control returns to the host
    # same: the learner's, in the dtype of the activations; int8: matrices of the blocks rounded to
    # eight bits, so that the sampler is not quite the learner (sampler/learner_logprob_gap_mean)
    weights: WeightFormat = "same"
    routing: bool = False  # keep the routers' choices of every token, so that they can be replayed

    def __post_init__(self) -> None:
        for name in ("slots", "page_tokens", "prefill_calls", "decode_steps"):
            require(getattr(self, name) >= 1, f"engine.{name}", getattr(self, name), "at least 1")
        require(self.page_tokens <= 1024, "engine.page_tokens", self.page_tokens, "at most 1024")
        for name in ("queue", "kv_tokens"):
            require(getattr(self, name) >= 0, f"engine.{name}", getattr(self, name), "0 or more")
        require(
            self.context_tokens >= 16, "engine.context_tokens", self.context_tokens, "at least 16"
        )
        require(
            self.piece_tokens in (8, 16, 32, 64, 128, 256, 512),
            "engine.piece_tokens",
            self.piece_tokens,
            "a power of two from 8 to 512",
        )
        least = max(MIN_CALL_TOKENS, self.piece_tokens)
        multiple = self.prefill_tokens // least
        require(
            multiple * least == self.prefill_tokens and multiple & (multiple - 1) == 0 < multiple,
            "engine.prefill_tokens",
            self.prefill_tokens,
            f"{least} or a power of two times it",
        )
        require(
            self.kv_tokens == 0 or self.kv_tokens >= 2 * self.page_tokens,
            "engine.kv_tokens",
            self.kv_tokens,
            f"0 or at least two pages, {2 * self.page_tokens}",
        )

    @property
    def lanes(self) -> int:
        """Sequences that the device knows of."""
        return self.slots + self.queue

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        if self.kv_tokens:
            return -(-self.kv_tokens // self.page_tokens)
        return self.lanes * self.pages_per_row

    @property
    def pages_per_row(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.context_tokens // self.page_tokens)

    @property
    def spare_pages(self) -> int:
        """Most pages that a run of decode steps can take."""
        return min(self.num_pages, self.slots * -(-self.decode_steps // self.page_tokens))

    @property
    def prefill_pieces(self) -> tuple[int, ...]:
        """How many pieces the prefill calls have, the smallest call first."""
        sizes, tokens = [], max(MIN_CALL_TOKENS, self.piece_tokens)
        while tokens <= self.prefill_tokens:
            sizes.append(tokens // self.piece_tokens)
            tokens *= 2
        return tuple(sizes)
