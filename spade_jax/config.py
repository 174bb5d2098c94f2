"""Every setting of a run, as frozen dataclasses: one section per concern, one name per field,
validated on construction.

Presets live in `configs/` as Python; nothing here reads files, flags or environment variables.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

from models.config import TransformerConfig
from models.execution import Execution
from spade_jax.engine_config import EngineConfig
from spade_jax.envs_config import EnvsConfig
from spade_jax.errors import ConfigError
from spade_jax.learner_config import BatchConfig, LearnerConfig, check_learner
from spade_jax.reward_config import RewardConfig
from spade_jax.roles_config import (
    SKILLS,
    AgentConfig,
    CorpusConfig,
    DesignerConfig,
    Difficulty,
    DiversityConfig,
    EndpointConfig,
    HintConfig,
    MemoryConfig,
    check_endpoint,
)
from spade_jax.settings import Section, check_fields, require

SCHEMES = ("gs", "s3", "az")
"""Buckets that a run folder and compiled programs can be in."""

__all__ = [
    "SKILLS",
    "AgentConfig",
    "BatchConfig",
    "Config",
    "CorpusConfig",
    "DesignerConfig",
    "Difficulty",
    "DiversityConfig",
    "EndpointConfig",
    "EngineConfig",
    "EnvsConfig",
    "HintConfig",
    "LearnerConfig",
    "MemoryConfig",
    "MeshConfig",
    "RewardConfig",
    "RunConfig",
    "TelemetryConfig",
    "WarmstartConfig",
    "to_dict",
]


@dataclass(frozen=True)
class RunConfig(Section):
    """The run as a whole."""

    dir: str = "runs/tiny"  # run folder, or gs://BUCKET/PATH; holds all that a run leaves
    spool_dir: str = "~/.cache/spade_jax/spool"  # local folder in which one in a bucket is written
    seed: int = 0  # every random choice of the run is derived from it
    steps: int = 12  # optimiser steps
    cycle_steps: int = 4  # steps between two designer generations
    init_from: str = ""  # folder with the tokenizer and starting weights
    checkpoint_steps: int = 1  # steps between two checkpoints
    checkpoint_minutes: float = 0.0  # and when a step ends so long after the last one; 0: by steps
    keep_checkpoints: int = 2  # newest checkpoints kept
    keep_every_steps: int = 0  # older ones kept too: those after every so many steps; 0: none
    # admit what environments answered by the round that is fixed for it, not as it comes: a second
    # run is then the same to the bit, and a slow environment delays the others
    deterministic: bool = True
    # where compiled programs are kept for the next run, a folder or gs://BUCKET/PATH, unless
    # JAX_COMPILATION_CACHE_DIR says it; empty: nowhere
    compile_cache: str = "~/.cache/spade_jax/compiled"
    # asked every second whether this machine is about to be taken, which stops the run as SIGTERM
    # does: http://metadata.google.internal/computeMetadata/v1/instance/preempted; empty: not asked
    preemption_url: str = ""
    chat_template: str = "auto"  # auto: what the checkpoint says; else spade, chatml, qwen3, llama3

    def __post_init__(self) -> None:
        require(bool(self.dir), "run.dir", self.dir, "a folder name")
        for name in ("dir", "compile_cache"):
            folder = getattr(self, name)
            known = "://" not in folder or folder.partition("://")[0] in SCHEMES
            require(known, f"run.{name}", folder, f"a folder, or a URL of {SCHEMES}")
        url = self.preemption_url
        asked = not url or url.startswith(("http://", "https://"))
        require(asked, "run.preemption_url", url, "an address that starts with http://, or nothing")
        require(bool(self.spool_dir), "run.spool_dir", self.spool_dir, "a folder name")
        require(0 <= self.seed < 2**31, "run.seed", self.seed, "0 to 2147483647")
        require(self.steps >= 1, "run.steps", self.steps, "at least 1")
        require(self.cycle_steps >= 1, "run.cycle_steps", self.cycle_steps, "at least 1")
        require(
            self.checkpoint_steps >= 1, "run.checkpoint_steps", self.checkpoint_steps, "at least 1"
        )
        minutes = self.checkpoint_minutes
        require(0 <= minutes < math.inf, "run.checkpoint_minutes", minutes, "0 or more minutes")
        require(
            self.keep_checkpoints >= 1, "run.keep_checkpoints", self.keep_checkpoints, "at least 1"
        )
        require(
            self.keep_every_steps >= 0, "run.keep_every_steps", self.keep_every_steps, "0 or more"
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
class TelemetryConfig(Section):
    """What is shown while the run goes on."""

    live: bool = True  # a live table when the terminal can show one; plain lines otherwise
    profile_steps: int = 0  # steps, from the second on, of which the run folder gets a trace

    def __post_init__(self) -> None:
        require(self.profile_steps >= 0, "telemetry.profile_steps", self.profile_steps, "0 or more")


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
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    hint: HintConfig = field(default_factory=HintConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    envs: EnvsConfig = field(default_factory=EnvsConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    diversity: DiversityConfig = field(default_factory=DiversityConfig)
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
            elsewhere = name == "designer" and self.designer.source == "endpoint"
            if section.max_tokens >= self.engine.context_tokens and not elsewhere:
                raise ConfigError(
                    f"{name}.max_tokens={section.max_tokens} must be below "
                    f"engine.context_tokens={self.engine.context_tokens}; lower it or raise "
                    f"the context"
                )
        check_endpoint(self.designer, self.endpoint)
        if self.designer.writes and self.designer.designs < self.active_skills:
            raise ConfigError(
                f"designer.designs={self.designer.designs} is less than the {self.active_skills} "
                "skills of a cycle (designer.skills_per_cycle), and some would have none; set it "
                f"to at least {self.active_skills}"
            )
        if self.designer.source == "rlve" and self.reward.needs_regret:
            raise ConfigError(
                f"reward.kind={self.reward.kind!r} needs hints, and the problems of "
                "designer.source='rlve' have none; set reward.kind to 'solve_rate'"
            )
        designer = self.designer
        grounded = designer.writes and designer.prompt == "corpus"
        if grounded and not self.corpus.enabled:
            raise ConfigError(
                'designer.prompt="corpus" is about a document, but corpus.enabled=False gives it '
                'none; set designer.prompt to "multi_turn", or leave the corpus on'
            )
        if self.designer.delay_steps > self.run.steps:
            raise ConfigError(
                f"designer.delay_steps={self.designer.delay_steps} is longer than the run of "
                f"run.steps={self.run.steps}: no designer group would come due in it; set "
                f"designer.delay_steps to at most {self.run.steps}, or raise run.steps"
            )
        check_learner(
            self.learner,
            self.reward.agent_norm,
            self.reward.designer_norm,
            self.model.num_experts,
            self.execution.param_dtype,
        )
        if self.learner.router_replay and not self.engine.routing:
            raise ConfigError(
                "learner.router_replay=True replays what the sampler's routers chose, but "
                "engine.routing=False does not keep them; set engine.routing to True"
            )
        run, delay = self.run, self.designer.delay_steps
        # an environment is in play until the next cycle, and counts until its design is due
        if self.reward.needs_steps and min(run.steps, run.cycle_steps, delay + 1) < 2:
            raise ConfigError(
                f"run.steps={run.steps}, run.cycle_steps={run.cycle_steps} and "
                f"designer.delay_steps={delay} leave one step of plays, and the micro learning "
                f"potential of reward.kind={self.reward.kind!r}, "
                f"reward.micro_weight={self.reward.micro_weight} compares steps; set run.steps and "
                "run.cycle_steps to at least 2 and designer.delay_steps to at least 1"
            )

    @property
    def active_skills(self) -> int:
        """Skills in rotation during one cycle."""
        return min(self.designer.skills_per_cycle, len(self.designer.skills))


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionary, in field order; what `config.json` holds."""
    return json.loads(json.dumps(dataclasses.asdict(config)))
