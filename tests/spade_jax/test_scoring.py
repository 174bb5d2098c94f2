"""What environments show and designs earn under each setting, by hand; trackers, penalties,
normalisation, and what the rewards cannot be fooled by.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from helpers import make_episode, make_trajectory
from spade_jax import measures, scoring, selfplay
from spade_jax.config import (
    Config,
    DesignerConfig,
    DiversityConfig,
    LearnerConfig,
    RewardConfig,
    RunConfig,
)
from spade_jax.curriculum import Curriculum, Pending, PlayTally
from spade_jax.errors import ConfigError
from spade_jax.rewards.learning_potential import Tracker
from spade_jax.roles.memory import Memory
from spade_jax.settings import check_fields
from spade_jax.stage import Stage
from spade_jax.telemetry import metrics
from spade_jax.types import Arm, Design, Environment, EnvironmentSource, Outcome, Role, Verdict

SKILL = "Optimization"


def source(index):
    return EnvironmentSource(f"class A{index}Env: pass", SKILL, "easy", "d")


def design(index, gate="", cycle=0):
    """An admitted design, or one that a gate refused."""
    return Design(
        f"d{index}",
        cycle,
        SKILL,
        "easy",
        "doc",
        "text",
        make_trajectory(),
        Verdict(not gate, gate),
        source(index),
    )


def tally(seeds, hinted=(), step=0, outcome=Outcome.FINISHED):
    """Unhinted returns by seed, and the hinted ones of seed 0."""
    found = PlayTally()
    for arm, arms in ((Arm.UNHINTED, seeds), (Arm.HINTED, [hinted])):
        for seed, returns in enumerate(arms):
            for play, value in enumerate(returns):
                found.add(
                    make_episode(
                        arm=arm,
                        seed=seed,
                        play_index=play,
                        step=step,
                        episode_return=value,
                        outcome=Outcome.INFRASTRUCTURE if value is None else outcome,
                    ),
                    paired=True,
                )
    return found


def judged(tallies, reward=None, delay=1, trackers=None, refused=(), **sections):
    config = Config(
        reward=reward or RewardConfig(), designer=DesignerConfig(delay_steps=delay), **sections
    )
    designs = [design(index) for index in range(len(tallies))]
    designs += [design(len(tallies) + i, gate) for i, gate in enumerate(refused)]
    by_id = {source(index).environment_id: found for index, found in enumerate(tallies)}
    moving = {} if trackers is None else trackers
    return scoring.judge(config, [Pending(0, 0, designs, by_id)], moving)


HALF = [[1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        # a win rate of 1/2 on every instance; regret 1/2 from pairs (1, 0): 1 - 1 and 1 - 0
        ({"regret_caution": "none"}, 1.0),
        # shrunk by e^2 = (1/2 + 1/2) / 4
        ({}, 0.6 + 0.4 * 0.5 * 0.0064 / 0.2564 / 0.15),
        ({"regret_caution": "lower_bound"}, 0.6),  # 0.5 - 0.5
        ({"kind": "regret", "regret_caution": "none"}, 0.5),
        # the arms: 1 - 1/2, all four unhinted plays counted
        ({"kind": "regret", "regret_caution": "none", "regret_estimator": "reference"}, 0.5),
        ({"kind": "solve_rate"}, 1.0),
        ({"kind": "frontier"}, 0.0),
        ({"kind": "learning_potential"}, 0.0),  # all of its skill
        ({"kind": "learning_potential", "variance_bonus": True}, 1.0),
        ({"regret_weight": 0.0, "anchor_weight": 0.25}, 0.25),
        ({"regret_weight": 0.0, "anchor_weight": 0.0, "frontier_weight": 1.0}, 0.0),
    ],
)
def test_kinds_by_hand(reward, expected):
    found = judged([tally(HALF, [1.0, 1.0])], RewardConfig(**reward))
    assert found.rewards == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("estimator", "kind", "expected"),
    [
        ("reference", "blend", 0.5),  # the first step alone: 1 - 1/2
        ("reference", "regret", 0.75),  # all plays: 1 - 1/4
        ("paired", "blend", 0.5),
        ("paired", "regret", 0.5),
        ("accumulated", "regret", 0.75),  # two pairs tell no slope
    ],
)
def test_which_plays_the_regret_is_measured_on(estimator, kind, expected):
    found = tally([[1.0, 0.0]], [1.0, 1.0])
    for play in range(2):
        found.add(make_episode(seed=5, step=1, play_index=play, episode_return=0.0), paired=False)
    reward = RewardConfig(kind=kind, regret_estimator=estimator)
    measured = scoring.measure_regret(reward, found)
    assert measured is not None and measured.mean == expected


@pytest.mark.parametrize(
    ("kind", "method", "later", "expected"),
    [
        ("micro_learning_potential", "slope", [1.0, 1.0], 0.5),
        ("micro_learning_potential", "halves", [1.0, 1.0], 0.5),
        ("micro_learning_potential", "slope", [0.0, 0.0], 0.0),  # worse is floored
        ("blend", "slope", [1.0, 1.0], 5.0),  # 0.5 / 0.1
        ("blend", "slope", [0.0, 0.0], -5.0),  # signed in the blend
    ],
)
def test_micro_learning_potential_over_steps(kind, method, later, expected):
    found = tally([[1.0, 0.0]])
    for play, value in enumerate(later):
        found.add(make_episode(seed=5, step=1, play_index=play, episode_return=value), paired=False)
    weights = {"anchor_weight": 0.0, "regret_weight": 0.0, "micro_weight": 1.0}
    reward = RewardConfig(kind=kind, micro_method=method, **weights)
    assert judged([found], reward).rewards == [pytest.approx(expected)]
    # a run that ends after one step leaves it unmeasured, and the design out
    assert judged([tally([[1.0, 0.0]])], reward).rewards == []


MIXTURE = [[1.0] * 4, [0.0] * 4]
CONSTANT = [[0.5] * 4, [0.5] * 4]
DEAD = [[0.0] * 4, [0.0] * 4]


@pytest.mark.parametrize("fooled", [MIXTURE, CONSTANT])
def test_no_more_than_a_dead_environment(fooled):
    """Instances decided by a coin, or a constant return of 0.5, earn nothing; the reference's mean
    return pays both as if they were half won.
    """
    arms = tally(fooled, fooled[0]), tally(DEAD, DEAD[0])
    assert judged(arms).rewards == [0.0, 0.0]
    assert judged(arms).groups == []
    paid = judged(arms, RewardConfig(anchor_on="mean_return"))
    assert paid.rewards == [pytest.approx(0.6), 0.0]
    np.testing.assert_allclose(paid.groups[0].advantages, [1, -1], atol=1e-6)
    found = judged(arms, RewardConfig(anchor_on="wins")).rewards
    assert found == [pytest.approx(0.6 if fooled is MIXTURE else 0.0), 0.0]


def test_half_won_on_every_instance_earns_the_anchor_whole():
    found = judged([tally([[1.0, 0.0, 1.0, 0.0]] * 2, [1.0, 0.0, 1.0, 0.0])])
    assert found.rewards == [pytest.approx(0.6)]
    (assessment,) = found.assessments
    assert (assessment.win_variance, assessment.within_share) == (0.25, 1.0)


@pytest.mark.parametrize(
    ("delay", "expected"),
    [
        # the trackers move first, to 0.15 * 0.2 + 0.85 * 0.6 = 0.54, then 0.75 and 0.45 are read
        (1, [0.21, 0.09]),
        # the base is the tracker before: 0.2
        (0, [0.55, 0.25]),
    ],
)
def test_learning_potential_reads_the_trackers_in_order(delay, expected):
    trackers = {SKILL: Tracker(0.2, 0.2)}
    reward = RewardConfig(kind="learning_potential")
    # means 0.75 and 0.45; together, every play counting once, 0.6
    arms = [tally([[1.0, 0.5]]), tally([[0.45, 0.45]])]
    found = judged(arms, reward, delay, trackers)
    assert found.rewards == pytest.approx(expected)
    assert trackers[SKILL].slow == pytest.approx(0.54)
    assert trackers[SKILL].fast == pytest.approx(0.592)
    assert found.tracker_gaps == [pytest.approx(0.2)]


def test_the_first_cycle_sets_the_trackers():
    reward, trackers = RewardConfig(kind="learning_potential"), {}
    assert judged([tally([[1.0, 0.5]])], reward, 1, trackers).rewards == [0.0]
    assert trackers == {SKILL: Tracker(0.75, 0.75)}
    # two are as far from their own mean, whatever rounding says: nothing to compare
    found = judged([tally([[1.0, 0.7]]), tally([[0.3, 0.2]])], reward)
    assert found.rewards == pytest.approx([0.3, 0.3]) and found.groups == []
    # without a delay the skill had nothing to be compared with
    assert judged([tally([[1.0, 0.5]])], reward, 0, {}).rewards == []
    # an environment without a scored play moves nothing
    assert judged([tally([[None]])], reward, 1, trackers).rewards == []
    assert trackers == {SKILL: Tracker(0.75, 0.75)}


def test_trackers_and_plays_survive_a_checkpoint_to_the_bit():
    reward = RewardConfig(kind="learning_potential")
    config = Config(reward=reward, designer=DesignerConfig(delay_steps=1))

    def stage(curriculum):
        made = object.__new__(Stage)
        made.config, made.curriculum = config, curriculum
        return made

    def plays(step, values):
        return [
            make_episode(
                environment_id=source(0).environment_id, step=step, play_index=i, episode_return=v
            )
            for i, v in enumerate(values)
        ]

    through = Curriculum(Memory(config.memory))
    through.pending = [Pending(0, 0, [design(0)], {source(0).environment_id: PlayTally()})]
    through.trackers = {SKILL: Tracker(0.1 + 0.2, 1 / 3)}
    assert selfplay.score(stage(through), plays(0, [0.1, 0.7]), 0, flush=False).groups
    resumed = Curriculum(Memory(config.memory))
    resumed.restore(json.loads(json.dumps(through.state())))
    both = [
        selfplay.score(stage(curriculum), plays(1, [0.3, 0.9]), 1, flush=False)
        for curriculum in (through, resumed)
    ]
    assert both[0].designer_rewards == both[1].designer_rewards != []
    assert through.trackers == resumed.trackers != {SKILL: Tracker(0.1 + 0.2, 1 / 3)}
    assert through.state() == resumed.state()


PENALTIES = {
    "invalid_reward": -0.1,
    "unsound_reward": -0.2,
    "duplicate_reward": -0.3,
    "hint_reward": -0.4,
    "hang_reward": -0.5,
    "fault_reward": -0.6,
}


def broken(outcome):
    found = tally([[1.0, 0.0]], [1.0, 0.0])
    found.add(make_episode(play_index=9, episode_return=None, outcome=outcome), paired=True)
    return found


@pytest.mark.parametrize(
    ("punish", "expected"),
    [
        ("all", [-0.5, -0.6, -0.1, -0.2, -0.3, -0.4]),
        ("hangs", [-0.5, 0.6]),
        ("none", [0.6, 0.6]),
    ],
)
def test_penalties_by_kind_of_fault(punish, expected):
    arms = [broken(Outcome.TIMEOUT), broken(Outcome.ENV_ERROR)]
    gates = ("fence", "solution", "duplicate", "hint_copy", "infrastructure")
    found = judged(arms, RewardConfig(punish=punish, **PENALTIES), refused=gates)
    assert found.rewards == pytest.approx(expected)
    assert found.num_punished == sum(value < 0 for value in expected)


def test_our_faults_are_nobodys():
    found = judged([broken(Outcome.SAMPLER_ERROR)], RewardConfig(**PENALTIES))
    assert found.rewards == [pytest.approx(0.6)]


def episodes(seeds, index=0):
    return [
        make_episode(
            environment_id=source(index).environment_id,
            seed=seed,
            play_index=play,
            episode_return=value,
        )
        for seed, returns in enumerate(seeds)
        for play, value in enumerate(returns)
    ]


def test_agent_groups_by_instance_or_by_environment():
    played = episodes([[1.0, 0.0], [0.0, 0.0]])
    groups, flat = scoring.agent_groups(RewardConfig(agent_norm="rloo"), played)
    assert ([group.rewards.tolist() for group in groups], flat) == ([[1.0, 0.0]], 1)
    assert groups[0].advantages.tolist() == [1.0, -1.0]
    groups, flat = scoring.agent_groups(RewardConfig(), played, keep_flat=True)
    assert (len(groups), flat, groups[1].advantages.tolist()) == (2, 1, [0.0, 0.0])
    reward = RewardConfig(agent_group="environment", agent_norm="mean")
    (group,), flat = scoring.agent_groups(reward, played)
    assert (group.key, flat) == (source(0).environment_id, 0)
    assert group.advantages.tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("outcome", [outcome for outcome in Outcome if outcome.cut])
def test_the_compact_filter_keeps_a_cut_episode_in_the_mean_alone(outcome):
    played = episodes([[1.0, 0.0, 0.0]])
    played[2] = replace(played[2], outcome=outcome)
    off, on = (
        scoring.agent_groups(RewardConfig(agent_norm="mean", compact_filter=filtered), played)[0][0]
        for filtered in (False, True)
    )
    assert off.advantages.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert on.advantages.tolist() == pytest.approx([2 / 3, -1 / 3])
    assert on.trajectories == off.trajectories[:2] and on.rewards.tolist() == [1.0, 0.0]
    # nothing is left of a group whose episodes were all cut
    cut = [replace(episode, outcome=outcome) for episode in played]
    found = scoring.agent_groups(RewardConfig(compact_filter=True), cut)
    assert found == ([], 1)


def test_an_episode_without_loss_counts_in_its_group():
    played = episodes([[1.0, 0.0]])
    blank = make_trajectory(loss_mask=np.zeros(5, bool))
    played[1] = replace(played[1], trajectory=blank)
    (group,), _ = scoring.agent_groups(RewardConfig(agent_norm="mean"), played)
    assert group.advantages.tolist() == [0.5] and len(group.trajectories) == 1


def test_designs_of_equal_rewards_are_left_out_or_kept():
    arms = [tally(HALF, HALF[0]), tally(HALF, HALF[0])]
    assert judged(arms).groups == []
    (group,) = judged(arms, learner=LearnerConfig(zero_variance="keep")).groups
    assert group.advantages.tolist() == [0.0, 0.0] and len(group.trajectories) == 2


def test_roles_are_balanced_by_weight_or_as_in_the_reference():
    played = episodes([[1.0, 0.0], [0.0, 0.0]]) + episodes([[0.0] * 4], 1)
    agents, _ = scoring.agent_groups(RewardConfig(), played)
    arms = [tally(HALF, HALF[0]), tally(DEAD, DEAD[0])]
    sections = {"run": RunConfig(cycle_steps=4), "learner": LearnerConfig(designer_weight=0.5)}
    ours = Config(**sections)
    reward = RewardConfig(designer_norm="mean", designer_scale="reference", punish="none")
    found = judged(arms, reward)
    groups, weights, scale = scoring.balance(ours, agents, found, played)
    assert (weights, scale) == ({Role.AGENT: 1.0, Role.DESIGNER: 0.5}, None)
    np.testing.assert_allclose(groups[1].advantages, [0.3, -0.3])
    theirs = replace(ours, reward=reward)
    groups, weights, scale = scoring.balance(theirs, agents, found, played)
    # eight plays and two designs, four steps apart: 8 / 2 * 4; two of the ten trajectories are
    # plays with contrast, and every trajectory weighs a tenth
    assert scale == 16.0
    np.testing.assert_allclose(groups[1].advantages, [4.8, -4.8])
    assert weights == {Role.AGENT: 0.2, Role.DESIGNER: 0.2}
    # a step without a designer group has no scale
    nothing = scoring.judge(theirs, [], {})
    _, weights, scale = scoring.balance(theirs, agents, nothing, played)
    assert (weights, scale) == ({Role.AGENT: 0.25, Role.DESIGNER: 0.0}, None)


def test_what_was_measured_is_logged_and_nothing_else():
    config = Config(reward=RewardConfig(designer_scale="reference"))
    stage = object.__new__(Stage)
    stage.config, stage.curriculum = config, Curriculum(Memory(config.memory))
    arms = [tally(HALF, [1.0, 1.0]), tally(MIXTURE), tally([[None]])]
    found = judged(arms, refused=["fence"])
    assert found.rewards == pytest.approx([0.6 + 0.4 * 0.5 * 0.0064 / 0.2564 / 0.15, -0.5])
    scored = scoring.Scored([], {}, 32.0, 1, 1, found)
    logged = metrics.check(measures.scores(stage, scored))
    assert logged["designer/regret_mean"] == 0.5
    assert logged["designer/regret_credited_mean"] == pytest.approx(0.5 * 0.0064 / 0.2564)
    assert logged["designer/win_variance_mean"] == 0.25
    assert logged["designer/win_variance_mean_count"] == 2
    assert logged["designer/within_seeds_frac"] == 0.5
    assert logged["designer/anchor_mean"] == 0.5
    assert logged["designer/punished_frac"] == 0.5
    assert logged["designer/scale"] == 32.0
    assert logged["designer/tracker_gap_mean"] == 0.0
    assert "designer/micro_potential_mean" not in logged
    empty = scoring.Scored([], {}, None, 0, 0, scoring.judge(config, [], {}))
    assert set(measures.scores(stage, empty)) == {"designer/pending_count", "memory/size_count"}


def test_hinted_plays_are_made_only_for_rewards_that_need_them():
    assert RewardConfig().needs_regret and RewardConfig(kind="regret").needs_regret
    for kind in ("solve_rate", "learning_potential", "micro_learning_potential", "frontier"):
        assert not RewardConfig(kind=kind).needs_regret
    assert not RewardConfig(regret_weight=0.0).needs_regret


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"hang_reward": -2.0}, ["reward.hang_reward=-2.0", "-1 to 0"]),
        ({"unsound_reward": 0.5}, ["reward.unsound_reward=0.5", "-1 to 0"]),
        ({"tracker_fast": 0.5}, ["tracker_fast", "(0.85, 0.5)", "tracker_slow < tracker_fast"]),
        ({"regret_prior": 0.0}, ["reward.regret_prior=0.0", "positive"]),
        ({"regret_errors": -1.0}, ["reward.regret_errors=-1.0"]),
        ({"frontier_scale": 0.0}, ["reward.frontier_scale=0.0"]),
        ({"anchor_weight": 0.0, "regret_weight": 0.0}, ["reward.anchor_weight", "a positive weig"]),
        ({"micro_weight": math.inf}, ["reward.micro_weight=inf"]),
    ],
)
def test_bad_settings_are_named(values, parts):
    with pytest.raises(ConfigError) as raised:
        RewardConfig(**values)
    assert all(part in str(raised.value) for part in parts), raised.value


@pytest.mark.parametrize("name", ["kind", "regret_estimator", "regret_caution", "designer_scale"])
def test_an_unknown_option_is_named(name):
    """Set past the checks of the tests, as a config file would."""
    reward = RewardConfig()
    object.__setattr__(reward, name, "glory")
    with pytest.raises(ConfigError, match=f"reward.{name}='glory' is not a valid"):
        check_fields("reward", reward)


def nearly(item, **likeness):
    return replace(item, verdict=replace(item.verdict, measures=likeness))


@pytest.mark.parametrize(
    ("duplicates", "expected"),
    [
        # 0.6 each; by code or by rules as near as the settings say costs 0.3
        ("penalise", [0.6, 0.3, 0.3, 0.6, -0.4]),
        ("allow", [0.6, 0.6, 0.6, 0.6, -0.4]),
        ("refuse", [0.6, 0.6, 0.6, 0.6, -0.4]),  # such designs were refused before
    ],
)
def test_a_near_duplicate_that_was_played_earns_less_where_it_is_penalised(duplicates, expected):
    config = Config(
        reward=RewardConfig(**PENALTIES),
        designer=DesignerConfig(delay_steps=1),
        diversity=DiversityConfig(duplicates=duplicates, rules_similarity=0.9),
    )
    designs = [
        design(0),
        nearly(design(1), similarity=0.95, rules_similarity=0.1),
        nearly(design(2), similarity=0.1, rules_similarity=0.9),
        nearly(design(3), similarity=0.949, rules_similarity=0.899),
        nearly(design(4, "hint"), similarity=1.0),  # refused: its penalty is the gate's
    ]
    half = [[1.0, 0.0, 1.0, 0.0]]
    tallies = {source(index).environment_id: tally(half, half[0]) for index in range(4)}
    found = scoring.judge(config, [Pending(0, 0, designs, tallies)], {})
    assert found.rewards == pytest.approx(expected)
    assert found.num_punished == (3 if duplicates == "penalise" else 1)


def test_each_skill_is_logged_by_itself():
    config = Config(reward=RewardConfig(kind="solve_rate"))
    other = "Spatial Reasoning"
    items = [design(0), replace(design(1), skill=other)]
    arms = [tally(HALF, [1.0, 1.0]), tally(DEAD)]
    by_id = {source(index).environment_id: found for index, found in enumerate(arms)}
    stage = object.__new__(Stage)
    stage.config, stage.curriculum = config, Curriculum(Memory(config.memory))
    stage.curriculum.trackers = {other: Tracker(0.5, 0.25)}
    stage.curriculum.environments = [
        Environment(replace(source(index), skill=item.skill), "", 0, "d", item.verdict)
        for index, item in enumerate(items)
    ]
    pending = [Pending(0, 0, items, by_id)]
    scored = scoring.Scored([], {}, None, 0, 0, scoring.judge(config, pending, {}))
    played = episodes([[1.0, 0.0, 0.0, 0.0]]) + episodes([[-1.0]], 1)
    played += [replace(played[0], arm=Arm.HINTED), replace(played[0], outcome=Outcome.TIMEOUT)]
    assert metrics.check(measures.skills(stage, played, scored)) == {
        "skill/optimization_win_frac": 0.25,
        "skill/optimization_win_frac_count": 4,
        "skill/optimization_return_mean": 0.25,
        "skill/optimization_return_mean_count": 4,
        "skill/optimization_regret_mean": 0.5,
        "skill/optimization_regret_mean_count": 1,
        "skill/optimization_reward_mean": 1.0,
        "skill/optimization_reward_mean_count": 1,
        "skill/spatial_reasoning_win_frac": 0.0,
        "skill/spatial_reasoning_win_frac_count": 1,
        "skill/spatial_reasoning_return_mean": -1.0,
        "skill/spatial_reasoning_return_mean_count": 1,
        "skill/spatial_reasoning_reward_mean": 0.0,
        "skill/spatial_reasoning_reward_mean_count": 1,
        "skill/spatial_reasoning_tracker_fast": 0.5,
        "skill/spatial_reasoning_tracker_slow": 0.25,
    }


def test_easy_and_hard_environments_are_logged_beside_the_learnable():
    stage = object.__new__(Stage)
    stage.curriculum = Curriculum(Memory(Config().memory))
    arms = [tally([wins]) for wins in ([1.0] * 5, [1.0] * 4 + [0.0], [1.0] + [0.0] * 4, [0.0])]
    scored = scoring.Scored([], {}, None, 0, 0, judged(arms))
    logged = metrics.check(measures.scores(stage, scored))
    shares = [logged[f"designer/{name}_frac"] for name in ("learnable", "easy", "hard")]
    assert shares == [0.5, 0.25, 0.25] and logged["designer/easy_frac_count"] == 4
