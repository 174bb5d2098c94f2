"""Attempts, repairs and hints of one cycle, with real workers and a policy that has a script."""

import asyncio
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.tokenizer import load_tokenizer
from spade_jax import designing, measures, selfplay
from spade_jax.config import AgentConfig, Config, DesignerConfig, EngineConfig, EnvsConfig
from spade_jax.curriculum import Curriculum
from spade_jax.envs.library import FAMILIES
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.roles import prompts
from spade_jax.roles.corpus import Corpus
from spade_jax.roles.memory import Memory
from spade_jax.roles_config import TOOL_SKILLS
from spade_jax.rollout.chat import Chat
from spade_jax.stage import Stage, instance_seeds
from spade_jax.telemetry.metrics import check
from spade_jax.types import Arm, Completion, Document, Role, Stop

TOKENIZER = Path(__file__).resolve().parents[1] / "golden" / "chat" / "qwen3"
TERMS = ("amber", "basalt", "cobalt", "dolmen")
DRAWS = [family.draw(random.Random(0), TERMS, "easy") for family in FAMILIES]
GOOD_HINT = "Each reply tells whether the last step was right; start again where one was wrong."
NO_PROGRAM = "I would rather not."
NO_SOLUTION = "```python\nclass LostEnv:\n    def reset(self, seed):\n        return 'a', {}\n```"


def fenced(program):
    return f"Here it is.\n```python\n{program}```\n"


class Script:
    """An engine that answers designs in the order of the requests, and every hint alike."""

    def __init__(self, chat, designs, hint=GOOD_HINT, verdict="\\boxed{yes}"):
        self.chat, self.designs, self.hint, self.verdict = chat, list(designs), hint, verdict
        self.asked: list[str] = []

    async def gather(self, coroutines):
        return [await coroutine for coroutine in coroutines]

    async def generate(self, tokens, params, key):
        prompt = self.chat.decode(tokens)
        self.asked.append(prompt)
        ids = self.chat.finish(self._answer(prompt))
        logprobs = np.full(len(ids), -1.0, np.float32)
        return Completion(ids, logprobs, logprobs, Stop.STOP_ID, 0)

    def _answer(self, prompt):
        if "You help players" in prompt or "Write a hint for the player" in prompt:
            return self.hint
        if "You review practice environments" in prompt:
            return self.verdict
        if "Play the game" in prompt:
            return "\\boxed{amber}"
        return self.designs.pop(0)

    def hints_asked(self):
        return [prompt for prompt in self.asked if "You help players" in prompt]


@pytest.fixture(scope="module")
def pool():
    with asyncio.Runner() as runner:
        made = Pool(Limits())
        runner.run(made.start())
        yield runner, made
        runner.run(made.close())


@pytest.fixture
def stage_of(pool):
    def make(
        answers, *, hint_settings=None, reward=None, max_turns=12, script=None, diversity=None,
        **designer,
    ):  # fmt: skip
        base = Config()
        settings = {
            "prompt": "corpus", "designs": 1, "skills_per_cycle": 1, "delay_steps": 0,
            "max_tokens": 4000,
        } | designer  # fmt: skip
        config = Config(
            engine=EngineConfig(context_tokens=24_000),
            model=replace(base.model, max_positions=24_000),
            batch=replace(base.batch, row_tokens=24_000, device_tokens=24_000),
            designer=DesignerConfig(**settings),
            hint=replace(base.hint, max_tokens=2000, **(hint_settings or {})),
            agent=AgentConfig(seeds=2, plays=2, max_turns=max_turns, max_observation_tokens=4000),
            envs=EnvsConfig(probe_seeds=10),
            reward=replace(base.reward, **(reward or {})),
            diversity=replace(base.diversity, **(diversity or {})),
        )
        stage = object.__new__(Stage)
        stage.runner, stage.pool = pool
        stage.chat = Chat(load_tokenizer(TOKENIZER))
        documents = [Document(f"d{i}", f"title {i}", f"word{i} " * 9) for i in range(40)]
        stage.config, stage.corpus = config, Corpus(documents, 0)
        stage.curriculum = Curriculum(Memory(config.memory))
        stage.engine = Script(stage.chat, answers, **(script or {}))
        return stage

    return make


def gates(designs):
    return [(design.design_id, design.verdict.gate) for design in designs]


