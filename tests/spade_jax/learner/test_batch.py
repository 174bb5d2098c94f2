"""Packing: every token exactly once, in order, with its share of the loss; dealing to devices;
refusals.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from helpers import make_group, make_trajectory, pack_groups
from spade_jax.config import BatchConfig, LearnerConfig
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.learner import packing
from spade_jax.learner.batch import ROLES
from spade_jax.types import Group, Role

EVEN = {Role.AGENT: 1.0, Role.DESIGNER: 1.0}


def pack(groups, **options):
    return pack_groups(groups, 16, **options).rows


def group_of(*lengths: int, role: Role = Role.AGENT, key: str = "group") -> Group:
    """Trajectory i holds tokens 100 i, 100 i + 1, ..., two of them prompt."""
    trajectories = tuple(
        make_trajectory(2, length - 2, tokens=np.arange(100 * i, 100 * i + length, dtype=np.int32))
        for i, length in enumerate(lengths)
    )
    values = np.arange(1.0, len(lengths) + 1)
    return Group(role, key, trajectories, values, values)


def alone(trajectory) -> Group:
    return make_group(trajectories=(trajectory,), rewards=np.ones(1), advantages=np.ones(1))


def test_first_fit_decreasing_by_hand() -> None:
    rows = pack([group_of(5, 9, 7, 5, 4)])  # 9 7 | 5 5 4: the second 5 after the first
    assert rows.tokens.shape == (2, 16)
    assert rows.segment_ids[0].tolist() == [1] * 9 + [2] * 7
    assert rows.segment_ids[1].tolist() == [1] * 5 + [2] * 5 + [3] * 4 + [0] * 2
    assert rows.positions[1].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0]
    first_tokens = rows.tokens[1][rows.positions[1] == 0][:3]
    assert first_tokens.tolist() == [0, 300, 400]
    assert rows.advantages[1].tolist() == [1.0] * 5 + [4.0] * 5 + [5.0] * 4 + [0.0] * 2
    assert rows.loss_mask[1].tolist() == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(("rows", "shards"), [(4, 1), (3, 2), (1, 8), (8, 4)])
def test_every_trajectory_is_there_exactly_once_and_whole(rows: int, shards: int) -> None:
    rng = np.random.default_rng(1)
    group = group_of(*rng.integers(3, 17, 40).tolist())
    batch = pack_groups([group], 16, rows, shards=shards)
    found = []
    for part in batch.microbatches():
        assert len(part.tokens) % shards == 0 and len(part.tokens) <= rows * shards
        for tokens, segments in zip(part.tokens, part.segment_ids, strict=True):
            live = range(1, segments.max() + 1)
            found += [tokens[segments == segment].tolist() for segment in live]
    assert sorted(found) == sorted(trajectory.tokens.tolist() for trajectory in group.trajectories)
    again = pack_groups([group], 16, rows, shards=shards)
    assert all(
        np.array_equal(a, b) for a, b in zip(batch.rows, again.rows, strict=True) if a is not None
    )


def test_trajectories_begin_at_multiples() -> None:
    """9 tokens take 12 of a row of 16, so that 4 more fit; the last of a row needs no filling."""
    rows = pack([group_of(9, 4, 5, 11, 3)], align=4)  # 11 4 | 9 3 | 5
    starts = [
        np.flatnonzero((row == 0) & (ids > 0)).tolist()
        for row, ids in zip(rows.positions, rows.segment_ids, strict=True)
    ]
    assert sorted(starts) == [[0], [0, 12], [0, 12]]
    assert np.count_nonzero(rows.segment_ids) == 9 + 4 + 5 + 11 + 3
    assert not rows.weights[rows.segment_ids == 0].any()
    whole = pack([group_of(9, 7)], align=8)  # 7 after 16: another row
    assert whole.tokens.shape == (2, 16)
    assert pack([group_of(8, 7)], align=8).tokens.shape == (1, 16)


def test_an_alignment_that_is_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"align_tokens=17 .* between 1 and batch.row_tokens=16"):
        BatchConfig(row_tokens=16, device_tokens=16, align_tokens=17)
    with pytest.raises(ConfigError, match=r"batch.align_tokens=0"):
        BatchConfig(align_tokens=0)


def test_the_last_microbatch_is_no_larger_than_it_must_be() -> None:
    """Nine rows of eight a microbatch: the last has half of eight."""
    batch = pack_groups([group_of(*[16] * 9)], 16, 8)
    assert batch.sizes == (8, 4) and batch.efficiency == 9 / 12
    assert pack_groups([group_of(*[16] * 13)], 16, 8).sizes == (8, 8)
    assert not batch.rows.segment_ids[9].any() and not batch.rows.weights[9].any()
    assert pack_groups([group_of(16, 16, 16)], 16, 2).sizes == (2, 1)
    assert pack_groups([group_of(16, 16, 16)], 16, 1, shards=4).sizes == (4,)
    assert pack_groups([group_of(16, 16, 16)], 16, 2, shards=4).sizes == (4,)


def test_a_real_mix_fills_nine_tenths() -> None:
    """A step's worth of 50 to 1,500 tokens, on one device and on eight."""
    lengths = np.random.default_rng(0).integers(50, 1501, 192).tolist()
    for shards in (1, 8):
        batch = pack_groups([group_of(*lengths)], 2048, 4, shards=shards)
        assert batch.efficiency >= 0.9
        assert np.count_nonzero(batch.rows.segment_ids) == sum(lengths)


