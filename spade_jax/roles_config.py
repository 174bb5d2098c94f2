"""The sections of the configuration on the two roles: `designer`, `hint` and `agent`, who else may
be the designer, `endpoint`, what it reads, `corpus` and `memory`, and how alike its programs may
be, `diversity`.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from spade_jax.errors import ConfigError
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

GAME_SKILLS = (*SKILLS, "Strategic Planning", "Memory Recall", "Language Understanding")
"""Every skill of games."""

TOOL_SKILLS = (
    "API Orchestration",
    "Data Retrieval",
    "State Modification",
    "Error Recovery",
    "Tool Selection",
    "Multi-Step Workflows",
)
"""The skills of the tool-use setting."""

Difficulty = Literal["easy", "medium", "hard"]

DesignPrompt = Literal[
    "compact",
    "corpus",
    "multi_turn",
    "single_answer",
    "compact_tools",
    "tools",
    "tools_single",
]

COMPACT_PROMPTS = frozenset({"compact", "compact_tools"})
"""The prompts of a few lines."""

TOOL_PROMPTS = frozenset({"compact_tools", "tools", "tools_single"})
"""The prompts that ask for tool tasks."""

UNGROUNDED_PROMPTS = frozenset({"multi_turn", "single_answer"})
"""The prompts without a document."""


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

    # For games: compact (a few lines, which the shipped weights know), corpus (of many turns, out
    # of a document), multi_turn (without one), single_answer (a puzzle, without one). For tool
    # use: compact_tools, tools (a row of messages), tools_single (one task)
    prompt: DesignPrompt = "compact"
    designs: int = 12  # environments asked for per cycle, spread evenly over the active skills
    attempts: int = 1  # most designs written for each of them, until one is admitted
    repair_turns: int = 0  # answers to a refusal, in the same conversation, before an attempt ends
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
    train: bool = True  # off: designs are measured, but the policy learns nothing from them
    # who writes designs, hints and opinions: the policy as it is, or a frozen copy of the weights
    # the run started from, kept in learner.reference_memory; the sampler is loaded twice a cycle
    policy: Literal["current", "initial"] = "current"
    # where programs come from: the designer; a model of the section `endpoint`, asked in its place;
    # a folder of them, or the problems of the package rlve, each drawn once before any comes again
    source: Literal["policy", "endpoint", "folder", "rlve"] = "policy"
    # source=folder: .py files, such as the folder `environments` of a run, or a pool with a
    # manifest, as the SPADE project releases them
    folder: str = ""
    # source=folder: the tests before a program is played. Those of written programs; those that an
    # environment made elsewhere can pass, of loading, keeping the contract and repeating itself;
    # or none
    gates: Literal["all", "public", "none"] = "all"
    problems: tuple[str, ...] = ()  # source=rlve: their names; none: all problems of the package
    # source=rlve, how they follow the policy: each at its own difficulty, or all at one difficulty,
    # half of a cycle those whose mean return moves most
    controller: Literal["window", "learning_potential"] = "window"
    problem_difficulty: int = 1  # learning_potential: of every problem, 0 to 20
    # learning_potential: weights of the new mean return in the two averages that tell how it moves
    potential_fast: float = 0.35
    potential_slow: float = 0.15
    # window: each problem is drawn at a difficulty between its bounds. Plays at the upper one
    # are counted up to window_plays, and if this share of them won, it rises by 1; the lower one
    # follows so that there are at most window_width
    window_win_frac: float = 0.9
    window_plays: int = 128
    window_width: int = 4
    thinking: bool = False  # think first, where the chat template can
    thinking_tokens: int = 0  # tokens after which a thinking block is closed; 0: no budget
    # the policy reads each program that passed the tests, and refuses what it finds unsolvable
    judge: bool = False
    judge_temperature: float = 0.3  # its sampling temperature
    judge_max_tokens: int = 1024  # its longest completion

    def __post_init__(self) -> None:
        require(
            self.prompt in get_args(DesignPrompt),
            "designer.prompt",
            self.prompt,
            f"one of {', '.join(get_args(DesignPrompt))}",
        )
        known = TOOL_SKILLS if self.prompt in TOOL_PROMPTS else GAME_SKILLS
        unknown = [skill for skill in self.skills if skill not in known]
        require(
            not unknown and bool(self.skills),
            "designer.skills",
            unknown or self.skills,
            f"skills of designer.prompt={self.prompt}: {', '.join(known)}",
        )
        require(
            len(set(self.skills)) == len(self.skills),
            "designer.skills",
            self.skills,
            "each skill once",
        )
        for name in ("skills_per_cycle", "designs", "attempts", "max_tokens", "judge_max_tokens"):
            require(getattr(self, name) >= 1, f"designer.{name}", getattr(self, name), "at least 1")
        require(
            self.difficulty in get_args(Difficulty),
            "designer.difficulty",
            self.difficulty,
            "easy, medium or hard",
        )
        require(
            self.document_words >= 8, "designer.document_words", self.document_words, "at least 8"
        )
        for name in ("judge_temperature", "delay_steps", "repair_turns"):
            require(getattr(self, name) >= 0, f"designer.{name}", getattr(self, name), "0 or more")
        _require_sampling("designer", self)
        _require_budget("designer", self.thinking, self.thinking_tokens)
        self._require_source()

    def _require_source(self) -> None:
        """What is not written here, or not by the policy as it is, cannot be trained on."""
        own = self.source == "policy"
        expected = "off with designer.source other than policy: nothing of them was sampled here"
        require(own or not self.train, "designer.train", self.train, expected)
        expected = f"off with designer.source={self.source}: nobody is asked to write"
        require(self.writes or not self.judge, "designer.judge", self.judge, expected)
        require(
            self.policy == "current" or not self.train,
            "designer.train",
            self.train,
            "off with designer.policy=initial: what others wrote does not teach the policy",
        )
        require(
            self.policy == "current" or own,
            "designer.policy",
            self.policy,
            f"current with designer.source={self.source}",
        )
        for name, value, source in (
            ("folder", bool(self.folder), "folder"),
            ("gates", self.gates != "all", "folder"),
            ("problems", bool(self.problems), "rlve"),
            ("controller", self.controller != "window", "rlve"),
        ):
            shown = getattr(self, name)
            expected = f"to be set with designer.source={source} alone"
            require(not value or self.source == source, f"designer.{name}", shown, expected)
        require(
            self.source != "folder" or bool(self.folder),
            "designer.folder",
            self.folder,
            "the folder of designer.source=folder",
        )
        require(
            len(set(self.problems)) == len(self.problems),
            "designer.problems",
            self.problems,
            "each problem once",
        )
        require(
            0 < self.window_win_frac <= 1,
            "designer.window_win_frac",
            self.window_win_frac,
            "above 0, at most 1",
        )
        require(
            0 < self.potential_slow < self.potential_fast <= 1,
            "designer.potential_slow, designer.potential_fast",
            (self.potential_slow, self.potential_fast),
            "0 < potential_slow < potential_fast <= 1",
        )
        require(
            0 <= self.problem_difficulty <= 20,
            "designer.problem_difficulty",
            self.problem_difficulty,
            "0 to 20",
        )
        for name in ("window_plays", "window_width"):
            require(getattr(self, name) >= 1, f"designer.{name}", getattr(self, name), "at least 1")

    @property
    def writes(self) -> bool:
        """Whether programs are written in answer to a prompt."""
        return self.source in ("policy", "endpoint")


@dataclass(frozen=True)
class EndpointConfig(Section):
    """The server of designer.source=endpoint: it has an interface as OpenAI's chat completions."""

    url: str = ""  # up to, and without, /chat/completions
    model: str = ""  # its name there
    # the environment variable that holds the key, which is read nowhere else and never written
    # down; empty: the server asks for none
    key_env: str = ""
    timeout_s: float = 600.0  # of one request, from its first byte to the last of its reply
    retries: int = 5  # times that a request is repeated after 429, 5xx or no sensible reply
    backoff_s: float = 1.0  # before the first of them, doubled each time up to a minute
    concurrency: int = 8  # requests at a time
    # the field that bounds a reply by designer.max_tokens: the newer name, or that of older servers
    length_name: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    # send the designer's temperature, top_p, top_k, min_p and seeds; off for models that take none
    sampling: bool = True
    reasoning_effort: str = ""  # sent as it is; empty: the server's own

    def __post_init__(self) -> None:
        if self.key_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", self.key_env):
            raise ConfigError(  # its value is not shown: it may be the key itself
                "endpoint.key_env is not the name of an environment variable in capitals, such as "
                "OPENAI_API_KEY; export the key under such a name and give the name"
            )
        if self.url:
            self._require_url()
        require(self.timeout_s > 0, "endpoint.timeout_s", self.timeout_s, "more than 0")
        require(self.backoff_s >= 0, "endpoint.backoff_s", self.backoff_s, "0 or more")
        require(self.retries >= 0, "endpoint.retries", self.retries, "0 or more")
        require(self.concurrency >= 1, "endpoint.concurrency", self.concurrency, "at least 1")

    def _require_url(self) -> None:
        expected = "an address such as https://api.openai.com/v1"
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ConfigError(
                f"endpoint.url cannot be read ({error}): expected {expected}"
            ) from error
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigError(  # not shown: there may be a password in it
                f"endpoint.url holds a user, a query or a fragment; expected {expected}, and a key "
                "through endpoint.key_env"
            )
        require(
            whole and self.url.isascii() and self.url.isprintable() and " " not in self.url,
            "endpoint.url",
            self.url,
            expected,
        )


