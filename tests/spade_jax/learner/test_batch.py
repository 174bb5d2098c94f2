"""Packing: every token exactly once, in order, with its share of the loss; refusals."""

from dataclasses import replace

import numpy as np
import pytest

from helpers import make_group, make_trajectory
from spade_jax.config import BatchConfig
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.learner.batch import ROLES, make_batch
from spade_jax.types import Group, Role

EVEN = {Role.AGENT: 1.0, Role.DESIGNER: 1.0}


def pack(groups, row_tokens: int = 16, rows: int = 2, weights=EVEN, **overrides):
    config = BatchConfig(row_tokens=row_tokens, microbatch_rows=rows)
    return make_batch(groups, config, weights, policy_version=0, **overrides)


def group_of(*lengths: int, role: Role = Role.AGENT) -> Group:
    """Trajectory i holds tokens 100 i, 100 i + 1, ..., two of them prompt."""
    trajectories = tuple(
        make_trajectory(2, length - 2, tokens=np.arange(100 * i, 100 * i + length, dtype=np.int32))
        for i, length in enumerate(lengths)
    )
    values = np.arange(1.0, len(lengths) + 1)
    return Group(role, "group", trajectories, values, values)


def test_first_fit_decreasing_by_hand() -> None:
    batch = pack([group_of(5, 9, 7, 5, 4)])  # 9 7 | 5 5 4: the second 5 after the first
    assert batch.tokens.shape == (1, 2, 16)
    assert batch.segment_ids[0, 0].tolist() == [1] * 9 + [2] * 7
    assert batch.segment_ids[0, 1].tolist() == [1] * 5 + [2] * 5 + [3] * 4 + [0] * 2
    assert batch.positions[0, 1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0]
    first_tokens = batch.tokens[0, 1][batch.positions[0, 1] == 0][:3]
    assert first_tokens.tolist() == [0, 300, 400]
    assert batch.advantages[0, 1].tolist() == [1.0] * 5 + [4.0] * 5 + [5.0] * 4 + [0.0] * 2
    assert batch.loss_mask[0, 1].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]


def test_every_trajectory_is_there_exactly_once_and_whole() -> None:
    rng = np.random.default_rng(1)
    group = group_of(*rng.integers(3, 17, 40).tolist())
    batch = pack([group], rows=4)
    found = []
    for tokens, segments in zip(
        batch.tokens.reshape(-1, 16), batch.segment_ids.reshape(-1, 16), strict=True
    ):
        found += [tokens[segments == segment].tolist() for segment in range(1, segments.max() + 1)]
    assert sorted(found) == sorted(trajectory.tokens.tolist() for trajectory in group.trajectories)
    again = pack([group], rows=4)
    assert all(np.array_equal(a, b) for a, b in zip(batch, again, strict=True))


def test_rows_are_padded_to_microbatches_and_to_the_mesh() -> None:
    group = group_of(16, 16, 16)
    assert pack([group], rows=2).tokens.shape == (2, 2, 16)
    batch = pack([group], rows=2, row_multiple=4)
    assert batch.tokens.shape == (1, 4, 16)
    assert not batch.segment_ids[0, 3].any() and not batch.weights[0, 3].any()
    assert pack([group], rows=6, row_multiple=4).tokens.shape == (1, 8, 16)


def test_a_token_weighs_its_role_over_the_tokens_of_the_role() -> None:
    groups = [group_of(6, 8), group_of(5, role=Role.DESIGNER)]
    batch = pack(groups, weights={Role.AGENT: 1.0, Role.DESIGNER: 0.5})
    agent = batch.weights[batch.loss_mask & (batch.roles == ROLES.index(Role.AGENT))]
    designer = batch.weights[batch.loss_mask & (batch.roles == ROLES.index(Role.DESIGNER))]
    assert agent == pytest.approx([1 / 10] * 10)
    assert designer == pytest.approx([0.5 / 3] * 3)
    assert not batch.weights[~batch.loss_mask].any()


def test_the_first_token_never_has_a_loss() -> None:
    trajectory = make_trajectory(0, 4)  # sampled from its first token on
    batch = pack(
        [make_group(trajectories=(trajectory,), rewards=np.ones(1), advantages=np.ones(1))]
    )
    assert batch.loss_mask[0, 0, :4].tolist() == [False, True, True, True]
    assert batch.weights.sum() == pytest.approx(1.0)
    assert trajectory.loss_mask.all()  # the caller's arrays are left alone


def test_fresh_and_temperature_follow_the_trajectory() -> None:
    stale = make_trajectory(2, 3, policy_version=-1, temperature=0.7)
    group = make_group(trajectories=(make_trajectory(2, 4), stale))
    batch = pack([group])
    assert batch.fresh[0, 0].tolist() == [True] * 6 + [False] * 10
    assert batch.temperatures[0, 0] == pytest.approx([1.0] * 6 + [0.7] * 5 + [1.0] * 5)


def test_meaningless_logprobs_off_the_mask_do_not_enter() -> None:
    trajectory = make_trajectory(
        2, 2, sampler_logprobs=np.array([np.nan, np.inf, -1, -2], np.float32)
    )
    batch = pack(
        [make_group(trajectories=(trajectory,), rewards=np.ones(1), advantages=np.ones(1))]
    )
    assert batch.sampler_logprobs[0, 0, :4].tolist() == [0, 0, -1, -2]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"batch\.row_tokens=16 .* 17 tokens"):
        pack([group_of(5, 17)])
    with pytest.raises(ValueError, match="no tokens"):
        pack([make_group(trajectories=(make_trajectory(), make_trajectory(0, 0)))])
    with pytest.raises(ConfigError, match="no weight for designer"):
        pack([group_of(5, role=Role.DESIGNER)], weights={Role.AGENT: 1.0})
    with pytest.raises(ValueError, match="finite"):
        pack([replace(group_of(5, 5), advantages=np.array([1.0, np.nan]))])
    with pytest.raises(SpadeError, match="nothing to train on"):
        pack([make_group(trajectories=(make_trajectory(3, 0), make_trajectory(1, 0)))])
    with pytest.raises(SpadeError, match="nothing to train on"):
        pack([])
