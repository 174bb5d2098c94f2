"""Whole cycles on programs that nobody of the run wrote: a folder, with and without admission, and
problems of RLVE (its stand-in); and designs by the starting weights.
"""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from models.tokenizer import load_tokenizer
from spade_jax import measures, selfplay
from spade_jax.config import (
    AgentConfig,
    Config,
    DesignerConfig,
    EnvsConfig,
    MemoryConfig,
    RewardConfig,
)
from spade_jax.curriculum import Curriculum
from spade_jax.envs.adapters import Listed
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import ConfigError
from spade_jax.recipes import change
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.roles.supply import Folder, Problems
from spade_jax.rollout.chat import Chat
from spade_jax.stage import Stage
from spade_jax.telemetry.metrics import check
from spade_jax.train import Run
from spade_jax.types import Arm, Completion, Role, Stop

TOKENIZER = Path(__file__).resolve().parents[2] / "assets" / "tiny"
FAKES = str(Path(__file__).with_name("envs") / "adapters" / "fakes")
TERMS = ("amber", "basalt", "cobalt", "dolmen")
DRAWS = [family.draw(random.Random(0), TERMS, "easy") for family in FAMILIES[:4]]
UNSOLVED = """class LostEnv:
    def reset(self, seed):
        return f"Say anything to {seed}.", {}

    def step(self, action):
        return "No.", 0.0, True, False, {}
"""


class Player:
    """An engine that answers each play with the next of its boxed answers, over and over."""

    def __init__(self, chat, answers):
        self.chat, self.answers, self.asked, self.loads = chat, answers, 0, []

    async def gather(self, coroutines):
        return [await coroutine for coroutine in coroutines]

    async def generate(self, tokens, params, key):
        prompt = self.chat.decode(tokens)
        answer = self.answers[self.asked % len(self.answers)]
        self.asked += 1
        ids = self.chat.finish(answer(prompt))
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(ids, logprobs, logprobs, Stop.STOP_ID, 0)


@pytest.fixture(scope="module")
def pool():
    with asyncio.Runner() as runner:
        made = Pool(Limits(max_workers=4), ["rlve"], [FAKES])
        runner.run(made.start())
        yield runner, made
        runner.run(made.close())


def stage_with(pool, config, supply, *answers) -> Stage:
    stage = object.__new__(Stage)  # not of an Engine
    stage.config, stage.supply, stage.corpus = config, supply, Corpus([], 0)
    stage.runner, stage.pool = pool
    stage.chat = Chat(load_tokenizer(TOKENIZER))
    stage.curriculum = Curriculum(Memory(config.memory))
    stage.engine = Player(stage.chat, answers or [lambda prompt: "\\boxed{amber}"])  # pyright: ignore[reportAttributeAccessIssue]
    return stage


def config_with(**designer) -> Config:
    base = Config(
        reward=RewardConfig(kind="solve_rate"),
        designer=DesignerConfig(train=False, delay_steps=0, **designer),
        agent=AgentConfig(seeds=1, plays=2, max_turns=3),
        envs=EnvsConfig(probe_seeds=10),
        memory=MemoryConfig(size=0),
    )
    return change(base, run={"cycle_steps": 1})


def folder_with(path, *programs) -> str:
    for index, program in enumerate(programs):
        (path / f"game_{index}.py").write_text(program)
    return str(path)


def a_step(stage: Stage, step: int):
    """One step: the designs, the plays, and what is trained on; metrics must be of known names."""
    designs = selfplay.design(stage, step)
    episodes = selfplay.play(stage, step)
    scored = selfplay.score(stage, episodes, step, flush=False)
    found = check(measures.all_of(stage, designs, episodes, scored))
    assert "designer/raw_valid_frac" not in found  # the policy wrote none of it
    assert found["sampler/design_tokens_count"] == 0
    return designs, episodes, scored


def test_a_fixed_pool_plays_other_programs_each_step_and_trains_no_designer(pool, tmp_path):
    folder = folder_with(tmp_path, *(draw.program for draw in DRAWS))
    config = config_with(source="folder", folder=folder, designs=2, gates="none")
    stage = stage_with(pool, config, Folder.load(config.designer, 0))
    seen = []
    for step in range(3):
        designs, episodes, scored = a_step(stage, step)
        assert all(design.verdict.admitted for design in designs)
        assert len(stage.curriculum.environments) == 2
        assert {episode.arm for episode in episodes} == {Arm.UNHINTED}
        assert Role.DESIGNER not in {group.role for group in scored.groups}
        seen.append({design.source.program for design in designs if design.source})
    assert seen[0] | seen[1] == {draw.program for draw in DRAWS}
    assert seen[2] <= seen[0] | seen[1]  # again, and not refused as duplicates
    again = Curriculum(Memory(config.memory))
    again.restore(json.loads(json.dumps(stage.curriculum.state())))
    assert again.environments == stage.curriculum.environments


def test_a_folder_that_is_not_trusted_passes_the_gates_and_later_attempts_fill_up(pool, tmp_path):
    folder = folder_with(tmp_path, UNSOLVED, DRAWS[0].program)
    config = config_with(source="folder", folder=folder, designs=1, attempts=2)
    supply = Folder.load(config.designer, 0)
    supply._order._left = sorted(
        supply._entries, key=lambda name: "LostEnv" not in supply._entries[name].source.program
    )
    stage = stage_with(pool, config, supply)
    designs, _, _ = a_step(stage, 0)
    assert [design.verdict.admitted for design in designs] == [False, True]
    assert [design.design_id for design in designs] == ["c0000_d000", "c0000_d000_a1"]
    assert [each.source.program for each in stage.curriculum.environments] == [DRAWS[0].program]


