"""Every setting of a run, as frozen dataclasses: one section per concern, one name per field,
validated on construction.

Presets live in `configs/` as Python; nothing here reads files, flags or environment variables.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import TransformerConfig
from models.execution import Execution
from spade_jax.envs_config import EnvsConfig
from spade_jax.errors import ConfigError
from spade_jax.reward_config import RewardConfig
from spade_jax.settings import Section, check_fields, require

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


@dataclass(frozen=True)
class RunConfig(Section):
    """The run as a whole."""

    dir: str = "runs/tiny"  # run folder: config, metrics, episodes, environments, checkpoints
    seed: int = 0  # every random choice of the run is derived from it
    steps: int = 12  # optimiser steps
    cycle_steps: int = 4  # steps between two designer generations
    init_from: str = ""  # folder with the tokenizer and starting weights
    checkpoint_steps: int = 1  # steps between two checkpoints
    keep_checkpoints: int = 2  # newest checkpoints kept
    chat_template: str = "auto"  # auto: what the checkpoint says; else spade, chatml, qwen3, llama3

    def __post_init__(self) -> None:
        require(bool(self.dir), "run.dir", self.dir, "a folder name")
        require(0 <= self.seed < 2**31, "run.seed", self.seed, "0 to 2147483647")
        require(self.steps >= 1, "run.steps", self.steps, "at least 1")
        require(self.cycle_steps >= 1, "run.cycle_steps", self.cycle_steps, "at least 1")
        require(
            self.checkpoint_steps >= 1, "run.checkpoint_steps", self.checkpoint_steps, "at least 1"
        )
        require(
            self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "at least 1"
        )


@dataclass(frozen=True)
class MeshConfig(Section):
    """Devices along each mesh axis; -1 on one axis takes what the others leave."""

    data: int = 1  # replicas of the weights
    fsdp: int = -1  # shards of the weights, gathered for use
    expert: int = 1  # shards of the experts
    tensor: int = 1  # shards within a matrix product

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh.{name}", size, "at least 1, or -1 for the rest")
        require(list(sizes.values()).count(-1) <= 1, "mesh", sizes, "-1 on at most one axis")


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


@dataclass(frozen=True)
class DesignerConfig(Section):
    """How environments are written."""

    designs: int = 12  # attempts per cycle, spread evenly over the active skills
    skills: tuple[str, ...] = SKILLS  # the skills in rotation
    skills_per_cycle: int = 3  # skills active in one cycle
    difficulty: Difficulty = "easy"  # the word that conditions the design
    document_words: int = 40  # words of the document shown to the designer
    temperature: float = 0.6  # sampling temperature
    max_tokens: int = 640  # longest completion
    delay_steps: int = 3  # steps a designer group waits for more plays before it is trained on
    thinking: bool = False  # think first, where the chat template can

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
        require(self.temperature >= 0, "designer.temperature", self.temperature, "0 or more")
        require(self.max_tokens >= 1, "designer.max_tokens", self.max_tokens, "at least 1")
        require(self.delay_steps >= 0, "designer.delay_steps", self.delay_steps, "0 or more")


@dataclass(frozen=True)
class HintConfig(Section):
    """How hints are written and refused. Hints are measured, not trained."""

    temperature: float = 0.3  # sampling temperature
    max_tokens: int = 96  # longest completion
    max_words: int = 100  # a longer hint is refused
    attempts: int = 2  # one writing and one rewrite, then the design is refused
    thinking: bool = False  # think first, where the chat template can

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "hint.temperature", self.temperature, "0 or more")
        require(self.max_tokens >= 1, "hint.max_tokens", self.max_tokens, "at least 1")
        require(self.max_words >= 1, "hint.max_words", self.max_words, "at least 1")
        require(self.attempts >= 1, "hint.attempts", self.attempts, "at least 1")


@dataclass(frozen=True)
class AgentConfig(Section):
    """How environments are played."""

    temperature: float = 1.0  # sampling temperature
    max_tokens: int = 64  # longest completion of one turn
    max_turns: int = 12  # our cap on turns, whatever the environment allows
    seeds: int = 2  # instances of each environment played in one step
    plays: int = 4  # plays of each instance in each arm: one group
    max_observation_tokens: int = 200  # a longer observation ends the episode as TOKEN_LIMIT
    thinking: bool = False  # think before each action, where the chat template can

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "agent.temperature", self.temperature, "0 or more")
        for name in ("max_tokens", "max_turns", "seeds", "max_observation_tokens"):
            require(getattr(self, name) >= 1, f"agent.{name}", getattr(self, name), "at least 1")
        require(
            self.plays >= 2,
            "agent.plays",
            self.plays,
            "at least 2: a group of one has no advantage",
        )


@dataclass(frozen=True)
class BatchConfig(Section):
    """How trajectories become device arrays."""

    row_tokens: int = 1024  # tokens of one packed row; no trajectory may be longer
    # rows of one forward and backward pass; gradients accumulate over passes
    microbatch_rows: int = 8

    def __post_init__(self) -> None:
        require(self.row_tokens >= 16, "batch.row_tokens", self.row_tokens, "at least 16")
        require(
            self.microbatch_rows >= 1, "batch.microbatch_rows", self.microbatch_rows, "at least 1"
        )


@dataclass(frozen=True)
class LearnerConfig(Section):
    """GRPO and its optimiser (AdamW with the paper's settings)."""

    lr: float = 1e-6  # learning rate
    warmup_steps: int = 0  # steps of linear warm-up
    beta1: float = 0.9  # AdamW first-moment decay
    beta2: float = 0.98  # AdamW second-moment decay
    weight_decay: float = 0.1  # AdamW weight decay, on matrices only
    max_grad_norm: float = 1.0  # global gradient norm clip
    clip_low: float = 0.2  # ratio clip below 1; never active with one update per batch
    clip_high: float = 0.28  # ratio clip above 1; never active with one update per batch
    tis_cap: float = 2.0  # cap of the token-level truncated importance weight
    designer_weight: float = 1.0  # weight of the designer's loss against the agent's
    balance_loss: float = 0.0  # weight of the experts' balance loss, which is 1 at an even load
    router_z_loss: float = 0.0  # weight of the mean square of logsumexp(router scores)

    def __post_init__(self) -> None:
        require(0 <= self.lr < math.inf, "learner.lr", self.lr, "a finite number, 0 or more")
        require(self.warmup_steps >= 0, "learner.warmup_steps", self.warmup_steps, "0 or more")
        for name in ("beta1", "beta2"):
            require(
                0 <= getattr(self, name) < 1, f"learner.{name}", getattr(self, name), "0 to below 1"
            )
        require(self.weight_decay >= 0, "learner.weight_decay", self.weight_decay, "0 or more")
        require(
            self.max_grad_norm > 0, "learner.max_grad_norm", self.max_grad_norm, "a positive number"
        )
        require(0 < self.clip_low < 1, "learner.clip_low", self.clip_low, "between 0 and 1")
        require(self.clip_high > 0, "learner.clip_high", self.clip_high, "a positive number")
        require(self.tis_cap >= 1, "learner.tis_cap", self.tis_cap, "at least 1")
        for name in ("designer_weight", "balance_loss", "router_z_loss"):
            require(getattr(self, name) >= 0, f"learner.{name}", getattr(self, name), "0 or more")


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


@dataclass(frozen=True)
class TelemetryConfig(Section):
    """What is shown while the run goes on."""

    live: bool = True  # a live table when the terminal can show one; plain lines otherwise


@dataclass(frozen=True)
class WarmstartConfig(Section):
    """Supervised start of a small policy on the environment library (`spade-jax warmstart`)."""

    out: str = "assets/tiny"  # folder for the tokenizer and weights
    steps: int = 2400  # optimiser steps
    rows: int = 8  # packed rows of one step
    row_tokens: int = 1024  # tokens of a packed row; no example may be longer
    lr: float = 2e-3  # peak learning rate
    # share of tokens spent on designs and hints; what it and copy_share leave are expert plays
    design_share: float = 0.65
    copy_share: float = 0.15  # share of tokens spent on exercises in copying words of the prompt
    copy_steps: int = 150  # first steps, of these exercises alone
    plays: int = 6000  # expert plays made before training
    words: int = 2900  # rare words of the corpus that become one piece of the tokenizer each
    init_from: str = ""  # folder with tokenizer and weights to go on from; empty: random weights
    log_steps: int = 20  # steps between two log lines

    def __post_init__(self) -> None:
        require(self.steps >= 1, "warmstart.steps", self.steps, "at least 1")
        require(self.rows >= 1, "warmstart.rows", self.rows, "at least 1")
        require(self.row_tokens >= 16, "warmstart.row_tokens", self.row_tokens, "at least 16")
        require(0 < self.lr < math.inf, "warmstart.lr", self.lr, "a finite positive number")
        for name in ("design_share", "copy_share"):
            share = getattr(self, name)
            require(0 < share < 1, f"warmstart.{name}", share, "between 0 and 1")
        require(
            self.design_share + self.copy_share < 1,
            "warmstart.copy_share",
            self.copy_share,
            f"less than design_share={self.design_share} leaves of 1, so that plays are taught too",
        )
        require(self.plays >= 1, "warmstart.plays", self.plays, "at least 1")
        require(self.copy_steps >= 0, "warmstart.copy_steps", self.copy_steps, "0 or more")
        require(self.words >= 0, "warmstart.words", self.words, "0 or more")
        require(self.log_steps >= 1, "warmstart.log_steps", self.log_steps, "at least 1")


@dataclass(frozen=True)
class Config:
    """One run. Sections are read as `--section.field value` on the command line."""

    run: RunConfig = field(default_factory=RunConfig)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    execution: Execution = field(default_factory=Execution)
    engine: EngineConfig = field(default_factory=EngineConfig)
    designer: DesignerConfig = field(default_factory=DesignerConfig)
    hint: HintConfig = field(default_factory=HintConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    envs: EnvsConfig = field(default_factory=EnvsConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    warmstart: WarmstartConfig = field(default_factory=WarmstartConfig)

    def __post_init__(self) -> None:
        check_fields("config", self)
        check_fields("model", self.model)
        check_fields("execution", self.execution)
        most, tokens = self.model.max_positions, self.engine.context_tokens
        require(
            tokens <= most, "engine.context_tokens", tokens, f"model.max_positions={most} at most"
        )
        if self.engine.context_tokens > self.batch.row_tokens:
            raise ConfigError(
                f"engine.context_tokens={self.engine.context_tokens} exceeds "
                f"batch.row_tokens={self.batch.row_tokens}: "
                f"a full episode would not fit a training row; set batch.row_tokens to "
                f"{self.engine.context_tokens}"
            )
        for name, section in (
            ("designer", self.designer),
            ("hint", self.hint),
            ("agent", self.agent),
        ):
            if section.max_tokens >= self.engine.context_tokens:
                raise ConfigError(
                    f"{name}.max_tokens={section.max_tokens} must be below "
                    f"engine.context_tokens={self.engine.context_tokens}; lower it or raise "
                    f"the context"
                )
        if self.designer.designs % self.active_skills:
            raise ConfigError(
                f"designer.designs={self.designer.designs} must divide by the "
                f"{self.active_skills} skills of a cycle "
                f"(designer.skills_per_cycle); set "
                f"{self.active_skills * (self.designer.designs // self.active_skills + 1)}"
            )

        if self.reward.needs_steps and self.designer.delay_steps == 0:
            raise ConfigError(
                "designer.delay_steps=0 leaves one step of plays, and the micro learning potential "
                f"of reward.kind={self.reward.kind!r}, "
                f"reward.micro_weight={self.reward.micro_weight} compares steps; set "
                "designer.delay_steps to at least 1"
            )

    @property
    def active_skills(self) -> int:
        """Skills in rotation during one cycle."""
        return min(self.designer.skills_per_cycle, len(self.designer.skills))


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionary, in field order; what `config.json` holds."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
