"""One whole cycle with real workers and a policy that recites library programs: what is admitted,
paired, trained on.
"""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from models.tokenizer import train
from spade_jax import designing, selfplay
from spade_jax.config import AgentConfig, Config, DesignerConfig, EngineConfig, EnvsConfig
from spade_jax.curriculum import Curriculum
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import ConfigError
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.rollout.chat import Chat
from spade_jax.stage import Stage
from spade_jax.types import Arm, Completion, Document, Role, Stop

TERMS = ("amber", "basalt", "cobalt", "dolmen")
DRAWS = {
    skill: next(f for f in FAMILIES if f.skill == skill).draw(random.Random(0), TERMS, "easy")
    for skill in dict.fromkeys(family.skill for family in FAMILIES)
}


class Reciter:
    """An engine whose designer recites the skill's library program, once broken and then again and
    again.
    """

    def __init__(self, chat, hint=None):
        self.chat, self.hint, self.designs, self.prompts = chat, hint, 0, []

    async def gather(self, coroutines):
        return [await coroutine for coroutine in coroutines]

    async def generate(self, tokens, params, key):
        prompt = self.chat.decode(tokens)
        self.prompts.append(prompt)
        ids = self.chat.finish(self._answer(prompt))
        return Completion(ids, np.full(len(ids), -1.0, np.float32), Stop.STOP_ID, 0)

    def _answer(self, prompt):
        if prompt.startswith("Write a game"):
            self.designs += 1
            if self.designs == 1:
                return "I would rather not."
            skill = next(skill for skill in DRAWS if f"Skill: {skill}" in prompt)
            return f"```python\n{DRAWS[skill].program}```"
        if prompt.startswith("Write a hint"):
            draw = next(d for d in DRAWS.values() if d.program.strip() in prompt)
            return self.hint or draw.hint
        return "hm \\boxed{amber}"


@pytest.fixture(scope="module")
def small_chat(tmp_path_factory):
    texts = [text for draw in DRAWS.values() for text in (draw.program, draw.hint)] * 3
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    return Chat(train(texts, path, vocab_size=500))


@pytest.fixture
def stage(small_chat):
    config = Config(
        engine=EngineConfig(context_tokens=2048, prefill_chunks=(64,)),
        batch=replace(Config().batch, row_tokens=2048),
        designer=DesignerConfig(designs=6, skills_per_cycle=3, delay_steps=0),
        agent=AgentConfig(seeds=1, plays=2, max_turns=12),
        envs=EnvsConfig(probe_seeds=10),
    )
    documents = [Document(f"d{i}", f"title {i}", "words of no weight " * 5) for i in range(5)]
    made = object.__new__(Stage)
    with asyncio.Runner() as runner:
        made.config, made.chat, made.runner = config, small_chat, runner
        made.corpus = Corpus(documents, 0)
        made.curriculum = Curriculum(Memory(config.memory))
        made.engine = Reciter(small_chat)
        made.pool = Pool(Limits())
        runner.run(made.pool.start())
        yield made
        runner.run(made.pool.close())


def test_a_cycle_from_prompt_to_groups(stage):
    designs = selfplay.design(stage, 0)
    gates = [design.verdict.gate for design in designs]
    assert gates == ["fence", "", "", "", "duplicate", "duplicate"]
    assert len(stage.curriculum.environments) == 3
    assert all(environment.hint for environment in stage.curriculum.environments)
    assert "Memory: none" in stage.engine.prompts[0] and "title" in stage.engine.prompts[0]

    episodes = selfplay.play(stage, 0)
    assert len(episodes) == 3 * 1 * 2 * 2
    pairs = {
        arm: [(e.environment_id, e.seed, e.play_index) for e in episodes if e.arm is arm]
        for arm in Arm
    }
    assert sorted(pairs[Arm.HINTED]) == sorted(pairs[Arm.UNHINTED])
    assert all(episode.episode_return is not None for episode in episodes)

    scored = selfplay.score(stage, episodes, 0, flush=False)
    assert Role.DESIGNER in {group.role for group in scored.groups}
    assert len(scored.designer_rewards) == 6
    assert scored.designer_rewards.count(stage.config.reward.invalid_reward) == 3
    assert len(stage.curriculum.memory.records) == 3

    # a step that wrote nothing plays one arm, on new instances
    later = selfplay.play(stage, 1)
    assert {episode.arm for episode in later} == {Arm.UNHINTED}
    assert {e.seed for e in later}.isdisjoint({e.seed for e in episodes})


def test_a_leaking_hint_is_rewritten_once_and_then_refused(stage):
    stage.engine.hint = "Say \\boxed{it}"
    designs = selfplay.design(stage, 0)
    assert [d.verdict.gate for d in designs] == ["fence"] + ["hint"] * 5
    assert sum(prompt.startswith("Write a hint") for prompt in stage.engine.prompts) == 10
    assert stage.curriculum.environments == []


def test_without_an_admission_the_last_environments_stay(stage):
    selfplay.design(stage, 0)
    before = stage.curriculum.environments
    stage.engine.hint = "Say \\boxed{it}"
    selfplay.design(stage, 4)
    assert stage.curriculum.environments == before
    assert {episode.arm for episode in selfplay.play(stage, 4)} == {Arm.UNHINTED}


def test_a_prompt_too_long_for_the_context_is_shortened_or_refused(stage):
    stage.corpus = Corpus([Document("d", "t", " ".join(["x" * 500] * 40))], 0)
    (request,) = designing.requests(stage, 0, [0], 0)
    assert 0 < len(request.material.document) < 500 * 40
    stage.config = replace(
        stage.config, engine=EngineConfig(context_tokens=700, prefill_chunks=(64,))
    )
    with pytest.raises(ConfigError, match=r"engine\.context_tokens=700"):
        designing.requests(stage, 0, [0], 0)
    with pytest.raises(ConfigError, match=r"designer's prompt takes \d+ tokens"):
        designing.check(stage.config, stage.chat)