def test_attempts_go_on_where_nothing_was_admitted(stage_of):
    stage = stage_of(
        [NO_PROGRAM, fenced(DRAWS[0].program), NO_SOLUTION, fenced(DRAWS[0].program),
         fenced(DRAWS[4].program)],
        designs=2, attempts=3,
    )  # fmt: skip
    designs = selfplay.design(stage, 0)
    assert gates(designs) == [
        ("c0000_d000", "fence"),
        ("c0000_d001", ""),
        ("c0000_d000_a1", "parse"),
        ("c0000_d000_a2", "duplicate"),  # of the other design of this cycle, a round earlier
    ]
    documents = [design.document_id for design in designs]
    assert len(set(documents)) == 4, "every attempt has a document of its own"
    assert [e.design_id for e in stage.curriculum.environments] == ["c0000_d001"]
    scored = selfplay.score(stage, selfplay.play(stage, 0), 0, flush=True)
    (group,) = [group for group in scored.groups if group.role is Role.DESIGNER]
    reward = stage.config.reward
    assert len(group.trajectories) == 4, "every attempt is a training sample"
    assert group.rewards.tolist()[0] == reward.invalid_reward
    assert group.rewards.tolist()[2:] == [reward.invalid_reward, reward.duplicate_reward]


def test_no_further_attempt_where_all_were_admitted(stage_of):
    stage = stage_of([fenced(DRAWS[0].program)], attempts=5)
    assert gates(selfplay.design(stage, 0)) == [("c0000_d000", "")]


def test_a_repair_turn_is_shown_the_refusal_and_is_a_sample_of_its_own(stage_of):
    broken = DRAWS[0].program.replace("def solution", "def resolution")
    stage = stage_of([fenced(broken), fenced(DRAWS[0].program)], repair_turns=2)
    first, second = selfplay.design(stage, 0)
    assert gates([first, second]) == [("c0000_d000", "parse"), ("c0000_d000_r1", "")]
    assert (first.turn, second.turn) == (0, 1)
    conversation = stage.engine.asked[1]
    assert stage.engine.asked[0] in conversation and broken in conversation
    assert '"parse"' in conversation and "has no solution" in conversation
    # the answer before is in the conversation, and not trained on again
    ids, mask = second.trajectory.tokens, second.trajectory.loss_mask
    assert ids[: len(first.trajectory.tokens)].tolist() == first.trajectory.tokens.tolist()
    assert not mask[: len(first.trajectory.tokens)].any()
    assert stage.chat.decode(ids[mask]) == fenced(DRAWS[0].program)
    found = check(measures.designs([first, second]))
    assert found["designer/raw_valid_frac"] == 0 and found["designer/raw_valid_frac_count"] == 1
    assert found["designer/repair_admitted_frac"] == 1
    assert found["sampler/design_tokens_count"] == int(first.trajectory.loss_mask.sum())
    assert found["sampler/repair_tokens_count"] == int(mask.sum())
    assert found["sampler/hint_tokens_count"] == second.hint_tokens > 0


def test_repairs_end_and_the_next_attempt_begins_anew(stage_of):
    stage = stage_of([NO_PROGRAM] * 4, repair_turns=1, attempts=2)
    designs = selfplay.design(stage, 0)
    ids = ["c0000_d000", "c0000_d000_r1", "c0000_d000_a1", "c0000_d000_a1_r1"]
    assert gates(designs) == [(name, "fence") for name in ids]
    assert "rather not" in stage.engine.asked[1] and "rather not" not in stage.engine.asked[2]
    assert len({designs[0].document_id, designs[2].document_id}) == 2


def test_a_copy_of_the_worked_example_is_refused(stage_of):
    stage = stage_of([fenced(prompts.WORKED["corpus"])], max_turns=25)
    (design,) = selfplay.design(stage, 0)
    assert design.verdict.gate == "duplicate" and "of the prompt" in design.verdict.reason


def test_a_copy_of_the_worked_example_costs_its_design_where_it_is_played(stage_of):
    copy = fenced(prompts.WORKED["multi_turn"])
    for duplicates, punished in (("penalise", 1), ("allow", 0)):
        stage = stage_of(
            [copy], diversity={"duplicates": duplicates}, prompt="multi_turn", max_turns=25
        )
        (design,) = selfplay.design(stage, 0)
        assert design.verdict.admitted, design.verdict
        assert design.verdict.measures["similarity"] == 1.0
        assert design.verdict.measures["rules_similarity"] == 1.0
        scored = selfplay.score(stage, selfplay.play(stage, 0), 0, flush=True)
        assert scored.judged.num_punished == punished


