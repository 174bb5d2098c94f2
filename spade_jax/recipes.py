"""The paper's recipes as functions, for config files: its six columns, its controls and ablations,
and `paper_exact`, which turns the reference's behaviour on again where ours differs.

    config = change(games(QWEN3_30B_A3B), memory={"size": 0})

Numbers are those of the reference's launchers. Not in them, so ours, and not measured at scale: the
shapes of sampler and batch, and the limits of the environment pool. Three things differ in every
recipe: plays are spread over two instances of an environment, the hinted arm has as many plays as
the unhinted one, on the same instances (the reference: 16 or 4 against 8 or 16), and the trainer's
log-probabilities are of the temperature that was sampled at. The paper's documents and pools are
the user's to put in place: `corpus.path`, `designer.folder`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from models.config import TransformerConfig
from spade_jax.config import (
    SKILLS,
    AgentConfig,
    BatchConfig,
    Config,
    CorpusConfig,
    DesignerConfig,
    EngineConfig,
    EnvsConfig,
    HintConfig,
    LearnerConfig,
    MemoryConfig,
    RewardConfig,
    RunConfig,
)
from spade_jax.roles_config import TOOL_SKILLS, UNGROUNDED_PROMPTS

CONTEXT = 32_768
LATER_CONTEXT = 49_152
TWO_SKILLS = ("Mathematical Reasoning", "Pattern Recognition")
INSTANCES = 2  # of an environment, that a step's plays are spread over


class Policy(NamedTuple):
    """A public checkpoint, and how the recipes train it."""

    folder: str  # where `spade-jax convert` is expected to have put it
    model: TransformerConfig
    thinking: bool
    games_kl: float


def _qwen3(**shape: Any) -> TransformerConfig:
    """What the three have in common, in their public config.json."""
    common = {"vocab_size": 151_936, "num_heads": 32, "head_dim": 128, "norm_eps": 1e-6}
    dense = {"family": "qwen3", "num_experts": 1, "experts_per_token": 1}
    return TransformerConfig(
        **{**common, **dense, "scale_embedding": False, "qk_norm": True, **shape}
    )


QWEN3_4B = Policy(
    "weights/Qwen3-4B-Instruct-2507",
    _qwen3(
        num_layers=36,
        embed=2560,
        num_kv_heads=8,
        mlp=9728,
        rope_theta=5_000_000.0,
        max_positions=262_144,
    ),
    thinking=False,
    games_kl=0.0,
)
QWEN3_8B = Policy(
    "weights/Qwen3-8B",
    _qwen3(
        num_layers=36,
        embed=4096,
        num_kv_heads=8,
        mlp=12_288,
        rope_theta=1_000_000.0,
        tied_head=False,
        max_positions=40_960,
    ),
    thinking=True,
    games_kl=0.005,
)
QWEN3_30B_A3B = Policy(
    "weights/Qwen3-30B-A3B-Instruct-2507",
    _qwen3(
        family="qwen3_moe",
        num_layers=48,
        embed=2048,
        num_kv_heads=4,
        mlp=768,
        num_experts=128,
        experts_per_token=8,
        rope_theta=10_000_000.0,
        tied_head=False,
        max_positions=262_144,
    ),
    thinking=False,
    games_kl=0.0,
)

SAMPLING: dict[str, Any] = {"top_p": 0.95, "top_k": 20}


def change(config: Config, **sections: Mapping[str, Any]) -> Config:
    """The config with other values: a dictionary of fields for each section that changes."""
    changed = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in sections.items()
    }
    return dataclasses.replace(config, **changed)


def games(policy: Policy) -> Config:
    """The games setting: 24 environments of three skills every 4 steps, 8 plays of each a step."""
    return Config(
        run=RunConfig(init_from=policy.folder, steps=400, cycle_steps=4, checkpoint_steps=16),
        model=policy.model,
        engine=EngineConfig(
            slots=64,
            queue=64,
            context_tokens=CONTEXT,
            kv_tokens=2**18,
            piece_tokens=128,
            prefill_tokens=4096,
        ),
        designer=DesignerConfig(
            prompt="corpus",
            designs=24,
            attempts=5,
            skills=SKILLS,
            skills_per_cycle=3,
            difficulty="medium",
            document_words=6000,
            temperature=0.6,
            max_tokens=20_000 if policy.thinking else 16_384,
            delay_steps=4,
            thinking=policy.thinking,
            **SAMPLING,
        ),
        hint=HintConfig(temperature=0.3, max_tokens=4096, **SAMPLING),
        agent=AgentConfig(
            temperature=0.6,
            max_tokens=8192,
            max_turns=25,
            seeds=INSTANCES,
            plays=8 // INSTANCES,
            max_observation_tokens=8192,
            thinking=policy.thinking,
            **SAMPLING,
        ),
        reward=RewardConfig(kind="blend", anchor_weight=0.6, regret_weight=0.4),
        batch=BatchConfig(row_tokens=CONTEXT, device_tokens=CONTEXT),
        learner=LearnerConfig(
            lr=1e-6,
            kl_coef=policy.games_kl,
            weight_decay=0.1,
            beta1=0.9,
            beta2=0.98,
            max_grad_norm=1.0,
            clip_low=0.2,
            clip_high=0.28,
            tis_cap=2.0,
        ),
        envs=EnvsConfig(max_workers=32, pool_memory_bytes=2**34),
        corpus=CorpusConfig(path="corpus/games.jsonl", max_words=6000),
        memory=MemoryConfig(size=200, shows="summary"),
    )


def tools(policy: Policy) -> Config:
    """The tool-use setting: all six skills in every cycle, which lasts 8 steps; the policy judges
    whether a task can be solved, and truncated plays are not trained on.
    """
    return change(
        games(policy),
        run={"cycle_steps": 8},
        designer={
            "prompt": "tools",
            "skills": TOOL_SKILLS,
            "skills_per_cycle": 6,
            "document_words": 4000,
            "delay_steps": 8,
            "judge": True,
            "judge_max_tokens": 16_384,
        },
        hint={"max_tokens": 2048},
        reward={"compact_filter": True},
        learner={"kl_coef": 0.005},
        corpus={"path": "corpus/tools.jsonl", "max_words": 4000},
    )


def tools_4b() -> Config:
    """The smallest policy's tool-use recipe, which is unlike the others: 16 tasks played 16 times
    for 32 steps, and the regret alone as the designer's reward.
    """
    return change(
        tools(QWEN3_4B),
        run={"steps": 500, "cycle_steps": 32},
        designer={"designs": 16, "delay_steps": 32},
        hint={"max_tokens": 512},
        agent={"plays": 16 // INSTANCES},
        reward={"kind": "regret"},
    )


def games_4b_later() -> Config:
    """The later phase of the smallest policy's games run: a longer context and an easier band. When
    to begin it is not published; start it from an export of the earlier run.
    """
    return change(
        games(QWEN3_4B),
        engine={"context_tokens": LATER_CONTEXT},
        batch={"row_tokens": LATER_CONTEXT, "device_tokens": LATER_CONTEXT},
        reward={"band_low": 0.2, "band_high": 0.4, "band_ramp": 0.2},
    )


def without_corpus(config: Config) -> Config:
    """Games that no document grounds, by the prompt that needs none."""
    return change(config, designer={"prompt": "multi_turn"}, corpus={"enabled": False})


def two_skills(config: Config) -> Config:
    """Games of two skills instead of six, both in every cycle."""
    return change(config, designer={"skills": TWO_SKILLS, "skills_per_cycle": 2})


def fixed_pool(config: Config) -> Config:
    """The agent alone, on 24 programs a step of a folder; each once before any comes again."""
    return change(
        config,
        run={"cycle_steps": 1},
        designer={
            "source": "folder",
            "folder": "pools/fixed",
            "gates": "public",
            "train": False,
            "delay_steps": 0,
            "thinking": False,
        },
        reward={"kind": "solve_rate"},
        corpus={"enabled": False},
        memory={"size": 0},
    )


def other_designer(config: Config) -> Config:
    """Designs by another model, which does not learn, from the same documents and memory: asked
    through an endpoint, and paid for by whoever has the key in OPENAI_API_KEY.
    """
    return change(
        config,
        designer={"source": "endpoint", "train": False},
        endpoint={
            "url": "https://api.openai.com/v1",
            "model": "gpt-5.5",
            "key_env": "OPENAI_API_KEY",
            "sampling": False,  # it takes no temperature
        },
    )


def rlve(config: Config) -> Config:
    """The agent alone, on 16 problems of RLVE a step with 16 plays of one instance each, at a
    difficulty that follows the policy.
    """
    return change(
        fixed_pool(config),
        designer={
            "source": "rlve",
            "folder": "",
            "gates": "all",
            "designs": 16,
            "window_win_frac": 0.9,
            "window_plays": 128,
            "window_width": 4,
        },
        agent={"temperature": 1.0, "seeds": 1, "plays": 16},
        learner={"kl_coef": 0.0},
    )


def rlve_by_potential(config: Config) -> Config:
    """As `rlve`, but at one difficulty, with half of a step's problems those on which the policy's
    returns move most.
    """
    return change(rlve(config), designer={"controller": "learning_potential"})


def paper_exact(config: Config) -> Config:
    """The config with the reference's behaviour where ours differs and a setting can restore it.

        reward    anchor of the mean return; difference of the arms' means, not shrunk; refused
                  designs earn nothing, hangs are punished by the plain regret alone; groups by
                  environment; the designer's rewards centred and scaled by up to 50; losses
                  divided by all episodes and designs of a step, masked ones too
        learner   every sequence weighs alike, groups without contrast count; weights of tokens
                  up to 2 between trainer and sampler, whose log-probabilities know of no top-p
                  and top-k
        prompts   documents drawn by chance; no thinking about them; the first 2,000 characters of
                  programs from the memory, whose records stay as they were first written, and
                  near-duplicates among them
        envs      near-duplicates are taken; so is all that `envs.max_probe_win_frac` limits:
                  programs that are won without thought or show the answer at once, hints that win
                  for a player who only repeats them, and hints that name the winning actions

    No setting restores: unseeded and unequal arms, failed hinted plays that count as 0, programs
    without a proof that they can be won, hints of any length or form or with a whole solution of
    three words or more, dropped and doubled plays, and training at another temperature than was
    sampled at.
    """
    grounded = config.corpus.enabled and config.designer.prompt not in UNGROUNDED_PROMPTS
    return change(
        config,
        reward={
            "anchor_on": "mean_return",
            "regret_estimator": "reference",
            "regret_caution": "none",
            "punish": "hangs" if config.reward.kind == "regret" else "none",
            "agent_group": "environment",
            "agent_norm": "mean_std",
            "designer_norm": "mean",
            "designer_scale": "reference",
        },
        learner={
            "loss": "grpo",
            "reduction": "sequence",
            "zero_variance": "keep",
            "tis": "token",
            "tis_cap": 2.0,
            "tis_logprobs": "untruncated",
            "kl_kind": "k3",
            "minibatches": 1,
            "epochs": 1,
        },
        corpus={"draws": "independent", "sampling": "uniform"},
        designer={"thinking": False, "thinking_tokens": 0} if grounded else {},
        memory={"shows": "excerpt", "avoid_margin": 0.05, "refresh": False},
        diversity={"duplicates": "allow"},
        envs={"max_probe_win_frac": 1.0},
    )
