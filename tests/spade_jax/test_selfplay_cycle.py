"""One whole cycle with real workers and a policy that recites library programs: what is admitted,
paired, trained on.
"""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from models.tokenizer import train
from spade_jax import designing, measures, selfplay
from spade_jax.config import (
    AgentConfig,
    Config,
    CorpusConfig,
    DesignerConfig,
    DiversityConfig,
    EngineConfig,
    EnvsConfig,
    MemoryConfig,
)
from spade_jax.curriculum import Curriculum
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import ConfigError
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.rollout.chat import Chat
from spade_jax.stage import Stage
from spade_jax.telemetry import metrics
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
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(ids, logprobs, logprobs, Stop.STOP_ID, 0)

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
        engine=EngineConfig(context_tokens=2048),
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


def test_a_prompt_too_long_for_the_context_is_shortened_or_refused(stage, caplog):
    designing.requests(stage, 0, [0], 0)
    assert not caplog.messages
    stage.corpus = Corpus([Document("d", "t", " ".join(["x" * 500] * 40))], 0)
    (request,) = designing.requests(stage, 0, [0], 0)
    assert 0 < len(request.material.document) < 500 * 40
    (said,) = caplog.messages  # nobody would see it in the prompt
    assert "1 of 1 prompts have less of their document" in said and "context_tokens=2048" in said
    stage.config = replace(stage.config, engine=EngineConfig(context_tokens=700))
    with pytest.raises(ConfigError, match=r"engine\.context_tokens=700"):
        designing.requests(stage, 0, [0], 0)
    with pytest.raises(ConfigError, match=r"designer's prompt takes \d+ tokens"):
        designing.check(stage.config, stage.chat)


def test_variety_of_a_cycle_is_measured_and_logged(stage):
    designs = selfplay.design(stage, 0)
    written = stage.curriculum.window.written
    # the broken one is no program; the first program of two skills comes again
    assert [(each.admitted, each.repeats, each.run) for each in written] == [
        (True, False, 1),
        (True, False, 1),
        (True, False, 1),
        (False, True, 2),
        (False, True, 2),
    ]
    logged = metrics.check(measures.designs(designs) | measures.variety(stage))
    assert logged["diversity/near_duplicate_frac"] == 0.4
    assert logged["diversity/near_duplicate_frac_count"] == 5
    assert (logged["diversity/repeat_run_max"], logged["diversity/window_count"]) == (2, 3)
    for view in ("rules", "program"):
        assert 1.5 < logged[f"diversity/vendi_{view}"] <= 3
        assert logged[f"diversity/vendi_{view}_frac"] == logged[f"diversity/vendi_{view}"] / 3
    # to nothing, to the first, to the first two; then two copies
    assert logged["designer/novelty_program_mean_count"] == 5
    assert logged["designer/novelty_program_mean"] == pytest.approx(
        sum(1 - design.verdict.measures["similarity"] for design in designs[1:]) / 5
    )
    assert designs[4].verdict.measures["similarity"] == 1.0
    assert 0 < logged["designer/novelty_rules_mean"] < 1
    # a smaller window holds the newest alone
    stage.config = replace(stage.config, diversity=DiversityConfig(window=2, compared=2))
    selfplay.design(stage, 4)
    window = stage.curriculum.window
    assert (len(window.written), len(window.admitted)) == (2, 2)
    # a step without designs says nothing new
    scored = selfplay.score(stage, [], 1, flush=False)
    later = measures.all_of(stage, [], [], scored)
    assert not any(name.startswith("diversity/") for name in later)


