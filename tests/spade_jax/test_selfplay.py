"""Scoring: who is compared with whom, what is void, when a designer group comes due."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import make_episode, make_trajectory
from spade_jax import designing, measures, selfplay
from spade_jax.config import Config, DesignerConfig, DiversityConfig, RewardConfig
from spade_jax.curriculum import Curriculum, Pending, PlayTally
from spade_jax.roles.agent import Play
from spade_jax.roles.memory import Memory
from spade_jax.stage import Stage
from spade_jax.telemetry import metrics
from spade_jax.types import (
    Arm,
    Design,
    Environment,
    EnvironmentSource,
    Outcome,
    Role,
    Verdict,
)

WORDS = ("amber anvil arch", "basalt bridge bolt", "cobalt canyon cliff")
SOURCES = [
    EnvironmentSource(f"class A{i}Env: x = {words!r}", "Optimization", "easy", "d")
    for i, words in enumerate(WORDS)
]
ADMITTED = Verdict(True)


def design(index, verdict=ADMITTED, source=True):
    return Design(
        f"d{index}",
        0,
        "Optimization",
        "easy",
        "doc",
        "text",
        make_trajectory(),
        verdict,
        SOURCES[index] if source else None,
    )


def stage_with(designs, step=0, delay=0, **reward):
    """A stage for scoring alone: it neither samples nor plays. Regrets are paid as measured."""
    reward = RewardConfig(**({"regret_caution": "none"} | reward))
    config = Config(designer=DesignerConfig(delay_steps=delay), reward=reward)
    curriculum = Curriculum(Memory(config.memory))
    tallies = {
        d.source.environment_id: PlayTally() for d in designs if d.verdict.admitted and d.source
    }
    curriculum.pending = [Pending(0, step, designs, tallies)]
    curriculum.environments = [
        Environment(d.source, "hint", 0, d.design_id, d.verdict)
        for d in designs
        if d.verdict.admitted and d.source
    ]
    stage = object.__new__(Stage)
    stage.config, stage.curriculum = config, curriculum
    return stage


def plays(index, unhinted, hinted=(), seed=1):
    """Episodes of one environment with the given returns; None is void."""
    return [
        make_episode(
            environment_id=SOURCES[index].environment_id,
            arm=arm,
            seed=seed,
            play_index=play,
            episode_return=value,
            outcome=Outcome.INFRASTRUCTURE if value is None else Outcome.FINISHED,
        )
        for arm, values in ((Arm.UNHINTED, unhinted), (Arm.HINTED, hinted))
        for play, value in enumerate(values)
    ]


def test_agent_groups_are_unhinted_scored_plays_of_one_seed():
    stage = stage_with([design(0)], delay=9)
    episodes = (
        plays(0, [1.0, 0.0, None], [1.0, 1.0, 1.0], seed=1)
        + plays(0, [0.0, 0.0, 0.0], seed=2)
        + plays(0, [1.0, 0.0, 0.0, 0.0], seed=3)
    )
    scored = selfplay.score(stage, episodes, 0, flush=False)
    assert [group.rewards.tolist() for group in scored.groups] == [[1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]
    assert all(group.role is Role.AGENT for group in scored.groups)
    np.testing.assert_allclose(scored.groups[0].advantages, [1.0, -1.0], atol=1e-6)
    assert (scored.agent_groups, scored.zero_variance_groups) == (3, 1)


def test_designer_rewards_are_the_published_blend():
    designs = [design(0), design(1), design(2, Verdict(False, "solution", "lost"))]
    stage = stage_with(designs)
    # win rates 1/2 and 1/4; regrets 1/2 and 0: blend 0.6 + 0.4 = 1, and 0.6 * P(0.25) = 0.6 * 0.4
    episodes = plays(0, [1.0, 0.0], [1.0, 1.0]) + plays(
        1, [1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]
    )
    scored = selfplay.score(stage, episodes, 0, flush=False)
    (group,) = [group for group in scored.groups if group.role is Role.DESIGNER]
    np.testing.assert_allclose(group.rewards, [1.0, 0.24, -0.5], atol=1e-6)
    assert group.advantages[0] > group.advantages[1] > group.advantages[2]
    assert len(group.trajectories) == 3
    assert [regret.mean for regret in scored.regrets] == [0.5, 0.0]
    assert stage.curriculum.pending == []
    # a record by environment, with what was measured
    records = stage.curriculum.memory.records
    assert [(r.win_rate, r.regret) for r in records] == [(0.5, 0.5), (0.25, 0.0)]


def test_memory_ranks_by_what_is_credited_of_a_regret():
    stage = stage_with([design(0), design(1)], regret_caution="shrunk")
    wins = [1.0] * 4 + [0.0] * 12
    episodes = plays(0, [1.0, 0.0], [1.0, 1.0]) + plays(1, wins, [1.0] * 8 + [0.0] * 8)
    scored = selfplay.score(stage, episodes, 0, flush=False)
    assert [regret.mean for regret in scored.regrets] == [0.5, 0.25]  # of 2 pairs, and of 16
    # e^2 = (2 * 1 * 0.25 + 0.5) / 4 = 0.25 and, with standard error^2 0.2 / 16,
    # (16 * 15 * 0.0125 + 0.5) / 256 = 0.013672; paid is r 0.08^2 / (0.08^2 + e^2)
    lucky, sound = (record.regret for record in stage.curriculum.memory.records)
    assert lucky == pytest.approx(0.5 * 0.0064 / 0.2564)
    assert sound == pytest.approx(0.25 * 0.0064 / 0.020072, rel=1e-4)
    assert sound > lucky


@pytest.mark.parametrize(("refresh", "rate"), [(True, 0.75), (False, 0.5)])
def test_a_record_follows_later_plays_unless_it_is_to_stay_as_it_was(refresh, rate):
    stage = stage_with([design(0)], delay=3)
    stage.config = replace(stage.config, memory=replace(stage.config.memory, refresh=refresh))
    selfplay.score(stage, plays(0, [1.0, 0.0], [1.0, 0.0]), 0, flush=False)
    selfplay.score(stage, plays(0, [1.0, 1.0], seed=2), 1, flush=False)
    (record,) = stage.curriculum.memory.records
    assert record.win_rate == rate


@pytest.mark.parametrize(("duplicates", "kept"), [("refuse", 1), ("penalise", 1), ("allow", 2)])
def test_the_memory_holds_near_duplicates_where_they_are_allowed(duplicates, kept):
    alike = replace(SOURCES[1], program=SOURCES[0].program.replace("A0Env", "OtherEnv"))
    stage = stage_with([design(0), replace(design(1), source=alike)])
    stage.config = replace(stage.config, diversity=DiversityConfig(duplicates=duplicates))
    both = plays(0, [1.0, 0.0]) + [
        replace(episode, environment_id=alike.environment_id) for episode in plays(0, [1.0, 0.0])
    ]
    selfplay.score(stage, both, 0, flush=False)
    assert len(stage.curriculum.memory.records) == kept


def test_what_was_not_measured_has_no_reward():
    broken = design(2, Verdict(False, "infrastructure", "our fault"))
    stage = stage_with([design(0), design(1), broken])
    episodes = plays(0, [1.0, 0.0], [1.0, 0.0]) + plays(1, [None, None], [1.0, 1.0])
    scored = selfplay.score(stage, episodes, 0, flush=False)
    assert scored.designer_rewards == [pytest.approx(0.6)]
    assert [group for group in scored.groups if group.role is Role.DESIGNER] == []
    assert len(stage.curriculum.memory.records) == 1
    found = measures.scores(stage, scored)
    assert found["designer/regret_mean_count"] == 1


def test_a_void_play_removes_its_pair_and_its_partner_still_trains():
    stage = stage_with([design(0)])
    scored = selfplay.score(stage, plays(0, [1.0, 0.0, 0.0], [None, 1.0, 1.0]), 0, flush=True)
    assert [(regret.mean, regret.num_pairs) for regret in scored.regrets] == [(1.0, 2)]
    (group,) = [group for group in scored.groups if group.role is Role.AGENT]
    assert len(group.trajectories) == 3


def test_designer_groups_wait_and_collect_plays():
    stage = stage_with([design(0), design(1)], step=4, delay=2)
    first = plays(0, [1.0, 0.0], [1.0, 1.0]) + plays(1, [0.0, 0.0], [0.0, 0.0])
    assert selfplay.score(stage, first, 4, flush=False).designer_rewards == []
    assert selfplay.score(stage, plays(0, [0.0, 0.0]), 5, flush=False).designer_rewards == []
    # later plays move the win rate (1 of 6), not the regret, which belongs to the first step
    scored = selfplay.score(stage, plays(0, [0.0, 0.0]), 6, flush=False)
    assert scored.win_rates == [pytest.approx(1 / 6), 0.0]
    assert scored.regrets[0].mean == 0.5
    expected = 0.6 * (1 - (0.4 - 1 / 6) / 0.25) + 0.4
    assert scored.designer_rewards == [pytest.approx(expected), 0.0]


def test_the_last_step_flushes():
    stage = stage_with([design(0), design(1)], delay=9)
    episodes = plays(0, [1.0, 0.0], [1.0, 0.0]) + plays(1, [0.0, 0.0], [0.0, 0.0])
    assert selfplay.score(stage, [], 0, flush=False).groups == []
    scored = selfplay.score(stage, episodes, 0, flush=True)
    assert Role.DESIGNER in {group.role for group in scored.groups}
    assert stage.curriculum.pending == []


def test_near_duplicates_in_a_cycle_are_refused_in_design_order():
    stage = stage_with([])
    admitted = Verdict(True, measures={"similarity": 0.1}, gates={"duplicate": "passed"})
    texts = [
        "class {}Env: x = '{} one two three four five six seven'".format(*pair)
        for pair in (("A", "amber"), ("B", "amber"), ("C", "cobalt dolmen ember"), ("D", "amber"))
    ]
    designs = [
        replace(design(0, admitted), source=replace(SOURCES[0], program=text)) for text in texts
    ]
    designs[0] = replace(designs[0], verdict=Verdict(False, "random", "luck"))
    judged = designing.refuse_duplicates(stage, designs, {})
    # the first was refused already, so the second is not its duplicate
    assert [d.verdict.gate for d in judged] == ["random", "", "", "duplicate"]
    assert designs[1].source.environment_id in judged[3].verdict.reason
    assert judged[1].verdict.measures == {"similarity": 0.0, "rules_similarity": 0.0}
    assert judged[1].verdict.gates == {"duplicate": "passed"}
    assert judged[3].verdict.measures == {"similarity": 1.0, "rules_similarity": 1.0}
    assert judged[3].verdict.gates == {"duplicate": "refused"}


@pytest.mark.parametrize(
    ("threshold", "duplicates", "gate"),
    [(0.5, "refuse", "duplicate"), (0.98, "refuse", ""), (0.5, "allow", "")],
)
def test_one_game_in_two_codings_is_a_near_duplicate_by_its_texts(threshold, duplicates, gate):
    chosen = DiversityConfig(rules_similarity=threshold, duplicates=duplicates)
    stage = stage_with([])
    stage.config = replace(stage.config, diversity=chosen)
    told = "Guess the number of beans in the jar."
    texts = [
        f"class JarEnv:\n    def reset(self, seed):\n        return {told!r}, {{}}",
        f"SAY = [{told!r}, 'More.']\nclass BeanEnv:\n    x = {{1: 2}}\n    y = lambda: SAY[0][1:]",
    ]
    first, second = designing.refuse_duplicates(
        stage,
        [replace(design(0), source=replace(SOURCES[0], program=text)) for text in texts],
        {},
    )
    assert (first.verdict.gate, second.verdict.gate) == ("", gate)
    assert second.verdict.measures["similarity"] < 0.3
    assert 0.5 < second.verdict.measures["rules_similarity"] < 0.98
    # and one of an earlier cycle counts as much as one of this
    again = [replace(second, verdict=ADMITTED)]
    (judged,) = designing.refuse_duplicates(stage, again, {"jar": texts[0]})
    assert judged.verdict.gate == gate and ("jar" in judged.verdict.reason) == bool(gate)


def test_measures_name_only_what_happened():
    assert measures.designs([]) == {}
    found = measures.designs([design(0), design(1, Verdict(False, "load", "")), design(2)])
    assert found["designer/admitted_frac"] == pytest.approx(2 / 3)
    assert found["designer/refused_load_count"] == 1
    assert found["designer/refused_load_frac"] == pytest.approx(1 / 3)
    assert found["designer/refused_leak_frac"] == 0 and "designer/refused_leak_count" not in found
    assert metrics.check(found) == found
    episodes = measures.episodes(plays(0, [1.0, None, 0.0]))
    assert episodes["agent/return_mean"] == 0.5 and episodes["agent/return_mean_count"] == 2
    assert episodes["agent/outcome_infrastructure_count"] == 1
    assert "agent/return_hinted_mean" not in episodes


def test_a_program_that_breaks_in_play_is_its_authors_fault():
    episodes = plays(0, [1.0, 0.0, None], [1.0, 0.0, 1.0]) + plays(1, [0.0, 0.0], [0.0, 0.0])
    ours = stage_with([design(0), design(1)])
    assert selfplay.score(ours, episodes, 0, flush=False).designer_rewards == [
        pytest.approx(0.6),
        0.0,
    ]
    broken = [
        replace(episode, outcome=Outcome.TIMEOUT) if episode.outcome.void else episode
        for episode in episodes
    ]
    theirs = stage_with([design(0), design(1)])
    assert selfplay.score(theirs, broken, 0, flush=False).designer_rewards == [-0.5, 0.0]


def test_plays_come_in_waves_that_the_pool_can_hold():
    environments = stage_with([design(0), design(1), design(2)]).curriculum.environments
    plans = [
        Play(f"{e}/{i}", environments[e], Arm.UNHINTED, i, 0, 0) for e in range(3) for i in range(5)
    ]
    envs = replace(Config().envs, max_workers=2, instances_per_worker=3)
    waves = selfplay._waves(replace(Config(), envs=envs), plans)
    assert [plan for wave in waves for plan in wave] == plans
    # five plays of one program take two workers
    assert [len(wave) for wave in waves] == [5, 5, 5]
    for wave in waves:
        sizes = [sum(p.environment == e for p in wave) for e in environments]
        assert sum(-(-size // 3) for size in sizes) <= 2
    roomy = replace(Config(), envs=replace(envs, max_workers=6))
    assert selfplay._waves(roomy, plans) == [plans]
