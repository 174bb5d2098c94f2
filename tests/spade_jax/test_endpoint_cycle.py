"""Whole cycles whose designs come from an endpoint, a stand-in: the policy's prompt, the policy's
admission, and nothing to train a designer on.
"""

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
from endpoint_stand_in import failed, said, serving

from models.tokenizer import load_tokenizer
from spade_jax import measures, selfplay
from spade_jax.config import Config
from spade_jax.curriculum import Curriculum
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import EndpointError, SilentEndpointError
from spade_jax.recipes import change
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.endpoint import open_endpoint
from spade_jax.roles.memory import Memory, Record
from spade_jax.rollout.chat import Chat
from spade_jax.stage import Stage
from spade_jax.telemetry.metrics import check
from spade_jax.types import Arm, Completion, Document, Role, Stop

TOKENIZER = Path(__file__).resolve().parents[1] / "golden" / "chat" / "qwen3"
TERMS = ("amber", "basalt", "cobalt", "dolmen")
PROGRAMS = [family.draw(random.Random(0), TERMS, "easy").program for family in FAMILIES]
GOOD_HINT = "Each reply tells whether the last step was right; start again where one was wrong."


class Player:
    """The policy: it hints, judges and plays, and says no word of a design."""

    def __init__(self, chat):
        self.chat, self.designs_asked = chat, 0

    async def gather(self, coroutines):
        return list(await asyncio.gather(*coroutines))

    async def generate(self, tokens, params, key):
        prompt = self.chat.decode(tokens)
        self.designs_asked += "YOUR ORDER" in prompt
        text = GOOD_HINT if "You help players" in prompt else "\\boxed{yes}"
        ids = self.chat.finish(text)
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(ids, logprobs, logprobs, Stop.STOP_ID, 0)


@pytest.fixture(scope="module")
def pool():
    with asyncio.Runner() as runner:
        made = Pool(Limits(max_workers=4))
        runner.run(made.start())
        yield runner, made
        runner.run(made.close())


@pytest.fixture
def stage_of(pool):
    opened = []

    def make(server, *, endpoint=None, **designer) -> Stage:
        settings = {
            "source": "endpoint", "train": False, "prompt": "corpus", "designs": 2,
            "skills_per_cycle": 2, "delay_steps": 0, "max_tokens": 4000,
        } | designer  # fmt: skip
        config = change(
            Config(),
            designer=settings,
            endpoint={"url": server.url, "model": "other-1", "retries": 0} | (endpoint or {}),
            agent={"seeds": 1, "plays": 2, "max_turns": 12},
            envs={"probe_seeds": 10},
        )
        stage = object.__new__(Stage)  # not of an Engine
        stage.runner, stage.pool = pool
        stage.config = config
        stage.chat = Chat(load_tokenizer(TOKENIZER))
        stage.corpus = Corpus([Document(f"d{i}", f"t {i}", f"word{i} " * 9) for i in range(9)], 0)
        stage.curriculum = Curriculum(Memory(config.memory))
        stage.engine = Player(stage.chat)  # pyright: ignore[reportAttributeAccessIssue]
        stage.endpoint = open_endpoint(config.designer, config.endpoint)
        opened.append(stage)
        return stage

    yield make
    for stage in opened:
        stage.runner.run(stage.endpoint.close())


def fenced(program):
    return said(f"<think>```python\nclass DraftEnv: pass\n```</think>\n```python\n{program}```\n")


def skill_of(body) -> str:
    return body["messages"][1]["content"].partition("YOUR ORDER\nSkill: ")[2].partition(" (")[0]


def test_a_cycle_is_written_elsewhere_and_trains_no_designer(stage_of):
    given = iter([fenced(PROGRAMS[0]), fenced(PROGRAMS[4])])

    def answer(body):
        """No program at the first attempt at a skill, then one; of the other skill at once."""
        first = skill_of(body) not in answered
        answered.append(skill_of(body))
        return said("I would rather not.") if first and len(set(answered)) == 1 else next(given)

    answered = []
    with serving(answer) as server:
        stage = stage_of(server, attempts=3)
        skill = stage.config.designer.skills[0]
        old = Record("0" * 12, skill, "OldEnv of rust", 0.5, 0.25, 0, PROGRAMS[5])
        stage.curriculum.memory.add(old)
        designs = selfplay.design(stage, 0)
    assert [design.verdict.gate for design in designs].count("fence") == 1
    assert sum(d.verdict.admitted for d in designs) == 2, [d.verdict for d in designs]
    assert stage.engine.designs_asked == 0
    assert all("word" in body["messages"][1]["content"] for body in server.asked)
    remembered = [body for body in server.asked if "OldEnv of rust" in str(body["messages"])]
    assert {skill_of(body) for body in remembered} == {skill}

    episodes = selfplay.play(stage, 0)
    assert {episode.arm for episode in episodes} == set(Arm)  # the policy hints
    scored = selfplay.score(stage, episodes, 0, flush=True)
    assert Role.DESIGNER not in {group.role for group in scored.groups}
    found = check(measures.all_of(stage, designs, episodes, scored))
    assert found["designer/raw_valid_frac"] == 2 / 3  # of the endpoint
    assert found["sampler/design_tokens_count"] == 0 < found["sampler/hint_tokens_count"]
    assert found["endpoint/requests_count"] == 3
    assert found["endpoint/completion_tokens_count"] == 21
    assert found["designer/reward_mean_count"] == 3  # measured all the same
    again = Curriculum(Memory(stage.config.memory))
    again.restore(json.loads(json.dumps(stage.curriculum.state())))
    assert again.environments == stage.curriculum.environments


