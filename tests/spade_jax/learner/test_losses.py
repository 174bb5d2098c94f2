"""Each loss by hand: its value, its gradient in the current log-probability, what is off the mask;
and segments that do not see each other.
"""

from typing import get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spade_jax.config import Config, LearnerConfig, RewardConfig
from spade_jax.errors import ConfigError
from spade_jax.learner.losses import policy_loss
from spade_jax.learner.losses.entropy import bonus
from spade_jax.learner.losses.kl import kl
from spade_jax.learner.losses.nll import nll
from spade_jax.learner.losses.tis import tis
from spade_jax.learner.losses.tokens import Tokens

OLD = -1.5
LOSSES = get_args(get_type_hints(LearnerConfig)["loss"])


def tokens(ratios, advantages, *, importance=None, segments=None, mask=None, weights=None):
    """One row with these ratios current/old, and old/sampler of `importance`."""
    count = len(ratios)
    importance = [1.0] * count if importance is None else importance
    array = lambda values: jnp.asarray([values], jnp.float32)  # noqa: E731
    old = array([OLD] * count)
    return Tokens(
        current=old + jnp.log(array(ratios)),
        old=old,
        sampler=old - jnp.log(array(importance)),
        advantages=array(advantages),
        mask=jnp.asarray([[True] * count if mask is None else mask]),
        weights=array([1.0] * count if weights is None else weights),
        segment_ids=jnp.asarray([[1] * count if segments is None else segments], jnp.int32),
        roles=jnp.zeros((1, count), jnp.int8),
    )


def loss_of(config: LearnerConfig, row: Tokens):
    """The weighted loss, its gradient in `current`, and how many tokens were clipped."""

    def total(current):
        terms = policy_loss(
            config, row._replace(current=current), tis(config.tis, row, config.tis_cap).weight
        )
        return terms.loss.total, terms

    (value, terms), grad = jax.value_and_grad(total, has_aux=True)(row.current)
    assert terms.loss.count.tolist() == [int(row.mask.sum()), 0]
    return float(value), grad[0].tolist(), int(terms.clipped.sum[0])


NONE, HIGH, LOW = False, True, True
BY_HAND = {
    # ratio, advantage, importance -> loss, gradient, clipped
    "grpo": [
        (1.0, 2.0, 1.0, -2.0, -2.0, NONE),  # descent raises the log-probability of a good token
        (1.0, -2.0, 1.0, 2.0, 2.0, NONE),  # and lowers that of a bad one
        (1.27, 1.0, 1.0, -1.27, -1.27, NONE),  # outside a symmetric 0.2, inside clip-higher
        (1.5, 1.0, 1.0, -1.28, 0.0, HIGH),  # too likely already, and good: clipped at 1.28
        (1.5, -1.0, 1.0, 1.5, 1.5, NONE),  # too likely and bad: never clipped
        (0.5, -1.0, 1.0, 0.8, 0.0, LOW),  # unlikely already, and bad: clipped at 0.8
        (0.5, 1.0, 1.0, -0.5, -0.5, NONE),  # unlikely and good: never clipped
        (1.0, 1.0, 1.9, -1.9, -1.9, NONE),
        (1.0, 1.0, 5.0, -2.0, -2.0, NONE),  # the importance weight is cut to 2
        (1.0, -3.0, 0.25, 0.75, 0.75, NONE),  # a small one is not raised
        (1.0, 0.0, 5.0, 0.0, 0.0, NONE),
    ],
    "cispo": [
        (1.0, 2.0, 1.0, 3.0, -2.0, NONE),  # -A * log-probability
        (1.0, -2.0, 1.0, -3.0, 2.0, NONE),
        (1.5, 1.0, 1.0, -1.28 * (OLD + np.log(1.5)), -1.28, HIGH),  # cut, but not without gradient
        (0.5, -1.0, 1.0, 0.8 * (OLD + np.log(0.5)), 0.8, LOW),
        (1.0, 1.0, 5.0, 3.0, -2.0, NONE),
    ],
    "rloo": [
        (1.0, 2.0, 1.0, 3.0, -2.0, NONE),
        (1.0, -2.0, 1.0, -3.0, 2.0, NONE),
        (1.5, 1.0, 5.0, -2.0 * (OLD + np.log(1.5)), -2.0, NONE),  # no ratio
    ],
    "gspo": [  # a sequence of one token is a token
        (1.0, 2.0, 1.0, -2.0, -2.0, NONE),
        (1.0, -2.0, 1.0, 2.0, 2.0, NONE),
        (1.5, 1.0, 1.0, -1.28, 0.0, HIGH),
        (0.5, -1.0, 1.0, 0.8, 0.0, LOW),
    ],
}
CASES = [(name, *case) for name, cases in BY_HAND.items() for case in cases]


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "importance", "value", "slope", "clipped"), CASES
)
def test_one_token_by_hand(name, ratio, advantage, importance, value, slope, clipped) -> None:
    found = loss_of(LearnerConfig(loss=name), tokens([ratio], [advantage], importance=[importance]))
    assert found[0] == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert found[1] == pytest.approx([slope], rel=1e-5, abs=1e-7)
    assert found[2] == clipped


