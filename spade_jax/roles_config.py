"""The sections of the configuration on the two roles: `designer`, `hint` and `agent`, and what the
designer reads, `corpus` and `memory`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from spade_jax.settings import Section, require

SKILLS = (
    "Mathematical Reasoning",
    "Logical Deduction",
    "Spatial Reasoning",
    "Pattern Recognition",
    "Optimization",
    "Causal Inference",
)
"""The six skills of the paper's games setting, in its order."""

Difficulty = Literal["easy", "medium", "hard"]


def _require_budget(section: str, thinking: bool, tokens: int) -> None:
    """A budget is for thinking that is on."""
    name = f"{section}.thinking_tokens"
    require(tokens == 0 or (tokens > 0 and thinking), name, tokens, f"0 without {section}.thinking")


def _require_sampling(section: str, values: Any) -> None:
    """How the tokens of a role are sampled."""
    ranges = {
        "temperature": (values.temperature >= 0, "0 or more"),
        "top_p": (0 < values.top_p <= 1, "more than 0 and at most 1 (off)"),
        "top_k": (0 <= values.top_k < 2**31, "0 (off) or more"),
        "min_p": (0 <= values.min_p <= 1, "0 (off) to 1"),
    }
    for name, (right, expected) in ranges.items():
        require(right, f"{section}.{name}", getattr(values, name), expected)


@dataclass(frozen=True)
class DesignerConfig(Section):
    """How environments are written."""

    designs: int = 12  # attempts per cycle, spread evenly over the active skills
    skills: tuple[str, ...] = SKILLS  # the skills in rotation
    skills_per_cycle: int = 3  # skills active in one cycle
    difficulty: Difficulty = "easy"  # the word that conditions the design
    document_words: int = 40  # words of the document shown to the designer
    temperature: float = 0.6  # sampling temperature
    top_p: float = 1.0  # the likeliest tokens that make up this share are kept; 1: all
    top_k: int = 0  # so many of the likeliest tokens are kept; 0: all
    min_p: float = 0.0  # tokens this likely are kept, as a share of the likeliest; 0: all
    max_tokens: int = 640  # longest completion
    delay_steps: int = 3  # steps a designer group waits for more plays before it is trained on
    thinking: bool = False  # think first, where the chat template can
    thinking_tokens: int = 0  # tokens after which a thinking block is closed; 0: no budget

    def __post_init__(self) -> None:
        unknown = [skill for skill in self.skills if skill not in SKILLS]
        require(
            not unknown and bool(self.skills),
            "designer.skills",
            self.skills,
            f"names out of {SKILLS}",
        )
        require(
            self.skills_per_cycle >= 1,
            "designer.skills_per_cycle",
            self.skills_per_cycle,
            "at least 1",
        )
        require(self.designs >= 1, "designer.designs", self.designs, "at least 1")
        require(
            self.difficulty in ("easy", "medium", "hard"),
            "designer.difficulty",
            self.difficulty,
            "easy, medium or hard",
        )
        require(
            self.document_words >= 8, "designer.document_words", self.document_words, "at least 8"
        )
        _require_sampling("designer", self)
        require(self.max_tokens >= 1, "designer.max_tokens", self.max_tokens, "at least 1")
        require(self.delay_steps >= 0, "designer.delay_steps", self.delay_steps, "0 or more")
        _require_budget("designer", self.thinking, self.thinking_tokens)


@dataclass(frozen=True)
class HintConfig(Section):
    """How hints are written and refused. Hints are measured, not trained."""

    temperature: float = 0.3  # sampling temperature
    top_p: float = 1.0  # the likeliest tokens that make up this share are kept; 1: all
    top_k: int = 0  # so many of the likeliest tokens are kept; 0: all
    min_p: float = 0.0  # tokens this likely are kept, as a share of the likeliest; 0: all
    max_tokens: int = 96  # longest completion
    max_words: int = 100  # a longer hint is refused
    attempts: int = 2  # one writing and one rewrite, then the design is refused
    thinking: bool = False  # think first, where the chat template can
    thinking_tokens: int = 0  # tokens after which a thinking block is closed; 0: no budget

    def __post_init__(self) -> None:
        _require_sampling("hint", self)
        require(self.max_tokens >= 1, "hint.max_tokens", self.max_tokens, "at least 1")
        require(self.max_words >= 1, "hint.max_words", self.max_words, "at least 1")
        require(self.attempts >= 1, "hint.attempts", self.attempts, "at least 1")
        _require_budget("hint", self.thinking, self.thinking_tokens)


@dataclass(frozen=True)
class AgentConfig(Section):
    """How environments are played."""

    temperature: float = 1.0  # sampling temperature
    top_p: float = 1.0  # the likeliest tokens that make up this share are kept; 1: all
    top_k: int = 0  # so many of the likeliest tokens are kept; 0: all
    min_p: float = 0.0  # tokens this likely are kept, as a share of the likeliest; 0: all
    max_tokens: int = 64  # longest completion of one turn
    max_turns: int = 12  # our cap on turns, whatever the environment allows
    seeds: int = 2  # instances of each environment played in one step
    plays: int = 4  # plays of each instance in each arm: one group
    max_observation_tokens: int = 200  # a longer observation ends the episode as TOKEN_LIMIT
    thinking: bool = False  # think before each action, where the chat template can
    thinking_tokens: int = 0  # tokens after which a thinking block is closed; 0: no budget

    def __post_init__(self) -> None:
        _require_sampling("agent", self)
        for name in ("max_tokens", "max_turns", "seeds", "max_observation_tokens"):
            require(getattr(self, name) >= 1, f"agent.{name}", getattr(self, name), "at least 1")
        require(
            self.plays >= 2,
            "agent.plays",
            self.plays,
            "at least 2: a group of one has no advantage",
        )
        _require_budget("agent", self.thinking, self.thinking_tokens)


@dataclass(frozen=True)
class CorpusConfig(Section):
    """Where documents come from."""

    # a JSONL file with "orig_doc" or "text"; empty: docstrings of installed packages
    path: str = ""
    # packages whose docstrings make the embedded corpus
    packages: tuple[str, ...] = ("numpy", "scipy")
    cache_dir: str = "~/.cache/spade_jax/corpus"  # where the embedded corpus is prepared
    min_words: int = 60  # shorter documents are dropped
    max_words: int = 6000  # longer documents are cut here

    def __post_init__(self) -> None:
        require(
            bool(self.path) or bool(self.packages),
            "corpus.packages",
            self.packages,
            "at least one package",
        )
        require(
            1 <= self.min_words <= self.max_words,
            "corpus.min_words",
            self.min_words,
            "1 to corpus.max_words",
        )


@dataclass(frozen=True)
class MemoryConfig(Section):
    """The record of earlier environments that the designer is shown."""

    size: int = 200  # records kept, oldest out first; 0 turns memory off
    positives: int = 2  # learnable records shown
    negatives: int = 1  # too easy or too hard records shown
    win_low: float = 0.15  # win rate from which a record counts as learnable
    win_high: float = 0.85  # win rate up to which a record counts as learnable

    def __post_init__(self) -> None:
        for name in ("size", "positives", "negatives"):
            require(getattr(self, name) >= 0, f"memory.{name}", getattr(self, name), "0 or more")
        require(
            0 <= self.win_low <= self.win_high <= 1,
            "memory.win_low, memory.win_high",
            (self.win_low, self.win_high),
            "0 <= win_low <= win_high <= 1",
        )