def test_a_refusal_is_mended_in_the_same_conversation_and_the_policy_may_judge(stage_of):
    with serving([said("No."), fenced(PROGRAMS[0])]) as server:
        stage = stage_of(server, designs=1, skills_per_cycle=1, repair_turns=1, judge=True)
        designs = selfplay.design(stage, 0)
    assert [design.verdict.gate for design in designs] == ["fence", ""]
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert designs[1].judge_tokens > 0


def test_one_design_without_an_answer_is_nobodys_fault_and_tried_again(stage_of):
    def answer(body):
        asked.append(skill_of(body))
        if asked.count(asked[0]) == 1 and skill_of(body) == asked[0]:
            return failed(400, "too long")
        return fenced(PROGRAMS[4 * (len(asked) - 2)])

    asked = []
    with serving(answer) as server:
        stage = stage_of(server, attempts=2, endpoint={"concurrency": 1})
        designs = selfplay.design(stage, 0)
        (lost,) = (design for design in designs if design.verdict.gate == "infrastructure")
        assert "HTTP 400: too long" in lost.verdict.reason
        assert sum(d.verdict.admitted for d in designs) == 2, [d.verdict for d in designs]
        scored = selfplay.score(stage, selfplay.play(stage, 0), 0, flush=True)
        assert len(scored.designer_rewards) == 2 and scored.judged.num_punished == 0
        found = check(measures.designs(designs) | measures.endpoint(stage))
        assert found["designer/raw_valid_frac_count"] == 2
        assert found["endpoint/unanswered_count"] == 1


def test_a_prompt_that_is_never_answered_costs_its_own_design_alone(stage_of):
    """A filter that stops one prompt stops it after --resume as well: the run must go on."""

    def answer(body):
        blocked = skill_of(body) == stage.config.designer.skills[0]
        return failed(400, "content filter") if blocked else fenced(PROGRAMS[4])

    with serving(answer) as server:
        stage = stage_of(server, attempts=3)
        designs = selfplay.design(stage, 0)
    assert [(d.design_id, d.verdict.gate) for d in designs] == [
        ("c0000_d000", "infrastructure"),
        ("c0000_d001", ""),
        ("c0000_d000_a1", "infrastructure"),
        ("c0000_d000_a2", "infrastructure"),
    ]


def test_a_first_attempt_that_nobody_answers_is_tried_again(stage_of):
    def answer(_):
        return failed(400, "content filter") if len(server.asked) <= 2 else fenced(PROGRAMS[4])

    with serving(answer) as server:
        stage = stage_of(server, attempts=2)
        designs = selfplay.design(stage, 0)
    assert [d.verdict.gate for d in designs[:2]] == ["infrastructure"] * 2
    assert [d.verdict.gate for d in designs[2:]] == ["", "duplicate"]
    with serving([failed(400, "unknown field")]) as server:
        stage = stage_of(server, attempts=2)
        with pytest.raises(EndpointError, match="answered none of 4 requests"):
            selfplay.design(stage, 0)


def test_an_endpoint_that_is_gone_ends_the_run_in_one_line(stage_of):
    with serving([failed(503, "maintenance")]) as server:
        stage = stage_of(server)
        with pytest.raises(SilentEndpointError, match="answered none of 2 requests") as caught:
            selfplay.design(stage, 0)
        assert "HTTP 503: maintenance" in str(caught.value) and "\n" not in str(caught.value)
        assert "--resume" in str(caught.value)
    with serving([failed(401, "who are you?")]) as server:
        stage = stage_of(server)
        with pytest.raises(EndpointError, match="who are you") as caught:
            selfplay.design(stage, 0)
        assert not isinstance(caught.value, SilentEndpointError)