def test_dr_grpo_is_grpo_under_its_own_mean() -> None:
    config = LearnerConfig(loss="dr_grpo", reduction="constant")
    row = tokens([1.5, 0.9], [1.0, -1.0])
    assert loss_of(config, row) == loss_of(LearnerConfig(), row)
    assert loss_of(config, row)[0] == pytest.approx(-1.28 + 0.9, rel=1e-5)


def test_dual_clip_bounds_what_one_bad_token_can_do() -> None:
    config = LearnerConfig(dual_clip=3.0)
    assert loss_of(config, tokens([20.0], [-1.0])) == (pytest.approx(3.0), [0.0], 1)
    assert loss_of(config, tokens([2.0], [-1.0])) == (
        pytest.approx(2.0, rel=1e-5),
        pytest.approx([2.0], rel=1e-5),
        0,
    )
    assert loss_of(LearnerConfig(), tokens([20.0], [-1.0]))[0] == pytest.approx(20.0, rel=1e-5)
    # a good token is bounded by the ordinary clip
    assert loss_of(config, tokens([20.0], [1.0]))[0] == pytest.approx(-1.28, rel=1e-5)


def test_gspo_clips_whole_sequences_and_keeps_them_apart() -> None:
    """Two segments of a packed row: the first has the geometric mean sqrt(1.2 * 1.0), the second
    2, which is clipped; padding and a masked token are in neither.
    """
    config = LearnerConfig(loss="gspo", reduction="sequence", clip_low=0.05, clip_high=0.2)
    row = tokens(
        [1.2, 1.0, 7.0, 2.0, 2.0, 2.0, 9.0],
        [1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 5.0],
        segments=[1, 1, 1, 2, 2, 2, 0],
        mask=[True, True, False, True, True, True, False],
        weights=[1 / 4, 1 / 4, 0, 1 / 6, 1 / 6, 1 / 6, 0],  # the mean of two sequence means
    )
    ratio = 1.2**0.5
    value, grad, clipped = loss_of(config, row)
    assert value == pytest.approx((-ratio - 3 * 1.2) / 2, rel=1e-5)
    # d ratio / d current = ratio / 2 for each of the two tokens, and the mean of two sequences
    assert grad == pytest.approx([-ratio / 4, -ratio / 4, 0, 0, 0, 0, 0], rel=1e-5, abs=1e-7)
    assert clipped == 3


def test_neighbours_in_a_row_change_nothing() -> None:
    """Every loss and both importance weights: a row of two segments, and each alone."""
    rng = np.random.default_rng(0)
    ratios, importance = np.exp(rng.normal(0, 0.3, 6)), np.exp(rng.normal(0, 0.3, 6))
    advantages = [1.0, 1.0, 1.0, -2.0, -2.0, -2.0]
    for name in ("grpo", "gspo", "cispo", "rloo"):
        for kind in ("token", "sequence", "none"):
            config = LearnerConfig(loss=name, tis=kind)
            both = tokens(ratios, advantages, importance=importance, segments=[1] * 3 + [2] * 3)
            value, grad, _ = loss_of(config, both)
            parts = [
                loss_of(config, tokens(ratios[s], advantages[s], importance=importance[s]))
                for s in (slice(0, 3), slice(3, 6))
            ]
            assert value == pytest.approx(sum(part[0] for part in parts), rel=1e-5)
            assert grad == pytest.approx(parts[0][1] + parts[1][1], rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_old_is_detached_when_it_is_the_same_forward(name) -> None:
    """Then every loss has the policy gradient: the ratio is 1, and not differentiated twice. Two
    sequences, since GSPO has one gradient for all tokens of a sequence.
    """
    row = tokens([1.0] * 4, [3.0, 3.0, -1.0, -1.0], segments=[1, 1, 2, 2])
    config = LearnerConfig(loss=name, reduction="constant")

    def total(current):
        same = row._replace(current=current, old=current)
        return policy_loss(config, same, jnp.ones_like(current)).loss.total

    assert jax.grad(total)(row.current)[0].tolist() == pytest.approx([-3.0, -3.0, 1.0, 1.0])


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "rloo"])
def test_clips_of_no_width_see_the_last_bit_of_a_ratio(name) -> None:
    """What whole updates rely on to show that their ratio is 1 and nothing near it."""
    config = LearnerConfig(loss=name, reduction="constant", clip_low=1e-9, clip_high=1e-9)
    row = tokens([1.0, 1.0], [1.0, -1.0], segments=[1, 2])
    assert loss_of(config, row)[2] == 0
    for toward in (0.0, -9.0):  # a good token counts above 1, a bad one below
        near = jnp.nextafter(row.old, jnp.float32(toward))
        assert loss_of(config, row._replace(current=near))[2] == (2 if name == "cispo" else 1)


