"""A cycle with a checkpoint of another family: its tokenizer, its chat format, a policy of its
shape.
"""

import asyncio
import dataclasses
import random
from pathlib import Path

import jax
import numpy as np
import pytest

from models.config import TransformerConfig
from models.execution import PLAIN
from models.sharding import build_mesh
from models.tokenizer import load_tokenizer
from models.transformer import init_params
from spade_jax import selfplay, train
from spade_jax.config import AgentConfig, Config, DesignerConfig, EngineConfig
from spade_jax.envs.library import FAMILIES
from spade_jax.errors import ConfigError
from spade_jax.types import Arm, Environment, EnvironmentSource, Verdict

TOKENIZER = Path(__file__).resolve().parents[1] / "golden" / "chat" / "qwen3"
MODEL = TransformerConfig(  # rows to spare in the embedding, as in the real ones
    vocab_size=800, num_layers=1, embed=32, num_heads=2, num_kv_heads=1, head_dim=16, mlp=32,
    num_experts=1, experts_per_token=1, qk_norm=True, scale_embedding=False,
)  # fmt: skip
CONFIG = Config(
    model=MODEL,
    batch=dataclasses.replace(Config().batch, row_tokens=1536),
    engine=EngineConfig(slots=8, queue=0, context_tokens=1536, prefill_tokens=256),
    designer=DesignerConfig(designs=3, max_tokens=24),
    agent=AgentConfig(seeds=1, plays=2, max_turns=2, max_tokens=48, max_observation_tokens=1024),
)


def environment() -> Environment:
    family = FAMILIES[0]
    draw = family.draw(random.Random(0), ("amber", "basalt", "cobalt", "dolmen"), "easy")
    source = EnvironmentSource(draw.program, family.skill, "easy", "d0")
    return Environment(source, draw.hint, 0, "design-0", Verdict(True))


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [False, True])
def test_a_cycle_speaks_the_chat_format_of_the_checkpoint(thinking):
    settings = dataclasses.replace(
        CONFIG, agent=dataclasses.replace(CONFIG.agent, thinking=thinking)
    )
    tokenizer = load_tokenizer(TOKENIZER)
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    with asyncio.Runner() as runner:
        stage = train.make_stage(settings, runner, mesh, PLAIN, tokenizer)
        try:
            stage.engine.load(init_params(MODEL, jax.random.key(0), mesh), version=0)
            designs = selfplay.design(stage, 0)
            stage.curriculum.environments = [environment()]
            episodes = selfplay.play(stage, 0)
        finally:
            runner.run(stage.pool.close())
    end = tokenizer.control("<|im_end|>")
    closing = tokenizer.control("</think>")
    for design in designs:
        prompt = design.trajectory.tokens[~design.trajectory.loss_mask].tolist()
        assert prompt.count(end) == 1 and prompt.count(closing) == 1  # designers do not think here
    assert {episode.arm for episode in episodes} <= set(Arm) and episodes
    for episode in episodes:
        assert episode.trajectory is not None and not episode.outcome.void
        seen = episode.trajectory.tokens[~episode.trajectory.loss_mask].tolist()
        assert seen[0] == tokenizer.control("<|im_start|>")
        assert seen.count(closing) == (0 if thinking else len(episode.turns))
        assert np.isfinite(episode.trajectory.sampler_logprobs).all()


def test_what_does_not_fit_the_checkpoint_is_said_at_the_start():
    tokenizer = load_tokenizer(TOKENIZER)
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])

    def start(config):
        with asyncio.Runner() as runner:
            train.make_stage(config, runner, mesh, PLAIN, tokenizer)

    small = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, vocab_size=700))
    with pytest.raises(ConfigError, match=r"model\.vocab_size=700.*has 782 pieces"):
        start(small)
    named = dataclasses.replace(CONFIG.run, chat_template="llama3")
    with pytest.raises(ConfigError, match=r"llama3 needs .*run\.chat_template"):
        start(dataclasses.replace(CONFIG, run=named))
    named = dataclasses.replace(CONFIG.run, chat_template="chatml")
    agent = dataclasses.replace(CONFIG.agent, thinking=True)
    with pytest.raises(ConfigError, match=r"chatml of this checkpoint does not think"):
        start(dataclasses.replace(CONFIG, run=named, agent=agent))
