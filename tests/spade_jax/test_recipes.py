"""The presets: that each builds, holds the numbers of the paper's recipe, and by `paper_exact`
gives the reference's advantages. The table is written by hand from the reference's launchers.
"""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from helpers import make_episode, make_trajectory, pack_groups
from models import hf
from spade_jax import recipes, scoring
from spade_jax.cli import load_config
from spade_jax.config import Config
from spade_jax.errors import ConfigError
from spade_jax.recipes import change, paper_exact
from spade_jax.roles_config import SKILLS, TOOL_SKILLS
from spade_jax.types import Outcome, Role

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DOCS = CONFIGS.parent / "docs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))
G30 = "qwen3_30b_a3b_games"

TABLE = {
    "run.steps": (400, 400, 400, 500, 400, 400),
    "designer.designs": (24, 24, 24, 16, 24, 24),
    "plays": (8, 8, 8, 16, 8, 8),  # of an environment in a step
    "run.cycle_steps": (4, 4, 4, 32, 8, 8),
    "designer.delay_steps": (4, 4, 4, 32, 8, 8),
    "active_skills": (3, 3, 3, 6, 6, 6),
    "reward.kind": ("blend", "blend", "blend", "regret", "blend", "blend"),
    "reward.anchor_weight": (0.6,) * 6,
    "reward.regret_weight": (0.4,) * 6,
    "learner.kl_coef": (0, 0.005, 0, 0.005, 0.005, 0.005),
    "designer.temperature": (0.6,) * 6,
    "agent.temperature": (0.6,) * 6,
    "designer.max_tokens": (16_384, 20_000, 16_384, 16_384, 20_000, 16_384),
    "hint.max_tokens": (4096, 4096, 4096, 512, 2048, 2048),
    "designer.thinking": (False, True, False, False, True, False),
    "agent.thinking": (False, True, False, False, True, False),
    "designer.judge": (False, False, False, True, True, True),
    "reward.compact_filter": (False, False, False, True, True, True),
    "designer.document_words": (6000, 6000, 6000, 4000, 4000, 4000),
    "corpus.max_words": (6000, 6000, 6000, 4000, 4000, 4000),
    # common to all
    "designer.top_p": (0.95,) * 6,
    "designer.top_k": (20,) * 6,
    "agent.top_p": (0.95,) * 6,
    "agent.top_k": (20,) * 6,
    "agent.max_tokens": (8192,) * 6,
    "agent.max_turns": (25,) * 6,
    "engine.context_tokens": (32_768,) * 6,
    "designer.difficulty": ("medium",) * 6,
    "designer.attempts": (5,) * 6,
    "hint.temperature": (0.3,) * 6,
    "hint.source": ("policy",) * 6,
    "memory.size": (200,) * 6,
    "reward.tracker_fast": (0.98,) * 6,
    "reward.tracker_slow": (0.85,) * 6,
    "reward.regret_scale": (0.15,) * 6,
    "reward.agent_norm": ("mean_std",) * 6,
    "run.checkpoint_steps": (16,) * 6,
    "learner.lr": (1e-6,) * 6,
    "learner.weight_decay": (0.1,) * 6,
    "learner.beta1": (0.9,) * 6,
    "learner.beta2": (0.98,) * 6,
    "learner.max_grad_norm": (1.0,) * 6,
    "learner.clip_low": (0.2,) * 6,
    "learner.clip_high": (0.28,) * 6,
    "learner.tis_cap": (2.0,) * 6,
    "corpus.enabled": (True,) * 6,
}
COLUMNS = [
    f"qwen3_{size}_{setting}" for setting in ("games", "tools") for size in ("4b", "8b", "30b_a3b")
]


def preset(name: str) -> Config:
    return load_config(CONFIGS / f"{name}.py")


def value(config: Config, name: str):
    if name == "plays":
        return config.agent.seeds * config.agent.plays
    if name == "active_skills":
        return config.active_skills
    section, field = name.split(".")
    return getattr(getattr(config, section), field)


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_builds_and_has_a_run_folder_of_its_own(name):
    config = preset(name)
    assert config.run.dir == f"runs/{name}"
    assert config.run.init_from


@pytest.mark.parametrize(("column", "name"), list(enumerate(COLUMNS)))
def test_a_column_holds_the_numbers_of_the_table(column, name):
    config = preset(name)
    assert {row: value(config, row) for row in TABLE} == {
        row: values[column] for row, values in TABLE.items()
    }
    games = name.endswith("games")
    assert config.designer.skills == (SKILLS if games else TOOL_SKILLS)
    assert config.designer.prompt == ("corpus" if games else "tools")


