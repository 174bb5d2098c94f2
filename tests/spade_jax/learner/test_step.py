"""The step against a naive loss: packing, microbatches, shardings, metrics, broken gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import pack_groups, tree_allclose
from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN
from models.sharding import build_mesh
from spade_jax.config import LearnerConfig
from spade_jax.errors import ConfigError, SpadeError
from spade_jax.learner import step
from spade_jax.learner.batch import Batch
from spade_jax.learner.objective import Setting, accumulate, no_sums
from spade_jax.learner.step import Learner
from spade_jax.telemetry.metrics import check
from spade_jax.types import Role

WEIGHTS = {Role.AGENT: 1.0, Role.DESIGNER: 0.5}
SEQ = 32


def pack(groups, rows: int = 2, shards: int = 1, version: int = 0) -> Batch:
    return pack_groups(groups, SEQ, rows, weights=WEIGHTS, shards=shards, version=version)


def changed(batch: Batch, **arrays) -> Batch:
    return dataclasses.replace(batch, rows=batch.rows._replace(**arrays))


@pytest.fixture(scope="module")
def reference(model, groups):
    """Loss and gradient of one trajectory a row, in one batch, without masks, shifts or packing."""
    trajectories = [
        (group.role, t, a)
        for group in groups
        for t, a in zip(group.trajectories, group.advantages, strict=True)
    ]
    padded = [np.pad(t.tokens, (0, SEQ - len(t.tokens))) for _, t, _ in trajectories]
    segments = np.stack([np.arange(SEQ) < len(t.tokens) for _, t, _ in trajectories]).astype(
        np.int32
    )
    positions = np.tile(np.arange(SEQ, dtype=np.int32), (len(trajectories), 1))
    inputs = [jnp.array(value) for value in (np.stack(padded), positions, segments)]

    def loss(params):
        hidden = transformer.forward(
            model, params, inputs[0], inputs[1], segment_ids=inputs[2]
        ).hidden
        scores = transformer.logits(model, params, hidden)
        totals, counts, gaps = dict.fromkeys(WEIGHTS, 0.0), dict.fromkeys(WEIGHTS, 0), []
        for row, (role, t, advantage) in enumerate(trajectories):
            table = jax.nn.log_softmax(scores[row] / t.temperature, axis=-1)
            places = np.flatnonzero(t.loss_mask)
            current = table[places - 1, t.tokens[places]]
            old = jax.lax.stop_gradient(current)
            sampler = t.sampler_logprobs[places]
            importance = jnp.minimum(jnp.exp(old - sampler), 2.0)
            totals[role] -= (importance * jnp.exp(current - old)).sum() * float(advantage)
            counts[role] += len(places)
            if t.policy_version == 0:
                gaps.append(jnp.abs(old - sampler))
        means = {role: totals[role] / counts[role] for role in WEIGHTS}
        return sum(WEIGHTS[role] * means[role] for role in WEIGHTS), (means, jnp.concatenate(gaps))

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def test_packed_microbatches_equal_the_naive_loss(learner, groups, params, reference) -> None:
    batch = pack(groups)
    assert batch.num_microbatches == 2 and batch.rows.segment_ids.max() == 2  # both are at work
    grads, sums = learner.gradients(params, batch)
    (value, (means, gaps)), expected = reference(params)
    assert float(sums.total) == pytest.approx(float(value), abs=1e-6)
    assert tree_allclose(grads, expected, rtol=1e-4, atol=1e-6)

    norm = float(jnp.sqrt(sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(expected))))
    _, metrics = learner.step(learner.init(params), batch)
    assert metrics["loss/agent"] == pytest.approx(float(means[Role.AGENT]), abs=1e-6)
    assert metrics["loss/designer"] == pytest.approx(float(means[Role.DESIGNER]), abs=1e-6)
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert metrics["sampler/learner_logprob_gap_max"] == pytest.approx(float(gaps.max()), abs=1e-5)
    assert metrics["sampler/learner_logprob_gap_mean"] == pytest.approx(
        float(gaps.mean()), abs=1e-5
    )


def test_packing_and_order_change_nothing(learner, groups, params) -> None:
    """Rows shared by two trajectories, against a row for each, in the same compiled shape."""
    shared = pack(groups)
    pieces = [pack([group]) for group in groups]
    counts = [piece.rows.loss_mask.sum() for piece in pieces]
    alone, total = None, 0.0
    for group, count in zip(groups, counts, strict=True):
        for index in range(len(group.trajectories)):
            one = type(group)(
                group.role,
                group.key,
                group.trajectories[index : index + 1],
                group.rewards[:1],
                group.advantages[index : index + 1],
            )
            single = pack([one])
            share = single.rows.loss_mask.sum() / count
            grads, sums = learner.gradients(params, single)
            scaled = jax.tree.map(lambda leaf, share=share: leaf * jnp.float32(share), grads)
            alone = scaled if alone is None else jax.tree.map(jnp.add, alone, scaled)
            total += float(sums.total) * share
    grads, sums = learner.gradients(params, shared)
    assert float(sums.total) == pytest.approx(total, abs=1e-6)
    assert tree_allclose(grads, alone, rtol=1e-4, atol=1e-6)


def test_what_is_masked_or_padded_does_not_matter(learner, groups, params) -> None:
    batch = pack(groups)
    noise = np.random.default_rng(0)
    rows = batch.rows
    off, padding = ~rows.loss_mask, rows.segment_ids == 0

    def draw(array):
        return np.where(off, noise.normal(0, 50, off.shape).astype(np.float32), array)

    other = changed(
        batch,
        sampler_logprobs=draw(rows.sampler_logprobs),
        untruncated_logprobs=draw(rows.untruncated_logprobs),
        advantages=draw(rows.advantages),
        tokens=np.where(padding, noise.integers(0, 64, off.shape).astype(np.int32), rows.tokens),
        roles=np.where(off, 1, rows.roles).astype(np.int8),
        fresh=rows.fresh | off,
    )
    grads, sums = learner.gradients(params, batch)
    other_grads, other_sums = learner.gradients(params, other)
    assert tree_allclose(other_sums, sums, rtol=1e-6, atol=1e-7)
    assert tree_allclose(other_grads, grads, rtol=1e-5, atol=1e-7)


def test_sharded_equals_unsharded(learner, sharded_learner, groups, params) -> None:
    assert (learner.shards, sharded_learner.shards) == (1, 4)
    batch = pack(groups, rows=1, shards=sharded_learner.shards)
    assert batch.sizes == (4,)  # one microbatch, where the unsharded learner takes two
    expected, expected_sums = learner.gradients(params, pack(groups))
    state = sharded_learner.init(jax.tree.map(np.asarray, params))
    for leaf, moment in zip(
        *map(jax.tree.leaves, (state.params, state.opt_state[1][0].mu)), strict=True
    ):
        assert moment.sharding == leaf.sharding
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state.params))
    grads, sums = sharded_learner.gradients(state.params, batch)
    assert tree_allclose(sums, expected_sums, rtol=1e-4, atol=1e-5)
    assert tree_allclose(grads, expected, rtol=1e-3, atol=1e-6)


def test_steps_learn_and_count(learner, groups, params) -> None:
    """With NLL the losses fall, both roles have a gradient, and the metrics of GRPO are absent."""
    state, batch = learner.init(params), pack(groups)
    state, first = learner.step(state, batch, "nll")
    for _ in range(5):
        state, last = learner.step(state, batch, "nll")
    assert int(state.step) == 6
    assert last["loss/agent"] < 0.8 * first["loss/agent"]
    assert last["loss/designer"] < 0.8 * first["loss/designer"]
    assert first["optim/lr"] == pytest.approx(1e-2)
    assert first["optim/agent_grad_norm"] > 0 and first["optim/designer_grad_norm"] > 0
    assert not [name for name in last if "gap" in name or "entropy" in name or "clip" in name]


def test_only_measured_metrics_are_there(learner, groups, params) -> None:
    stale = pack(groups[:1], version=7)
    # every other token was nearly impossible for its sampler, so that its weight is capped
    odd = np.arange(SEQ) % 2 == 1
    stale = changed(
        stale, sampler_logprobs=np.where(odd, np.float32(-20), stale.rows.sampler_logprobs)
    )
    _, metrics = learner.step(learner.init(params), stale)
    assert check(metrics) == metrics  # every name is declared
    assert not [name for name in metrics if "designer" in name or "gap" in name]
    assert 0.9 * np.log(64) < metrics["policy/entropy_agent_mean"] <= np.log(64)
    assert metrics["loss/clip_frac"] == 0.0  # measured: one update per batch cannot clip
    assert 0.0 < metrics["loss/tis_clip_frac"] < 1.0
    assert 1 / 4 <= metrics["moe/expert_load_max_frac"] <= 1 / 2
    assert metrics["batch/tokens_count"] == 45


def test_a_role_without_advantage_has_no_gradient(learner, groups, params) -> None:
    flat = type(groups[1])(
        groups[1].role, groups[1].key, groups[1].trajectories, groups[1].rewards, np.zeros(2)
    )
    _, metrics = learner.step(learner.init(params), pack([groups[0], flat]))
    assert metrics["optim/designer_grad_norm"] == 0.0
    assert metrics["optim/agent_grad_norm"] > 0.0


def test_gradients_that_are_not_finite_are_skipped_and_end_the_run_in_a_row(
    learner, groups, params, caplog
) -> None:
    state, batch = learner.init(params), pack(groups)
    before = jax.tree.map(lambda leaf: np.array(leaf), state)
    mask = batch.rows.loss_mask
    broken = changed(batch, advantages=np.where(mask, np.float32(np.inf), batch.rows.advantages))
    for count in (1, 2):
        state, metrics = learner.step(state, broken)
        assert metrics["optim/skipped_count"] == 1.0 and "optim/grad_norm" not in metrics
        assert check(metrics) == metrics  # what is left is finite
        assert f"skipped, {count} in a row of at most 2" in caplog.text
    assert int(state.skipped) == 2
    kept = state._replace(skipped=before.skipped)
    assert tree_allclose(jax.tree.map(np.asarray, kept), before, rtol=0, atol=0)
    state, metrics = learner.step(state, batch)
    assert (int(state.skipped), int(state.step)) == (0, 1) and "optim/skipped_count" not in metrics
    for _ in range(2):
        state, _ = learner.step(state, broken)
    with pytest.raises(SpadeError, match=r"update 1: .* 3 updates in a row .*max_skipped=3"):
        learner.step(state, broken)


def test_moments_wait_on_the_host_and_in_half_the_size(model, groups, params, learner) -> None:
    """On the host they are the same bits; in bfloat16, nearly the same update."""
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    batch = pack(groups)
    found = {}
    for name, options in (
        ("plain", {}),
        ("host", {"optimizer_memory": "host"}),
        ("half", {"moments_dtype": "bfloat16"}),
    ):
        own = Learner(model, LearnerConfig(lr=1e-2, **options), mesh)
        state = own.init(jax.tree.map(jnp.copy, params))
        for _ in range(2):
            state, _ = own.step(state, batch)
        found[name] = state
        moment = jax.tree.leaves(state.opt_state[1][0].mu)[0]
        assert moment.sharding.memory_kind == ("pinned_host" if name == "host" else "device")
        assert moment.dtype == ("bfloat16" if name == "half" else "float32")
        same = jax.tree.map(lambda a, b: a.dtype == b.dtype, state, own.abstract_state())
        assert all(jax.tree.leaves(same))
    host = jax.tree.map(np.asarray, found["host"])
    assert tree_allclose(host, jax.tree.map(np.asarray, found["plain"]), rtol=0, atol=0)
    assert tree_allclose(found["half"].params, found["plain"].params, rtol=0, atol=4e-3)
    assert not tree_allclose(found["half"].params, found["plain"].params, rtol=0, atol=1e-6)


def test_memory_that_the_device_lacks_is_refused(model, monkeypatch) -> None:
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    monkeypatch.setattr(step, "device_memories", lambda mesh: ["device"])
    with pytest.raises(ConfigError, match=r"optimizer_memory='host' .* set .* to 'device'"):
        Learner(model, LearnerConfig(optimizer_memory="host"), mesh)
    with pytest.raises(ConfigError, match="reference_memory='host'"):
        Learner(model, LearnerConfig(kl_coef=0.1, reference_memory="host"), mesh)


def test_scores_of_a_row_never_exist(groups) -> None:
    """The compiled update of a large vocabulary: its temporaries are far below the scores of the
    two rows, and grow with the chunk.
    """
    wide = TransformerConfig(
        vocab_size=16_384, num_layers=1, embed=16, num_heads=1, num_kv_heads=1, head_dim=16,
        mlp=16, num_experts=1, experts_per_token=1,
    )  # fmt: skip
    mesh = build_mesh(1, 1, 1, 1, jax.devices()[:1])
    rows = pack_groups(groups, 512, 2).rows
    rows = jax.tree.map(lambda a: np.concatenate([a, a]), rows)
    temporary = {}
    for chunk in (32, 256):
        setting = Setting(wide, LearnerConfig(head_tokens=chunk), mesh, PLAIN)
        params = transformer.abstract_params(wide)
        run = jax.jit(functools.partial(accumulate, setting), donate_argnums=(0, 1))
        sums = jax.eval_shape(lambda: no_sums(wide))
        lowered = run.lower(params, sums, params, None, rows, jnp.float32(1))
        temporary[chunk] = lowered.compile().memory_analysis().temp_size_in_bytes
    scores = 2 * 512 * 16_384 * 4
    assert temporary[32] < scores / 5 < temporary[256] < 1.2 * scores
