"""Designer groups that wait: what they are trained on when they come due, after how many steps, and
the importance weight of completions that older weights sampled.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from helpers import make_episode, make_trajectory
from spade_jax import selfplay
from spade_jax.config import BatchConfig, Config, DesignerConfig, RewardConfig, RunConfig
from spade_jax.curriculum import Curriculum, Pending, PlayTally
from spade_jax.errors import ConfigError
from spade_jax.learner.batch import make_batch, make_entries
from spade_jax.learner.losses.tis import tis
from spade_jax.learner.losses.tokens import Tokens
from spade_jax.learner_config import LearnerConfig
from spade_jax.roles.memory import Memory
from spade_jax.stage import Stage
from spade_jax.types import Design, EnvironmentSource, Role, Verdict

SKILL = "Optimization"
DELAY = 3


def source(name):
    return EnvironmentSource(f"class {name}Env: x = '{name} {name * 2}'", SKILL, "easy", "d")


def design(name, step, logprobs=(-1.0, -1.0, -1.0)):
    trajectory = make_trajectory(
        num_sampled=3,
        sampler_logprobs=np.array([0, 0, 0, *logprobs], np.float32),
        policy_version=step,
    )
    verdict = Verdict(True)
    return Design(name, 0, SKILL, "easy", "doc", "text", trajectory, verdict, source(name))


def pending(cycle, step, *designs):
    tallies = {item.source.environment_id: PlayTally() for item in designs}
    return Pending(cycle, step, list(designs), tallies)


def stage_with(*waiting, delay=DELAY):
    config = Config(
        designer=DesignerConfig(delay_steps=delay), reward=RewardConfig(kind="solve_rate")
    )
    stage = object.__new__(Stage)
    stage.config, stage.curriculum = config, Curriculum(Memory(config.memory))
    stage.curriculum.pending = list(waiting)
    return stage


def plays(name, step, *values):
    return [
        make_episode(
            environment_id=source(name).environment_id,
            step=step,
            seed=step,
            play_index=index,
            episode_return=value,
        )
        for index, value in enumerate(values)
    ]


def reloaded(stage):
    """The stage of a run that was resumed from a checkpoint."""
    fresh = stage_with()
    fresh.curriculum.restore(json.loads(json.dumps(stage.curriculum.state())))
    return fresh


@pytest.mark.parametrize("resume_before", [None, 1, 2, 3])
def test_the_reward_is_of_all_plays_since_and_survives_a_resume(resume_before):
    stage = stage_with(pending(0, 0, design("a", 0), design("b", 0)))
    # wins of a: 1 of 2 in each of four steps; of b: 1, 0, 0, 0 of 2 make 1/8
    for step in range(DELAY + 1):
        if step == resume_before:
            stage = reloaded(stage)
        episodes = plays("a", step, 1.0, 0.0) + plays("b", step, float(step == 0), 0.0)
        scored = selfplay.score(stage, episodes, step, flush=False)
        assert bool(scored.designer_rewards) == (step == DELAY)
    assert scored.win_rates == [0.5, 0.125]
    assert scored.designer_rewards == [1.0, 0.0]
    assert stage.curriculum.pending == []


def test_groups_of_two_cycles_wait_side_by_side_and_need_no_new_designs():
    """A delay of two cycles: each comes due by its own step, whether or not that step wrote any."""
    stage = stage_with(delay=8)
    due = {}
    for step in range(12):
        if step in (0, 4):
            name = "ab"[step // 4]
            stage.curriculum.pending.append(
                pending(step // 4, step, design(name, step), design(name * 2, step))
            )
        name = "ab"[min(step // 4, 1)]
        episodes = plays(name, step, 1.0, 0.0) + plays(name * 2, step, 0.0, 0.0)
        scored = selfplay.score(stage, episodes, step, flush=step == 11)
        groups = [group.key for group in scored.groups if group.role is Role.DESIGNER]
        if groups:
            due[step] = groups
    # the second would come due in step 12, and is trained in the last one instead
    assert due == {8: [f"0/{SKILL}"], 11: [f"1/{SKILL}"]}


def test_a_delay_longer_than_the_run_is_refused_before_anything_is_made():
    Config(run=RunConfig(steps=4), designer=DesignerConfig(delay_steps=4))
    with pytest.raises(
        ConfigError,
        match=r"designer\.delay_steps=5 is longer than the run of run\.steps=4.*at most 4",
    ):
        Config(run=RunConfig(steps=4), designer=DesignerConfig(delay_steps=5))


def test_an_old_completion_is_weighted_by_what_its_tokens_have_become():
    """Tokens that the weights of three steps later find e^0.5 times as likely weigh as much more;
    e^2 times as likely is cut to the cap of 2; less likely ones weigh less.
    """
    old = design("a", 0, logprobs=(-1.5, -3.0, -1.0))
    stage = stage_with(pending(0, 0, old, design("b", 0)))
    for step in range(DELAY + 1):
        stage = reloaded(stage)
        episodes = plays("a", step, 1.0, 0.0) + plays("b", step, 0.0, 0.0)
        scored = selfplay.score(stage, episodes, step, flush=False)
    groups = [group for group in scored.groups if group.role is Role.DESIGNER]
    learner = LearnerConfig()
    batch = make_batch(
        make_entries(groups, learner),
        BatchConfig(row_tokens=16),
        {Role.DESIGNER: 1.0},
        policy_version=DELAY,
        learner=learner,
    )
    assert not batch.rows.fresh.any()
    rows = next(batch.microbatches())
    old_place = rows.loss_mask & (rows.segment_ids == 1)
    assert float(groups[0].advantages[0]) == pytest.approx(1.0, abs=1e-6)
    now = np.zeros(rows.loss_mask.shape, np.float32)
    now[old_place] = [-1.0, -1.0, -2.0]
    tokens = Tokens(
        current=jnp.asarray(now),
        old=jnp.asarray(now),
        sampler=jnp.asarray(rows.sampler_logprobs),
        advantages=jnp.asarray(rows.advantages),
        mask=jnp.asarray(old_place),
        weights=jnp.asarray(rows.weights),
        segment_ids=jnp.asarray(rows.segment_ids),
        roles=jnp.asarray(rows.roles).astype(jnp.int32),
    )
    found = tis(learner.tis, tokens, learner.tis_cap)
    weights = np.array([np.exp(0.5), 2.0, np.exp(-1.0)])
    np.testing.assert_allclose(found.weight[old_place], weights, rtol=1e-5)
    assert int(found.capped.sum.sum()) == 1