def differences(name: str, base: str) -> dict:
    """The settings in which a preset differs from another, its run folder aside."""
    mine, other = preset(name), preset(base)
    return {
        f"{section.name}.{field.name}": getattr(getattr(mine, section.name), field.name)
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(getattr(mine, section.name))
        if f"{section.name}.{field.name}" != "run.dir"
        and getattr(getattr(mine, section.name), field.name)
        != getattr(getattr(other, section.name), field.name)
    }


@pytest.mark.parametrize(
    ("name", "base", "expected"),
    [
        (f"{G30}_no_memory", G30, {"memory.size": 0}),
        (f"{G30}_no_training", G30, {"designer.train": False}),
        (
            f"{G30}_no_training_no_memory",
            G30,
            {"designer.train": False, "memory.size": 0},
        ),
        (
            f"{G30}_initial_designer",
            G30,
            {"designer.train": False, "designer.policy": "initial"},
        ),
        (
            f"{G30}_endpoint",
            G30,
            {
                "designer.train": False,
                "designer.source": "endpoint",
                "endpoint.url": "https://api.openai.com/v1",
                "endpoint.model": "gpt-5.5",
                "endpoint.key_env": "OPENAI_API_KEY",
                "endpoint.sampling": False,
            },
        ),
        (f"{G30}_no_corpus", G30, {"designer.prompt": "multi_turn", "corpus.enabled": False}),
        (
            f"{G30}_two_skills",
            G30,
            {
                "designer.skills": ("Mathematical Reasoning", "Pattern Recognition"),
                "designer.skills_per_cycle": 2,
            },
        ),
        (f"{G30}_learning_potential", G30, {"reward.kind": "learning_potential"}),
        (f"{G30}_solve_rate", G30, {"reward.kind": "solve_rate"}),
        ("qwen3_8b_games_regret", "qwen3_8b_games", {"reward.kind": "regret"}),
        (
            "qwen3_4b_rlve_potential",
            "qwen3_4b_rlve",
            {"designer.controller": "learning_potential"},
        ),
        (
            "qwen3_4b_games_later",
            "qwen3_4b_games",
            {
                "engine.context_tokens": 49_152,
                "batch.row_tokens": 49_152,
                "batch.device_tokens": 49_152,
                "reward.band_low": 0.2,
                "reward.band_high": 0.4,
                "reward.band_ramp": 0.2,
            },
        ),
    ],
)
def test_an_ablation_differs_in_what_it_is_named_for_alone(name, base, expected):
    assert differences(name, base) == expected


@pytest.mark.parametrize(("size", "kl"), [("4b", 0), ("8b", 0.005), ("30b_a3b", 0)])
def test_the_controls_train_the_agent_alone(size, kl):
    pool, rlve = preset(f"qwen3_{size}_fixed_pool"), preset(f"qwen3_{size}_rlve")
    for config in (pool, rlve):
        assert config.run.steps == 400 and config.run.cycle_steps == 1
        assert not config.designer.train and not config.reward.needs_regret
        assert config.agent.thinking == (size == "8b")
    assert (pool.designer.source, pool.designer.gates) == ("folder", "public")
    assert pool.designer.designs == 24
    assert pool.agent.seeds * pool.agent.plays == 8
    assert (pool.agent.temperature, pool.learner.kl_coef) == (0.6, kl)
    assert rlve.designer.source == "rlve" and rlve.designer.designs * rlve.agent.plays == 256
    assert (rlve.agent.temperature, rlve.learner.kl_coef, rlve.agent.seeds) == (1.0, 0, 1)
    window = rlve.designer
    assert (window.window_win_frac, window.window_plays, window.window_width) == (0.9, 128, 4)


