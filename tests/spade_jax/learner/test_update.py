"""Several updates on one rollout, the frozen reference, replayed routing, and adapters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import make_trajectory, pack_groups, tree_allclose
from models import layout, transformer
from models.execution import PLAIN, Execution
from models.sharding import build_mesh
from spade_jax.config import BatchConfig, Config, LearnerConfig
from spade_jax.errors import ConfigError
from spade_jax.learner import lora
from spade_jax.learner.batch import Batch
from spade_jax.learner.checkpoint import Checkpoints
from spade_jax.learner.step import Learner
from spade_jax.learner.update import make_batches, update
from spade_jax.telemetry.metrics import check
from spade_jax.types import Role

WEIGHTS = {Role.AGENT: 1.0, Role.DESIGNER: 0.5}


def one_device():
    return build_mesh(1, 1, 1, 1, jax.devices()[:1])


def batches_of(learner, groups, version: int = 0):
    config = BatchConfig(row_tokens=32, device_tokens=64)
    return make_batches(learner, groups, config, WEIGHTS, policy_version=version)


def test_old_logprobs_are_those_before_the_first_of_several_steps(model, groups, params) -> None:
    """Two parts, twice: each trajectory is in one part, and from the second step on ratios have
    moved from those of the start, so that clips bind.
    """
    config = LearnerConfig(lr=3e-2, minibatches=2, epochs=2, kl_coef=0.1)
    learner = Learner(model, config, one_device())
    batches = batches_of(learner, groups)
    assert len(batches) == 2
    for batch in batches:  # the parts have both roles
        assert set(batch.rows.roles[batch.rows.loss_mask]) == {0, 1}
    tokens = sum(np.count_nonzero(batch.rows.segment_ids) for batch in batches)
    assert tokens == sum(len(t.tokens) for group in groups for t in group.trajectories)

    frozen = learner.frozen(jax.tree.map(jnp.copy, params))
    state = learner.init(params)
    olds = learner.logprobs(state.params, batches)
    by_hand = []
    hand = learner.init(jax.tree.map(jnp.copy, params))
    for _ in range(2):
        for batch, old in zip(batches, olds, strict=True):
            rows = batch.rows._replace(old_logprobs=old, reference_logprobs=old)
            hand, metrics = learner.step(hand, dataclasses.replace(batch, rows=rows))
            by_hand.append(metrics)
    state, metrics = update(learner, state, batches, frozen)
    assert int(state.step) == 4
    assert tree_allclose(state, hand, rtol=1e-5, atol=1e-6)
    assert check(metrics) == metrics
    assert by_hand[0]["loss/clip_frac"] == 0 < by_hand[3]["loss/clip_frac"]
    assert by_hand[0]["policy/kl_agent_mean"] < 1e-6 < by_hand[1]["policy/kl_agent_mean"]
    assert metrics["loss/clip_frac"] == pytest.approx(
        np.mean([step["loss/clip_frac"] for step in by_hand])
    )
    # the gap is between the sampler and the weights that it sampled with, at every step
    gap = "sampler/learner_logprob_gap_max"
    assert [step.get(gap) for step in by_hand[:2]] == [step.get(gap) for step in by_hand[2:]]
    assert metrics[gap] == max(step[gap] for step in by_hand if gap in step)


def test_the_distance_of_the_weights_is_compiled_ahead(model, params) -> None:
    """Else a run compiles after its last step."""
    learner = Learner(model, LearnerConfig(), build_mesh(2, 2, 1, 2))
    start = learner.on_device(params)
    moved = jax.tree.map(lambda leaf: leaf * 1.25, start)
    learner.compile()
    compiled = []

    def note(event: str, *_: float, **__: str) -> None:
        compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        found = learner.distance(moved, start)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert found == pytest.approx(0.25, rel=1e-6)
    assert "/jax/core/compile/backend_compile_duration" not in compiled


@pytest.mark.parametrize(("memory", "kind"), [("device", "k1"), ("host", "k3")])
def test_the_first_step_is_at_no_distance_from_the_reference(
    model, groups, params, memory, kind
) -> None:
    config = LearnerConfig(lr=1e-2, kl_coef=0.5, kl_kind=kind, reference_memory=memory)
    learner = Learner(model, config, one_device())
    frozen = learner.frozen(jax.tree.map(jnp.copy, params))
    (leaf, *_) = jax.tree.leaves(frozen)
    assert leaf.sharding.memory_kind == ("pinned_host" if memory == "host" else "device")
    state, metrics = update(learner, learner.init(params), batches_of(learner, groups), frozen)
    assert abs(metrics["policy/kl_agent_mean"]) <= 1e-6
    assert abs(metrics["policy/kl_designer_mean"]) <= 1e-6
    _, metrics = update(learner, state, batches_of(learner, groups, 1), frozen)
    assert abs(metrics["policy/kl_agent_mean"]) > 1e-5


def test_no_token_to_learn_from_makes_no_batch(learner, groups) -> None:
    silent = [
        dataclasses.replace(group, trajectories=tuple(make_trajectory(4, 0) for _ in group.rewards))
        for group in groups
    ]
    assert batches_of(learner, silent) == [] == batches_of(learner, [])


def test_replayed_experts_are_the_ones_computed(model, groups, params, learner) -> None:
    """The experts that the router would choose change nothing, others do."""
    config = LearnerConfig(lr=1e-2, router_replay=True)
    replaying = Learner(model, config, one_device())

    def routed(choose):
        return [
            dataclasses.replace(
                group,
                trajectories=tuple(
                    dataclasses.replace(t, routing=choose(t)) for t in group.trajectories
                ),
            )
            for group in groups
        ]

    @jax.jit
    def choices(tokens, segments):
        positions = jnp.arange(32, dtype=jnp.int32)[None]
        out = transformer.forward(model, params, tokens, positions, segment_ids=segments)
        return out.routing.chosen[:, 0]

    def own(trajectory):
        length = len(trajectory.tokens)
        tokens = np.pad(trajectory.tokens, (0, 32 - length))[None]
        segments = (np.arange(32, dtype=np.int32) < length).astype(np.int32)[None]
        found = np.array(choices(tokens, segments).transpose(1, 0, 2))[:length].astype(np.int16)
        found[-1] = -1  # the sampler never ran the last token
        return found

    def other(trajectory):
        shape = (len(trajectory.tokens), model.num_layers, 2)
        return np.broadcast_to(np.array([3, 1], np.int16), shape)

    plain, _ = learner.gradients(params, pack_groups(groups))
    same, sums = replaying.gradients(params, pack_groups(routed(own), learner=config))
    assert tree_allclose(same, plain, rtol=1e-4, atol=1e-6)
    differs, sums = replaying.gradients(params, pack_groups(routed(other), learner=config))
    assert not tree_allclose(differs, plain, rtol=1e-2, atol=1e-3)
    load = np.asarray(sums.expert_load)
    assert (load[:, [1, 3]] == 87).all() and (load[:, [0, 2]] == 0).all()


LORA = LearnerConfig(lr=1e-2, lora_rank=3, lora_alpha=6.0, kl_coef=0.2)


def test_adapters_learn_and_the_weights_stay(model, learner, groups, params, tmp_path) -> None:
    plain, learner = learner, Learner(model, LORA, one_device())
    state = learner.init(params)
    assert state.adapters is not None
    before = jax.tree.map(np.array, state.params)
    assert tree_allclose(jax.tree.map(np.asarray, learner.policy(state)), before, rtol=0, atol=0)

    # The gradient of B is that of the weight, times scale * A^T; that of A is zero with B.
    batch = pack_groups(groups, weights=WEIGHTS)
    full, _ = plain.gradients(state.params, batch)
    grads, _ = learner.gradients(state.params, batch, adapters=state.adapters)
    for name, spec in (("query", "er,ehd->rhd"), ("output", "hdr,hde->re")):
        a = state.adapters["blocks"][1]["attention"][name]["a"][...]
        of_weight = full["blocks"][1]["attention"][name][...]
        found = grads["blocks"][1]["attention"][name]
        np.testing.assert_allclose(found["b"][...], 2.0 * jnp.einsum(spec, a, of_weight), atol=1e-5)
        assert not np.any(found["a"][...])
    down = state.adapters["blocks"][0]["moe"]["down"]["a"][...]
    expected = 2.0 * jnp.einsum("xmr,xme->xre", down, full["blocks"][0]["moe"]["down"][...])
    np.testing.assert_allclose(grads["blocks"][0]["moe"]["down"]["b"][...], expected, atol=1e-5)

    for version in range(2):
        state, metrics = update(learner, state, batches_of(learner, groups, version))
    assert tree_allclose(jax.tree.map(np.asarray, state.params), before, rtol=0, atol=0)
    assert metrics["policy/kl_agent_mean"] > 1e-6  # from the weights that adapters are added to
    policy = learner.policy(state)
    moved = {
        path[-2:]
        for path, leaf in jax.tree_util.tree_leaves_with_path(
            jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), policy, before)
        )
        if leaf
    }
    assert len(moved) == 6  # four of attention and two of the experts

    with Checkpoints(tmp_path, 1, {}) as checkpoints:
        checkpoints.save(0, state, {})
        _, again, _ = checkpoints.restore(learner.abstract_state())
    assert tree_allclose(again, state, rtol=0, atol=0)


COARSE = dataclasses.replace(PLAIN, param_dtype="bfloat16")


def test_weights_too_coarse_to_train_are_refused(model) -> None:
    """The weight in the message: numbers of bfloat16 there are too far apart for a step."""
    with pytest.raises(
        ConfigError,
        match=r"param_dtype='bfloat16' .* learner.lr=1e-06 .* above 0.0005; .*lora_rank",
    ):
        Config(execution=Execution(param_dtype="bfloat16"))
    above = jnp.asarray([0.0006, 0.02, 1.0], jnp.bfloat16)
    assert np.array_equal(above + jnp.asarray(1e-6, jnp.bfloat16), above)
    with pytest.raises(ConfigError, match=r"param_dtype='bfloat16'"):
        Learner(model, LearnerConfig(), one_device(), COARSE)
    assert Config(execution=Execution(param_dtype="bfloat16"), learner=LORA)


def test_adapters_on_coarse_weights_lose_nothing(model, groups, params) -> None:
    """Beneath adapters the weights may be bfloat16: the gradients of microbatches add up in
    float32, and every number of the adapters moves, by less than bfloat16 would tell apart.
    """
    config = dataclasses.replace(LORA, lr=1e-4, kl_coef=0.0)
    learner = Learner(model, config, one_device(), COARSE)
    state = learner.init(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.adapters)} == {"float32"}
    rng = np.random.default_rng(2)
    drawn = jax.tree.map(
        lambda leaf: jnp.asarray(rng.uniform(0.1, 0.2, leaf.shape), jnp.float32), state.adapters
    )
    state = state._replace(adapters=drawn)
    before = jax.tree.map(np.array, drawn)
    batch = pack_groups(groups, rows=1, weights=WEIGHTS)
    alone = [
        learner.gradients(state.params, Batch(rows, (1,)), adapters=drawn)[0]
        for rows in batch.microbatches()
    ]
    assert len(alone) == 3
    found, _ = learner.gradients(state.params, batch, adapters=drawn)
    expected = jax.tree.map(lambda *parts: sum(parts), *alone)
    assert tree_allclose(found, expected, rtol=1e-6, atol=1e-9)

    kept = jax.tree.map(np.array, state.params)
    state, _ = learner.step(state, batch)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - b), state.adapters, before)
    steps = np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(moved)])
    assert (steps > 5e-5).mean() > 0.99  # and what lies next to 0.1 in bfloat16 is 4.9e-4 away
    assert tree_allclose(state.params, kept, rtol=0, atol=0)

    policy = learner.policy(state)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(policy)} == {"bfloat16"}
    flat = [
        np.concatenate([np.asarray(leaf).astype(np.float64).ravel() for leaf in leaves])
        for leaves in map(jax.tree.leaves, (policy, kept))
    ]
    distance = np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])
    assert learner.distance(policy, state.params) == pytest.approx(distance, rel=1e-5)


def test_adapters_in_the_other_layout_and_over_devices(model, groups, params) -> None:
    learner = Learner(model, LORA, one_device())
    execution = dataclasses.replace(PLAIN, layers="scanned", remat="full")
    scanned = Learner(model, LORA, one_device(), execution)
    sharded = Learner(model, LORA, build_mesh(1, 2, 2, 2))
    state = learner.init(jax.tree.map(jnp.copy, params))
    rng = np.random.default_rng(1)
    assert state.adapters is not None
    drawn = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(0, 0.1, leaf.shape), jnp.float32), state.adapters
    )
    expected = lora.merge(params, drawn, LORA)
    merged = lora.merge(layout.stacked(params), layout.stacked(drawn), LORA)
    assert tree_allclose(layout.per_layer(merged), expected, rtol=1e-6, atol=1e-6)

    batch = pack_groups(groups, weights=WEIGHTS)
    grads, sums = learner.gradients(params, batch, adapters=drawn)
    other, other_sums = scanned.gradients(
        layout.stacked(params), batch, adapters=layout.stacked(drawn)
    )
    assert float(other_sums.total) == pytest.approx(float(sums.total), abs=1e-5)
    assert tree_allclose(layout.per_layer(other), grads, rtol=1e-3, atol=1e-5)

    over = sharded.init(jax.tree.map(np.asarray, params))
    spread = jax.device_put(
        jax.tree.map(np.asarray, drawn),
        jax.tree.map(lambda leaf: leaf.sharding, over.adapters),
    )
    batch = pack_groups(groups, rows=1, weights=WEIGHTS, shards=sharded.shards)
    found, _ = sharded.gradients(over.params, batch, adapters=spread)
    assert tree_allclose(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, grads),
                         rtol=1e-3, atol=1e-5)  # fmt: skip
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(over.adapters))
