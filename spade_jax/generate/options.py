"""What the command line of `spade-jax generate` says."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """One field for each option."""

    checkpoint: Path
    prompts: Path | None = None
    out: Path | None = None
    overwrite: bool = False
    chat: bool = False  # prompts are messages of a user
    system: str | None = None
    template: str = "auto"
    thinking: bool = False
    hide_thinking: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int = 0
    slots: int | None = None
    context: int | None = None
    tensor: int = 1  # devices