# config.json of Qwen3-4B-Instruct-2507, Qwen3-8B and Qwen3-30B-A3B-Instruct-2507
COMMON = {
    "head_dim": 128,
    "hidden_act": "silu",
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "rope_scaling": None,
    "attention_bias": False,
}
DENSE = {"model_type": "qwen3", "num_hidden_layers": 36, "num_key_value_heads": 8}
PUBLIC = [
    (
        recipes.QWEN3_4B,
        DENSE
        | {"hidden_size": 2560, "intermediate_size": 9728, "rope_theta": 5_000_000}
        | {"max_position_embeddings": 262_144, "tie_word_embeddings": True},
    ),
    (
        recipes.QWEN3_8B,
        DENSE
        | {"hidden_size": 4096, "intermediate_size": 12_288, "rope_theta": 1_000_000}
        | {"max_position_embeddings": 40_960, "tie_word_embeddings": False},
    ),
    (
        recipes.QWEN3_30B_A3B,
        {"model_type": "qwen3_moe", "num_hidden_layers": 48, "num_key_value_heads": 4}
        | {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | {"rope_theta": 10_000_000, "max_position_embeddings": 262_144}
        | {"tie_word_embeddings": False},
    ),
]


@pytest.mark.parametrize(("policy", "public"), PUBLIC)
def test_the_models_are_what_a_conversion_of_the_public_checkpoint_gives(policy, public):
    assert hf.from_hf(COMMON | public, "config.json") == policy.model


def plays_of(config: Config, wins: int):
    """One step's plays of one environment, so many of them won."""
    return [
        make_episode(
            seed=seed,
            play_index=index,
            episode_return=float(seed * config.agent.plays + index < wins),
            trajectory=make_trajectory(),
        )
        for seed in range(config.agent.seeds)
        for index in range(config.agent.plays)
    ]


@pytest.mark.parametrize("name", [name for name in COLUMNS if value(preset(name), "plays") == 8])
def test_one_win_in_eight_by_the_reference(name):
    config = preset(f"{name}_exact")
    (group,), _ = scoring.agent_groups(config.reward, plays_of(config, 1))
    # mean 1/8, population std sqrt(7)/8: 7/sqrt(7) and -1/sqrt(7)
    assert group.advantages[0] == pytest.approx(2.6458, abs=1e-3)
    assert group.advantages[1:] == pytest.approx(np.full(7, -0.3780), abs=1e-3)


@pytest.mark.parametrize(
    ("name", "scale"), list(zip(COLUMNS, [32, 32, 32, 50, 50, 50], strict=True))
)
def test_the_designers_scale_by_the_reference(name, scale):
    config = preset(f"{name}_exact")
    designs = config.designer.designs
    episodes = plays_of(config, 1) * designs
    judged = scoring.Judged([], {"a": [0.0] * designs}, 0, [], [])
    assert scoring.balance(config, [], judged, episodes)[2] == scale
    # ours balances the roles by the means of their losses
    assert scoring.balance(preset(name), [], judged, episodes)[2] is None


@pytest.mark.parametrize(
    ("name", "overlong", "share"),
    [
        ("qwen3_4b_tools_exact", "train", 1 / 16),
        ("qwen3_4b_tools_exact", "mask", 1 / 16),
        ("qwen3_4b_tools", "train", 1 / 12),
    ],
)
def test_the_reference_divides_by_masked_episodes_too(name, overlong, share):
    """A quarter of the plays is cut, and masked by the compact filter or as overlong. By the
    reference, which divides by the batch, the others weigh no more for it; by ours they share the
    whole weight of the role.
    """
    config = change(preset(name), learner={"overlong": overlong})
    played = plays_of(config, 1)
    for index in range(12, 16):
        trajectory = make_trajectory(truncated=True)
        outcome = Outcome.FINISHED if overlong == "mask" else Outcome.TURN_LIMIT
        played[index] = dataclasses.replace(played[index], outcome=outcome, trajectory=trajectory)
    agents, _ = scoring.agent_groups(config.reward, played, keep_flat=True)
    nothing = scoring.Judged([], {}, 0, [], [])
    groups, weights, _ = scoring.balance(config, agents, nothing, played)
    rows = pack_groups(groups, weights=weights, learner=config.learner).rows
    assert len(played) == 16 and rows.loss_mask.sum() == 12 * 2
    assert rows.weights[rows.loss_mask] == pytest.approx(share / 2)


def test_paper_exact_restores_what_a_setting_can():
    config = paper_exact(preset(G30))
    assert differences(f"{G30}_exact", G30) == {
        "reward.anchor_on": "mean_return",
        "reward.regret_estimator": "reference",
        "reward.regret_caution": "none",
        "reward.punish": "none",
        "reward.agent_group": "environment",
        "reward.designer_norm": "mean",
        "reward.designer_scale": "reference",
        "learner.reduction": "sequence",
        "learner.zero_variance": "keep",
        "learner.tis_logprobs": "untruncated",
        "corpus.draws": "independent",
        "memory.shows": "excerpt",
        "memory.avoid_margin": 0.05,
        "memory.refresh": False,
        "diversity.duplicates": "allow",
        "envs.max_probe_win_frac": 1.0,
    }
    # its prompts about a document do not think, the others do
    assert not paper_exact(preset("qwen3_8b_tools")).designer.thinking
    thinker = change(preset("qwen3_8b_games"), designer={"thinking_tokens": 9})
    assert not paper_exact(thinker).designer.thinking
    assert (
        paper_exact(recipes.without_corpus(thinker)).designer
        == change(thinker, designer={"prompt": "multi_turn"}).designer
    )
    # hangs are punished by the plain regret alone
    assert config.reward.punish == "none"
    assert preset("qwen3_4b_tools_exact").reward.punish == "hangs"


def test_the_page_of_differences_names_what_paper_exact_sets():
    """Each setting of the page with its value, and no more: of a thinking policy all change."""
    weaknesses, *sections = (DOCS / "differences.md").read_text().split("\n## ")
    (others,) = (text for text in sections if text.startswith("Other differences"))
    cells = []
    for text, column, width in ((weaknesses, 3, 5), (others, 2, 3)):
        rows = [line.strip("| ").split(" | ") for line in text.split("\n")]
        cells += [row[column] for row in rows if len(row) == width]
    named = re.findall(r"`([a-z]+\.[a-z_]+)(?:=([^`]*))?`", "\n".join(cells))
    changed = differences("qwen3_8b_games_exact", "qwen3_8b_games")
    assert set(named) == {(name, str(value)) for name, value in changed.items()}


def test_without_designer_training_only_the_agent_has_groups():
    config = change(Config(), designer={"train": False}, reward={"designer_scale": "reference"})
    judged = scoring.Judged([], {"a": [0.0, 1.0]}, 0, [], [])
    agents, _ = scoring.agent_groups(config.reward, plays_of(config, 1))
    groups, weights, scale = scoring.balance(config, agents, judged, plays_of(config, 1))
    assert {group.role for group in groups} == {Role.AGENT}
    assert scale is None and weights[Role.DESIGNER] == 0


@pytest.mark.parametrize(
    "reward", [{"kind": "micro_learning_potential"}, {"micro_weight": 0.1}], ids=str
)
def test_a_gain_over_steps_needs_two_of_them(reward):
    """With one step of plays no design would ever be scored, and the run would not say so."""
    enough = {"steps": 2, "cycle_steps": 2}
    assert change(Config(), run=enough, designer={"delay_steps": 1}, reward=reward)
    for run, delay in (
        (enough, 0),
        (enough | {"cycle_steps": 1}, 1),
        (enough | {"cycle_steps": 1}, 2),
        ({"steps": 1, "cycle_steps": 4}, 1),
    ):
        with pytest.raises(ConfigError, match=rf"delay_steps={delay} leave one step") as caught:
            change(Config(), run=run, designer={"delay_steps": delay}, reward=reward)
        assert "\n" not in str(caught.value)
        change(Config(), run=run, designer={"delay_steps": delay})  # other rewards need one


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "folder", "train": False}, "designer.folder"),
        ({"source": "folder", "folder": "pool"}, "designer.train"),
        ({"source": "folder", "folder": "pool", "train": False, "judge": True}, "designer.judge"),
        ({"folder": "pool"}, "designer.folder"),
        ({"gates": "none"}, "designer.gates"),
        ({"problems": ("A",)}, "designer.problems"),
        ({"source": "rlve", "train": False, "problems": ("A", "A")}, "each problem once"),
        ({"policy": "initial"}, "designer.train"),
        (
            {"policy": "initial", "train": False, "source": "folder", "folder": "pool"},
            "designer.policy",
        ),
        ({"source": "rlve", "train": False}, "reward.kind='blend' needs hints"),
        ({"window_win_frac": 0.0}, "designer.window_win_frac"),
        ({"controller": "learning_potential"}, "designer.controller"),
        ({"potential_slow": 0.4}, "designer.potential_slow"),
        ({"problem_difficulty": 21}, "designer.problem_difficulty"),
        ({"window_plays": 0}, "designer.window_plays"),
        ({"designs": 2}, "designer.designs=2 is less than the 3 skills"),
    ],
)
def test_what_contradicts_itself_is_refused_in_one_line(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        change(Config(), designer=settings)
    assert "\n" not in str(caught.value)