def test_hints_of_a_pool_are_measured_though_no_designer_is_trained(pool, tmp_path):
    folder_with(tmp_path, DRAWS[0].program)
    record = {"source": {"skill": DRAWS[0].skill}, "hint": DRAWS[0].hint}
    (tmp_path / "game_0.json").write_text(json.dumps(record))
    config = config_with(source="folder", folder=str(tmp_path), designs=1, gates="none")
    config = change(config, reward={"kind": "blend"}, hint={"source": "designer"})
    stage = stage_with(pool, config, Folder.load(config.designer, 0))
    _, episodes, scored = a_step(stage, 0)
    assert stage.curriculum.environments[0].hint == DRAWS[0].hint
    assert {episode.arm for episode in episodes} == set(Arm)
    assert scored.regrets
    assert Role.DESIGNER not in {group.role for group in scored.groups}


REFERENCE = """class FirstEnv:
    def __init__(self, max_turns=9):
        self.max_turns = max_turns

    def reset(self, seed=None):
        self.secret = random.Random(seed).randint(1, 9)
        return f"Say \\\\boxed{{{self.secret}}}.", {}

    def step(self, action):
        won = action == f"\\\\boxed{{{self.secret}}}"
        return "Done.", float(won), True, False, {}
"""


def test_a_released_pool_passes_the_gates_of_public_environments(pool, tmp_path):
    folder_with(tmp_path, REFERENCE, REFERENCE.replace(", True, False, {}", ", True"))
    rows = [{"filename": f"game_{index}.py", "skill": "Optimization"} for index in range(2)]
    (tmp_path / "manifest.json").write_text(json.dumps({"games": rows}))
    config = config_with(source="folder", folder=str(tmp_path), designs=2)
    with pytest.raises(ConfigError, match=r"designer\.gates='all'"):
        Folder.load(config.designer, 0)
    config = change(config, designer={"gates": "public"})
    stage = stage_with(pool, config, Folder.load(config.designer, 0), said)
    designs, episodes, _ = a_step(stage, 0)
    assert sorted(design.verdict.gate for design in designs) == ["", "schema"]
    assert len(episodes) == 2 and all(episode.win for episode in episodes)


def said(prompt: str) -> str:
    return f"\\boxed{{{prompt.rpartition('boxed{')[2][:1]}}}"


def doubled(prompt: str) -> str:
    number = prompt.rpartition("Double ")[2].partition(".")[0]
    return f"\\boxed{{{2 * int(number)}}}"


def test_rlve_gets_harder_where_it_is_won(pool):
    config = config_with(source="rlve", problems=("Doubling",), designs=1, window_plays=4)
    supply = Problems.load(
        config.designer, 0, lambda package: [Listed("Doubling", "rlve/Doubling", "")]
    )
    stage = stage_with(pool, config, supply, doubled)
    highs = []
    for step in range(4):
        _, episodes, _ = a_step(stage, step)
        assert all(episode.win for episode in episodes)
        highs.append(supply.state()["windows"]["Doubling"]["high"])
    assert highs[:2] == [0, 1]  # two plays a step, judged by four
    assert len({each.source.skill for each in stage.curriculum.environments}) == 1

    stage = stage_with(pool, config, Problems.load(
        config.designer, 0, lambda package: [Listed("Doubling", "rlve/Doubling", "")]
    ), lambda prompt: "\\boxed{none}")  # fmt: skip
    for step in range(3):
        _, episodes, _ = a_step(stage, step)
        assert not any(episode.win for episode in episodes)
    assert stage.supply.state()["windows"]["Doubling"]["high"] == 0  # pyright: ignore[reportOptionalMemberAccess]


class Loads:
    """An engine that notes what it is loaded with."""

    def __init__(self):
        self.noted = []

    def load(self, params, version):
        self.noted.append((params, version))


@pytest.mark.parametrize(
    ("policy", "reference", "expected"),
    [
        ("current", None, []),
        ("initial", "start", [("start", 0), ("now", 7)]),
        ("initial", None, [("base", 0), ("now", 7)]),  # adapters: the base never moves
    ],
)
def test_the_starting_weights_are_in_the_sampler_while_designs_are_written(
    policy, reference, expected
):
    run = object.__new__(Run)
    run.config = replace(Config(), designer=DesignerConfig(policy=policy, train=False))
    run.reference, run.version = reference, 7  # pyright: ignore[reportAttributeAccessIssue]
    run.state = SimpleNamespace(params="base")  # pyright: ignore[reportAttributeAccessIssue]
    run.learner = SimpleNamespace(  # pyright: ignore[reportAttributeAccessIssue]
        on_device=lambda params: params, policy=lambda state: "now"
    )
    engine = Loads()
    run.stage = SimpleNamespace(engine=engine)  # pyright: ignore[reportAttributeAccessIssue]
    with run._designer_loaded():
        assert engine.noted == expected[:1]
    assert engine.noted == expected