def test_devices_get_like_attention_to_compute() -> None:
    """Long trajectories cost more than as many tokens in short ones: a device has not all of them.

    In file order, the first device would have all the work.
    """
    lengths = [1024] * 8 + [64] * 128  # 8 rows of one, and 8 rows of 16
    rows = packing.pack(lengths, 1024)
    places, sizes = packing.arrange(rows, lengths, shards=4, device_rows=4)
    assert sizes == (16,)
    costs = [
        sum(packing.cost(row, lengths) for row in places[start : start + 4])
        for start in range(0, 16, 4)
    ]
    assert max(costs) == min(costs)
    # With a row a device, those that wait for one another are alike.
    places, sizes = packing.arrange(rows, lengths, shards=8, device_rows=1)
    each = [[packing.cost(row, lengths) for row in places[at : at + 8]] for at in (0, 8)]
    assert [len(set(costs)) for costs in each] == [1, 1]


def test_parts_of_a_rollout_share_its_roles_and_tokens() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(50, 1500, 60).tolist()
    kinds = ["agent"] * 50 + ["designer"] * 10
    parts = packing.split(lengths, kinds, 4)
    assert sorted(index for part in parts for index in part) == list(range(60))
    tokens = [sum(lengths[index] for index in part) for part in parts]
    assert max(tokens) < 1.1 * min(tokens)
    assert min(Counter(kinds[index] for index in part)["designer"] for part in parts) >= 2
    assert packing.split([5, 5], ["agent", "agent"], 4) == [[0], [1]]


SHARES = {  # sequences of 4, 6 and 2 loss tokens, the first two in one group
    "token": [1 / 12, 1 / 12, 1 / 12],
    "sequence": [1 / 12, 1 / 18, 1 / 6],
    "group": [1 / 20, 1 / 20, 1 / 4],
    "constant": [1 / 30, 1 / 30, 1 / 30],
}


@pytest.mark.parametrize("reduction", SHARES)
def test_shares_of_each_reduction_by_hand(reduction) -> None:
    learner = LearnerConfig(reduction=reduction, constant_tokens=10)
    groups = [group_of(6, 8, key="a"), group_of(4, key="b"), group_of(5, role=Role.DESIGNER)]
    weights = {Role.AGENT: 1.0, Role.DESIGNER: 0.5}
    rows = pack_groups(groups, 64, 1, weights=weights, learner=learner).rows
    agent = rows.roles == ROLES.index(Role.AGENT)
    for length, share in zip((6, 8, 4), SHARES[reduction], strict=True):
        one = next(
            rows.weights[0][rows.segment_ids[0] == segment]
            for segment in range(1, 5)
            if (rows.segment_ids[0] == segment).sum() == length
        )
        assert one.tolist() == pytest.approx([0.0, 0.0] + [share] * (length - 2))
    total = 12 / 30 if reduction == "constant" else 1.0
    assert rows.weights[agent & rows.loss_mask].sum() == pytest.approx(total)
    designer = 0.5 * 3 / 10 if reduction == "constant" else 0.5
    assert rows.weights[~agent].sum() == pytest.approx(designer)
    assert not rows.weights[~rows.loss_mask].any()