@pytest.mark.parametrize(
    ("kind", "expected", "capped"),
    [("token", [0.5, 2.0, 1.0], 1), ("sequence", [1.25, 1.25, 1.0], 0), ("none", [1, 1, 1], 0)],
)
def test_importance_by_hand(kind, expected, capped) -> None:
    """old/sampler of 0.5 and 2.5 in one sequence, whose product is 1.25, and of 1 in another."""
    row = tokens([1, 1, 1], [1, 1, 1], importance=[0.5, 2.5, 1.0], segments=[1, 1, 2])
    found = tis(kind, row, 2.0)
    assert found.weight[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert int(found.capped.sum[0]) == capped
    assert float(tis("sequence", row, 1.2).weight[0, 0]) == pytest.approx(1.2)


def test_the_weight_of_a_long_sequence_does_not_overflow() -> None:
    count = 400
    row = tokens([1] * count, [1] * count, importance=[9.0] * count)
    assert tis("sequence", row, 2.0).weight.max() == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", np.log(2), 1.0),
        ("k2", np.log(2) ** 2 / 2, np.log(2)),
        ("k3", 0.5 - 1 + np.log(2), 0.5),
    ],
)
def test_kl_by_hand(kind, value, slope) -> None:
    """A token twice as likely as under the reference: descent makes it less so."""
    row = tokens([1.0, 1.0], [0.0, 0.0], mask=[True, False])
    reference = jnp.array([[OLD - np.log(2), np.nan]], jnp.float32)

    def total(current):
        return kl(kind, row._replace(current=current), reference).total

    found, grad = jax.value_and_grad(total)(row.current)
    assert float(found) == pytest.approx(value, rel=1e-5)
    assert grad[0].tolist() == pytest.approx([slope, 0.0], rel=1e-5)
    same = kl(kind, row, row.current)
    assert float(same.total) == 0.0 and same.count.tolist() == [1, 0]
    far = kl(kind, row, row.current - 99.0)
    assert float(far.total) == pytest.approx({"k1": 10, "k2": 50, "k3": 9 + np.exp(-10)}[kind])


def test_entropy_bonus_and_nll() -> None:
    row = tokens([1.0, 1.0], [0.0, 0.0], mask=[True, False])
    entropies = jnp.array([[0.7, np.inf]])
    assert float(bonus(row, entropies).total) == pytest.approx(-0.7)
    assert jax.grad(lambda e: bonus(row, e).total)(entropies)[0].tolist() == [-1.0, 0.0]
    assert float(nll(row).total) == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "rloo"])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_masked_tokens_have_no_loss_no_gradient_and_no_count(name, kind) -> None:
    row = tokens([1.0, 1.0], [1.0, 1e9], mask=[True, False])
    noise = jnp.array([[0.0, -500.0]])  # exp(500) overflows
    row = row._replace(
        current=row.current + noise, old=row.old - noise, sampler=row.sampler + noise
    )
    value, grad, clipped = loss_of(LearnerConfig(loss=name, tis=kind), row)
    assert value == pytest.approx(1.5 if name in ("cispo", "rloo") else -1.0)
    assert grad == [-1.0, 0.0] and clipped == 0