@pytest.mark.parametrize("duplicates", ["penalise", "allow"])
def test_near_duplicates_are_played_where_they_are_not_refused(stage, duplicates):
    stage.config = replace(stage.config, diversity=DiversityConfig(duplicates=duplicates))
    designs = selfplay.design(stage, 0)
    assert [design.verdict.gate for design in designs] == ["fence"] + [""] * 5
    # a copy is the same environment, which is played once
    assert len(stage.curriculum.environments) == 3
    episodes = selfplay.play(stage, 0)
    assert len({episode.episode_id for episode in episodes}) == len(episodes) == 12
    scored = selfplay.score(stage, episodes, 0, flush=False)
    by_skill = scored.judged.rewards_by_skill
    assert [len(rewards) for rewards in by_skill.values()] == [2, 2, 2]
    less = -0.5 if duplicates == "penalise" else 0.0
    for first, second in list(by_skill.values())[1:]:
        assert second == pytest.approx(first + less)
    assert scored.judged.num_punished == (3 if less else 1)
    # admission does not refuse what the memory holds either
    again = selfplay.design(stage, 8)  # of the same skills
    assert all(design.verdict.admitted for design in again)
    assert all(design.verdict.measures["similarity"] == 1.0 for design in again)
    assert len(stage.curriculum.memory.records) == 3


def test_memory_is_shown_unless_it_is_off(stage):
    for size, shows in ((200, "line"), (200, "summary"), (200, "program"), (0, "line")):
        chosen = MemoryConfig(size=size, shows=shows, win_low=0.0)
        stage.config = replace(stage.config, memory=chosen)
        stage.curriculum = Curriculum(Memory(chosen))
        stage.engine = Reciter(stage.chat)
        selfplay.design(stage, 0)
        selfplay.score(stage, selfplay.play(stage, 0), 0, flush=False)
        asked = designing.requests(stage, 2, range(6), 0)  # the same skills as in cycle 0
        assert len(stage.curriculum.memory.records) == (3 if size else 0)
        shown = [text for request in asked for text in request.material.memory]
        if not size:
            assert shown == []
            continue
        # every skill has its one record
        assert len(shown) == 6 and all("Env" in text for text in shown)
        assert all(("```python" in text) == (shows == "program") for text in shown)
        assert all(("\n" in text) == (shows != "line") for text in shown)


def test_without_a_corpus_no_document_is_shown(stage):
    stage.corpus = Corpus([], 0)
    (request, *_) = designing.requests(stage, 0, range(6), 0)
    assert (request.document_id, request.material.document, request.material.terms) == ("", "", ())
    designs = selfplay.design(stage, 0)
    assert "title" not in stage.engine.prompts[0] and "weight" not in stage.engine.prompts[0]
    assert {design.document_id for design in designs} == {""}


def test_an_excerpt_is_cut_to_tokens(stage):
    whole = designing.requests(stage, 0, range(6), 0)[0].material.document
    stage.config = replace(stage.config, corpus=CorpusConfig(max_tokens=20))
    encode = stage.chat.tokenizer.encode
    cut = designing.requests(stage, 0, range(6), 0)[0].material.document
    assert len(encode(cut)) <= 20 < len(encode(whole)) and cut.endswith("[...]")


def test_skills_take_turns_and_two_skills_stay(stage):
    def asked(**settings):
        designer = DesignerConfig(designs=6, delay_steps=0, **settings)
        stage.config = replace(stage.config, designer=designer)
        cycles = [designing.requests(stage, cycle, range(6), 0) for cycle in range(3)]
        return [Counter(request.material.skill for request in requests) for requests in cycles]

    six = asked(skills_per_cycle=3)
    assert six[0] == six[2] and not six[0] & six[1]
    assert [set(cycle.values()) for cycle in six] == [{2}] * 3
    pair = ("Mathematical Reasoning", "Pattern Recognition")
    assert asked(skills=pair, skills_per_cycle=2) == [dict.fromkeys(pair, 3)] * 3


def test_a_skill_of_its_own_documents_is_shown_them(stage):
    documents = [Document(f"d/{skill}", "t", "words " * 9, (skill,)) for skill in DRAWS]
    stage.corpus = Corpus(documents, 0, sampling="per_skill")
    for request in designing.requests(stage, 0, range(6), 0):
        assert request.document_id == f"d/{request.material.skill}"