def test_the_first_token_never_has_a_loss() -> None:
    trajectory = make_trajectory(0, 4)  # sampled from its first token on
    rows = pack([alone(trajectory)])
    assert rows.loss_mask[0, :4].tolist() == [False, True, True, True]
    assert rows.weights.sum() == pytest.approx(1.0)
    assert trajectory.loss_mask.all()  # the caller's arrays are left alone


def test_fresh_and_temperature_follow_the_trajectory() -> None:
    stale = make_trajectory(2, 3, policy_version=-1, temperature=0.7)
    rows = pack([make_group(trajectories=(make_trajectory(2, 4), stale))])
    assert rows.fresh[0].tolist() == [True] * 6 + [False] * 10
    assert rows.temperatures[0] == pytest.approx([1.0] * 6 + [0.7] * 5 + [1.0] * 5)


def test_meaningless_logprobs_off_the_mask_do_not_enter() -> None:
    values = np.array([np.nan, np.inf, -1, -2], np.float32)
    rows = pack([alone(make_trajectory(2, 2, sampler_logprobs=values))])
    assert rows.sampler_logprobs[0, :4].tolist() == [0, 0, -1, -2]


def test_the_importance_weight_reads_the_logprobs_that_are_named() -> None:
    whole = np.array([0, 0, -3, -4], np.float32)
    group = alone(make_trajectory(2, 2, untruncated_logprobs=whole))
    rows = pack([group])
    assert rows.sampler_logprobs[0, 2:4] == pytest.approx(
        group.trajectories[0].sampler_logprobs[2:]
    )
    assert rows.untruncated_logprobs[0, :4].tolist() == whole.tolist()
    rows = pack([group], learner=LearnerConfig(tis_logprobs="untruncated"))
    assert rows.sampler_logprobs[0, :4].tolist() == whole.tolist()


def test_overlong_trajectories_are_trained_or_only_counted_by_their_group() -> None:
    long = make_trajectory(2, 6, truncated=True)
    group = make_group(trajectories=(make_trajectory(2, 4), long))
    assert pack([group]).loss_mask.sum() == 10
    rows = pack([group], learner=LearnerConfig(overlong="mask"))
    assert rows.loss_mask.sum() == 4 and rows.weights.sum() == pytest.approx(1.0)
    assert rows.advantages[rows.loss_mask].tolist() == [1.0] * 4  # as the pair gave it


def test_routing_is_packed_with_its_tokens() -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 4, (length, 3, 2)).astype(np.int16) for length in (6, 5)]
    drawn[1][-1] = -1  # the last token was never run
    trajectories = tuple(make_trajectory(2, len(routing) - 2, routing=routing) for routing in drawn)
    group = make_group(trajectories=trajectories)
    assert pack([group]).routing is None
    replay = LearnerConfig(router_replay=True)
    routing = pack([group], learner=replay).routing
    assert routing is not None and routing.shape == (1, 16, 3, 2)
    assert np.array_equal(routing[0, :6], drawn[0]) and np.array_equal(
        routing[0, 6:10], drawn[1][:4]
    )
    assert (routing[0, 10:] == [0, 1]).all()
    with pytest.raises(ConfigError, match="agent trajectory carries no routing"):
        pack([group_of(5)], learner=replay)


def test_refusals() -> None:
    with pytest.raises(ConfigError, match=r"batch\.row_tokens=16 .* 17 tokens"):
        pack([group_of(5, 17)])
    with pytest.raises(ConfigError, match=r"batch\.device_tokens=100 does not hold one row"):
        BatchConfig(row_tokens=200, device_tokens=100)
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