def check_endpoint(designer: DesignerConfig, endpoint: EndpointConfig) -> None:
    """Refuse an endpoint that is not whole, or one that nobody asks.

    Raises:
        ConfigError: names the setting.
    """
    asked = designer.source == "endpoint"
    for name in ("url", "model"):
        value = getattr(endpoint, name)
        expected = "to be set with designer.source=endpoint" + ("" if asked else " alone")
        require(bool(value) == asked, f"endpoint.{name}", value, expected)


@dataclass(frozen=True)
class HintConfig(Section):
    """How hints are written and refused. Hints are measured, not trained."""

    source: Literal["policy", "designer"] = "policy"  # who: a call of its own, or the design's
    scope: Literal["program", "seed"] = "program"  # for all instances, or for each one played
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
        require(
            self.source in ("policy", "designer"), "hint.source", self.source, "policy or designer"
        )
        require(self.scope in ("program", "seed"), "hint.scope", self.scope, "program or seed")
        require(
            self.source == "policy" or self.scope == "program",
            "hint.scope",
            self.scope,
            "program with hint.source=designer, which does not know the seeds",
        )
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
    # tool tasks: no loss on a completion that tried to call tools, if none of its calls can be read
    # and it gives no answer
    mask_malformed_calls: bool = False

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

    enabled: bool = True  # off: designs are grounded in no document
    # a JSONL file with "orig_doc" or "text"; empty: docstrings of installed packages
    path: str = ""
    # packages whose docstrings make the embedded corpus
    packages: tuple[str, ...] = ("numpy", "scipy")
    cache_dir: str = "~/.cache/spade_jax/corpus"  # where the embedded corpus is prepared
    min_words: int = 60  # shorter documents are dropped
    max_words: int = 6000  # longer documents are cut here
    # tokens of a document that the designer is shown at most, after the cut by
    # designer.document_words; 0: words alone decide
    max_tokens: int = 0
    # whether a skill draws from all documents or from those whose line names it under "skill" or
    # names none
    sampling: Literal["uniform", "per_skill"] = "uniform"
    # epoch: no document twice before all of those drawn from were, for whichever skill;
    # independent: by chance (the reference)
    draws: Literal["epoch", "independent"] = "epoch"

    def __post_init__(self) -> None:
        require(self.max_tokens >= 0, "corpus.max_tokens", self.max_tokens, "0 or more")
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
    # what is shown of a record: one line; some lines on how it reads and what it is made of; or, of
    # a learnable one, the whole program, or its first 2,000 characters (the reference)
    shows: Literal["line", "summary", "program", "excerpt"] = "line"
    positives: int = 2  # learnable records shown
    negatives: int = 1  # too easy or too hard records shown
    win_low: float = 0.15  # win rate from which a record counts as learnable
    win_high: float = 0.85  # win rate up to which a record counts as learnable
    # distance from these two from which a record is one to avoid (0.05 in the reference)
    avoid_margin: float = 0.0
    # on: a record follows all plays of its environment; off: it keeps what those of its first step
    # showed (the reference)
    refresh: bool = True

    def __post_init__(self) -> None:
        for name in ("size", "positives", "negatives"):
            require(getattr(self, name) >= 0, f"memory.{name}", getattr(self, name), "0 or more")
        require(
            0 <= self.win_low <= self.win_high <= 1,
            "memory.win_low, memory.win_high",
            (self.win_low, self.win_high),
            "0 <= win_low <= win_high <= 1",
        )
        require(0 <= self.avoid_margin <= 1, "memory.avoid_margin", self.avoid_margin, "0 to 1")