def test_the_worked_example_in_another_coding_is_refused_by_its_texts(stage_of):
    example = prompts.WORKED["multi_turn"]
    recoded = example.replace("self.turns += 1", "self.turns = 1 + self.turns")
    assert recoded != example
    stage = stage_of([fenced(recoded)], prompt="multi_turn", max_turns=25)
    stage.config = replace(stage.config, envs=replace(stage.config.envs, duplicate_similarity=1.0))
    (design,) = selfplay.design(stage, 0)
    assert design.verdict.gate == "duplicate" and "of the prompt" in design.verdict.reason
    assert design.verdict.measures["similarity"] < 1.0


@pytest.mark.parametrize("size", [200, 0])
def test_a_copy_of_an_earlier_cycle_is_refused_with_and_without_the_memory(stage_of, size):
    """The ablation takes the memory out of the prompts, and leaves admission as it is."""
    stage = stage_of([fenced(DRAWS[0].program)] * 2 + [fenced(DRAWS[4].program)])
    stage.config = replace(stage.config, memory=replace(stage.config.memory, size=size))
    stage.curriculum = Curriculum(Memory(stage.config.memory))
    (first,) = selfplay.design(stage, 0)
    selfplay.score(stage, selfplay.play(stage, 0), 0, flush=True)
    assert len(stage.curriculum.memory.records) == bool(size)
    resumed = Curriculum(Memory(stage.config.memory))
    resumed.restore(json.loads(json.dumps(stage.curriculum.state())))
    stage.curriculum = resumed
    (copy,) = selfplay.design(stage, stage.config.run.cycle_steps)
    assert first.verdict.admitted and copy.verdict.gate == "duplicate"
    assert first.source.environment_id in copy.verdict.reason
    assert copy.verdict.measures["similarity"] == 1.0
    # as many are compared with as the settings say, the newest
    stage.config = replace(stage.config, diversity=replace(stage.config.diversity, compared=1))
    selfplay.design(stage, 2 * stage.config.run.cycle_steps)
    known = designing._known(stage)
    assert set(known.values()) == {DRAWS[4].program, prompts.WORKED["corpus"]}


def test_a_refused_hint_is_not_the_designers_to_mend(stage_of):
    stage = stage_of([fenced(DRAWS[0].program)], repair_turns=3, script={"hint": "\\boxed{x}"})
    (design,) = selfplay.design(stage, 0)
    assert design.verdict.gate == "hint" and design.hint_completion == "\\boxed{x}"
    assert len(stage.engine.hints_asked()) == 2
    second = stage.engine.hints_asked()[1]
    assert '"hint"' in second and "boxed action" in second, "the rewrite is told why"


def test_a_hint_in_the_same_completion(stage_of):
    block = f"```hint\n{GOOD_HINT}\n```"
    bad = "```hint\nSay \\boxed{it}\n```"
    program = fenced(DRAWS[0].program)
    stage = stage_of(
        [program + bad, program + block], repair_turns=1, hint_settings={"source": "designer"}
    )
    refused, admitted = selfplay.design(stage, 0)
    assert "```hint" in stage.engine.asked[0]
    assert refused.verdict.gate == "hint" and refused.hint is None
    assert admitted.verdict.admitted and admitted.hint == GOOD_HINT
    assert stage.engine.hints_asked() == [] and admitted.hint_tokens == 0
    assert stage.curriculum.environments[0].hint == GOOD_HINT


def test_a_hint_for_each_instance_is_shown_in_its_plays_alone(stage_of):
    stage = stage_of([fenced(DRAWS[0].program)], hint_settings={"scope": "seed"})
    (design,) = selfplay.design(stage, 0)
    (environment,) = stage.curriculum.environments
    seeds = instance_seeds(stage.config, environment.environment_id, 0)
    assert design.verdict.admitted, design.verdict
    assert environment.seed_hints == {str(seed): GOOD_HINT for seed in seeds}
    assert environment.hint == "" and environment.hint_for(seeds[1]) == GOOD_HINT
    asked = stage.engine.hints_asked()
    begins = [re.search(r"<<<<<\n(.*)\n>>>>>", prompt, re.DOTALL)[1] for prompt in asked]
    episodes = selfplay.play(stage, 0)
    shown = {e.seed: e.turns[0].observation for e in episodes}
    assert begins == [shown[seed] for seed in seeds] and set(shown) == set(seeds)
    for episode in episodes:
        text = stage.chat.decode(episode.trajectory.tokens)
        assert (f"HINT: {GOOD_HINT}" in text) == (episode.arm is Arm.HINTED)
    found = check(measures.episodes(episodes))
    assert found["sampler/hinted_tokens_count"] > 0 and found["sampler/unhinted_tokens_count"] > 0


