"""The section `engine` of the configuration: the shapes and the memory of the sampler."""

from dataclasses import dataclass

from spade_jax.settings import Section, require


@dataclass(frozen=True)
class EngineConfig(Section):
    """The sampler: fixed shapes, compiled once."""

    slots: int = 32  # sequences that decode together
    context_tokens: int = 1024  # longest sequence the cache holds
    prefill_rows: int = 8  # sequences in one prefill call
    prefill_chunks: tuple[int, ...] = (32, 128, 512)  # tokens a row can advance in one prefill call
    decode_steps: int = 32  # tokens decoded before control returns to the host

    def __post_init__(self) -> None:
        require(self.slots >= 1, "engine.slots", self.slots, "at least 1")
        require(
            self.context_tokens >= 16, "engine.context_tokens", self.context_tokens, "at least 16"
        )
        require(self.prefill_rows >= 1, "engine.prefill_rows", self.prefill_rows, "at least 1")
        require(self.decode_steps >= 1, "engine.decode_steps", self.decode_steps, "at least 1")
        chunks = self.prefill_chunks
        require(
            bool(chunks)
            and list(chunks) == sorted(set(chunks))
            and chunks[0] >= 1
            and chunks[-1] <= self.context_tokens,
            "engine.prefill_chunks",
            chunks,
            "increasing sizes, none above engine.context_tokens",
        )