def test_settings_that_contradict_a_name_are_refused() -> None:
    for options, expected in (
        ({"loss": "dr_grpo"}, "set learner.reduction to 'constant'"),
        ({"loss": "gspo", "dual_clip": 3.0}, "set learner.dual_clip to 0"),
        ({"dual_clip": 0.5}, "0, or above 1"),
        ({"schedule": "cosine"}, "set learner.decay_steps"),
        ({"decay_steps": 5}, "learner.schedule is 'constant'"),
        ({"kl_coef": -1.0}, "0 or more"),
        ({"max_skipped": 0}, "at least 1"),
    ):
        with pytest.raises(ConfigError, match=expected):
            LearnerConfig(**options)
    with pytest.raises(ConfigError, match=r"needs advantages by reward.agent_norm='rloo'"):
        Config(learner=LearnerConfig(loss="rloo"))
    plain = RewardConfig(agent_norm="mean", designer_norm="mean")
    assert Config(learner=LearnerConfig(loss="dr_grpo", reduction="constant"), reward=plain)


DUAL = {"grpo": 1.5}
EVERY = [
    LearnerConfig(loss=name, dual_clip=DUAL.get(name, 0.0), reduction="constant") for name in LOSSES
]


def every_member(config: LearnerConfig, row: Tokens, given) -> dict[str, tuple]:
    """All sums and counts that a batch can be asked for, under one loss."""
    reference, entropies = given
    found = {"entropy": (bonus(row, entropies),), "nll": (nll(row),)}
    for kind in ("k1", "k2", "k3"):
        found[kind] = (kl(kind, row, reference),)
    for kind in ("token", "sequence", "none"):
        importance = tis(kind, row, config.tis_cap)
        terms = policy_loss(config, row, importance.weight)
        found[kind] = (terms.loss, terms.clipped, importance.capped)
    return found


@pytest.mark.parametrize("config", EVERY, ids=lambda config: config.loss)
def test_padding_order_microbatches_and_mesh_change_nothing(config) -> None:
    """Eight rows of two segments and padding: as they are, in another order with more padding, in
    four microbatches, and split over eight devices.
    """
    rng = np.random.default_rng(0)
    segments = np.tile(np.array([1] * 5 + [2] * 4 + [0] * 3, np.int32), (8, 1))
    real = lambda scale: rng.normal(0, scale, segments.shape).astype(np.float32)  # noqa: E731
    mask = (segments > 0) & (rng.random(segments.shape) < 0.7)
    old = real(1.0) - 3
    whole = Tokens(
        current=old + real(0.3),
        old=old,
        sampler=old + real(0.4),
        advantages=real(1.0),
        mask=mask,
        weights=np.where(mask, np.abs(real(1.0)), 0).astype(np.float32),
        segment_ids=segments,
        roles=np.tile(np.arange(8, dtype=np.int8)[:, None] % 2, (1, 12)),
    )
    given = (old + real(0.2), np.abs(real(1.0)))

    def total(parts, row, reference):
        current, entropies = parts
        found = every_member(config, row._replace(current=current), (reference, entropies))
        # each differently, so that no two gradients make up for one another
        return sum((1 + i) * pairs[0].total for i, pairs in enumerate(found.values())), found

    run = jax.jit(
        lambda row, given: jax.value_and_grad(total, has_aux=True)(
            (row.current, given[1]), row, given[0]
        )
    )
    (_, expected), grads = run(whole, given)
    assert len(expected) == 8 and all(np.abs(grad).max() > 0.1 for grad in grads)
    assert all(int(pairs[0].count.sum()) == mask.sum() for pairs in expected.values())

    order = rng.permutation(8)
    pad = lambda array: np.pad(array[order], ((0, 1), (0, 4)))  # noqa: E731
    (_, moved), moved_grads = run(*jax.tree.map(pad, (whole, given)))
    parts = [
        run(*jax.tree.map(lambda array, at=at: array[at : at + 2], (whole, given)))
        for at in range(0, 8, 2)
    ]
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    (_, spread), spread_grads = run(*jax.device_put((whole, given), split))
    summed = jax.tree.map(lambda *leaves: sum(leaves), *(part[0][1] for part in parts))
    for found in (moved, summed, spread):
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for index, grad in enumerate(grads):
        there = np.asarray(moved_grads[index])[:8, :12]
        np.testing.assert_allclose(there, grad[order], rtol=1e-5, atol=1e-5)
        joined = np.concatenate([part[1][index] for part in parts])
        np.testing.assert_allclose(joined, grad, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(spread_grads[index], grad, rtol=1e-5, atol=1e-5)