@dataclass(frozen=True)
class DiversityConfig(Section):
    """How the likeness of programs is measured, and what becomes of near-duplicates."""

    # a near-duplicate of one that was admitted, of an earlier design of its cycle or of the example
    # in its prompt is refused; played, its design earning reward.duplicate_reward less; or taken
    # as any other, and kept in the memory beside it
    duplicates: Literal["refuse", "penalise", "allow"] = "refuse"
    compared: int = 200  # newest admitted programs that new ones are compared with
    # cosine of the texts that two programs show from which they are near-duplicates; that of their
    # code is envs.duplicate_similarity. Other words in one pattern reach 0.94
    rules_similarity: float = 0.98
    window: int = 100  # newest programs that the variety is measured on
    # what texts are compared by: hashed character n-grams, or the package sentence-transformers
    embedding: Literal["ngrams", "sentence"] = "ngrams"
    encoder: str = "all-MiniLM-L6-v2"  # name or folder of the sentence encoder

    def __post_init__(self) -> None:
        require(
            0 < self.rules_similarity <= 1,
            "diversity.rules_similarity",
            self.rules_similarity,
            "above 0, at most 1",
        )
        require(self.compared >= 1, "diversity.compared", self.compared, "at least 1")
        require(self.window >= 2, "diversity.window", self.window, "at least 2")
        require(bool(self.encoder), "diversity.encoder", self.encoder, "a name or a folder")