def test_a_hint_that_tells_the_answer_of_its_instance_refuses_the_design(stage_of):
    stage = stage_of([fenced(prompts.WORKED["multi_turn"])], hint_settings={"scope": "seed"})
    environment_id = designing.EnvironmentSource(
        prompts.WORKED["multi_turn"], "Optimization", "easy", ""
    ).environment_id
    seed = instance_seeds(stage.config, environment_id, 0)[1]  # the second of the two
    names: dict = {}
    exec(prompts.WORKED["multi_turn"], names)
    game = names["CauldronEnv"]()
    game.reset(seed)
    stage.engine.hint = ", then ".join(game.solution())
    (design,) = selfplay.design(stage, 0)
    assert design.verdict.gate == "hint_leak", design.verdict
    assert len(design.seed_hints) == 1 and stage.curriculum.environments == []


@pytest.mark.parametrize("kind", ["solve_rate", "learning_potential"])
def test_no_hint_where_no_reward_looks_at_the_regret(stage_of, kind):
    stage = stage_of([fenced(DRAWS[0].program)], reward={"kind": kind})
    (design,) = selfplay.design(stage, 0)
    assert design.verdict.admitted and design.hint_tokens == 0
    assert stage.engine.hints_asked() == [] and len(stage.curriculum.environments) == 1
    assert {episode.arm for episode in selfplay.play(stage, 0)} == {Arm.UNHINTED}


@pytest.mark.parametrize("verdict", ["\\boxed{yes}", "\\boxed{no}", "hm"])
def test_the_judge_reads_what_passed_the_tests(stage_of, verdict):
    stage = stage_of(
        [NO_PROGRAM, fenced(DRAWS[0].program)], attempts=2, judge=True, script={"verdict": verdict}
    )
    refused, design = selfplay.design(stage, 0)
    assert refused.judge_tokens == 0, "it is not asked about what was refused before"
    assert design.verdict.gates["random"] == "passed" and design.judge_tokens > 0
    assert design.verdict.gate == ("" if verdict == "\\boxed{yes}" else "judge")
    assert measures.designs([design])["sampler/judge_tokens_count"] == design.judge_tokens
    assert measures.designs([design])["designer/raw_admissible_frac"] == 1


def test_a_tool_task_is_designed_with_a_domain_and_a_variant(stage_of):
    program = prompts.WORKED["tools"].replace("LoanDeskEnv", "DeskEnv")
    settings = {"prompt": "tools", "skills": TOOL_SKILLS, "skills_per_cycle": 6, "designs": 6}
    stage = stage_of([fenced(program)] * 6, **settings, max_turns=25)
    designs = selfplay.design(stage, 0)
    assert [design.verdict.gate for design in designs] == ["duplicate"] * 6
    domains = {re.search(r"Domain: (.*)\.", prompt)[1] for prompt in stage.engine.asked}
    assert len(domains) > 1
    other = stage_of([fenced(prompts.WORKED["tools_single"])], **settings | {"designs": 6})
    other.engine.designs *= 6
    assert selfplay.design(other, 0)[0].verdict.admitted
    assert "calling tools" in other.engine.hints_asked()[0]


def test_the_same_run_asks_for_the_same_designs_again(stage_of):
    def asked():
        stage = stage_of([NO_PROGRAM] * 6, designs=2, attempts=3, prompt="multi_turn")
        selfplay.design(stage, 4)
        return stage.engine.asked

    once = asked()
    assert once == asked() and len(set(once)) == 6
    assert all("title" not in prompt for prompt in once), "no document without a corpus prompt"


def test_prompts_that_need_no_document_draw_none(stage_of):
    stage = stage_of([NO_PROGRAM], prompt="single_answer")
    (design,) = selfplay.design(stage, 0)
    assert design.document_id == "" and stage.corpus.state()["positions"] == {}


def test_programs_whose_braces_were_repaired_are_counted(stage_of):
    texts = [fenced("class AEnv:\n    x = f'{go north}'\n"), fenced("class BEnv:\n    x = 1\n")]
    stage = stage_of(texts, designs=2)
    designs = selfplay.design(stage, 0)
    assert designs[0].source.program == "class AEnv:\n    x = f'{{go north}}'\n"
    assert measures.designs(designs)["designer/braces_repaired_count"] == 1
