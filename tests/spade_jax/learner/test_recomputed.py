"""Optimiser steps of a two-layer model against NumPy in double precision: each loss off policy, so
that ratios are not 1 and clips bind, and two steps on policy.

The model, the losses and AdamW are written again here from their formulas. The gradient is that of
the complex step: Im f(x + ih) / h, one parameter at a time, which is exact to rounding for the
analytic functions a transformer is made of. On which side of a clip a token is, its real part says.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import make_trajectory, pack_groups
from models import transformer
from models.config import TransformerConfig
from models.sharding import build_mesh
from models.weights import named_leaves
from spade_jax.config import LearnerConfig
from spade_jax.learner.batch import Batch
from spade_jax.learner.step import Learner
from spade_jax.learner.update import update
from spade_jax.types import Group, Role

MODEL = TransformerConfig(
    vocab_size=11, num_layers=2, embed=8, num_heads=2, num_kv_heads=1, head_dim=4, mlp=6,
    num_experts=1, experts_per_token=1, scale_embedding=False, norm_eps=1e-5,
)  # fmt: skip
LEARNER = LearnerConfig(
    lr=0.05, kl_coef=0.3, entropy_coef=0.02, max_grad_norm=0.5, weight_decay=0.2, tis_cap=1.5
)
STEP = 1e-30
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # of float32; some gradients are larger than 1


def norm(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + MODEL.norm_eps) * scale


def rotate(x):
    """Pairs (i, i + 2) of a head of four turn by position * theta^(-2i / 4)."""
    angles = np.arange(len(x))[:, None] * 10_000.0 ** (-np.arange(0, 4, 2) / 4)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :2], x[..., 2:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def softmax(x):
    weights = np.exp(x)
    return weights / weights.sum(-1, keepdims=True)


def log_softmax(w, tokens):
    """Log-probabilities of the next token at each place."""
    x = w["embedding"][tokens]
    seen = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for layer in range(2):
        p = {
            name.split(".", 2)[2]: a for name, a in w.items() if name.startswith(f"blocks.{layer}.")
        }
        h = norm(x, p["attention_norm.scale"])
        query, key, value = (
            np.einsum("se,ehd->shd", h, p[f"attention.{name}"])
            for name in ("query", "key", "value")
        )
        scores = np.einsum("qhd,kd->hqk", rotate(query), rotate(key)[:, 0]) / 2.0
        weights = np.where(seen, np.exp(scores), 0.0)
        weights = weights / weights.sum(-1, keepdims=True)
        heads = np.einsum("hqk,kd->qhd", weights, value[:, 0])
        x = x + np.einsum("shd,hde->se", heads, p["attention.output"])
        h = norm(x, p["moe_norm.scale"])
        gate, up = np.einsum("se,egm->gsm", h, p["moe.gate_up"][0])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["moe.down"][0]
    scores = norm(x, w["final_norm.scale"]) @ w["embedding"].T
    return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def surrogate(config, advantage, current, old, clipped):
    """The policy loss of each token of one sequence; adds what a clip took to `clipped`."""
    low, high = 1 - config.clip_low, 1 + config.clip_high
    change = current - old
    if config.loss == "rloo":
        return -advantage * current
    if config.loss == "gspo":
        change = np.full_like(change, change.mean())
    ratio = np.exp(change)
    bounded = np.clip(ratio.real, low, high)
    if config.loss == "cispo":
        clipped += (bounded != ratio.real).tolist()
        return -bounded * advantage * current
    plain, bounded = -advantage * ratio, -advantage * bounded
    lost = bounded > plain.real
    found = np.where(lost, bounded, plain)
    if config.dual_clip and advantage < 0:
        over = found.real > -advantage * config.dual_clip
        found, lost = np.where(over, -advantage * config.dual_clip, found), lost | over
    clipped += lost.tolist()
    return found


def importance(config, change):
    """The weights of one sequence, for the sum or each of its changes of log-probability."""
    change = {"token": change, "sequence": np.full_like(change, change.sum()), "none": 0 * change}
    return np.minimum(np.exp(change[config.tis]), config.tis_cap)


def divergence(config, change):
    match config.kl_kind:
        case "k1":
            return change
        case "k2":
            return change**2 / 2
        case "k3":
            return np.exp(-change) - 1 + change


def loss(w, config, groups, olds, references, clipped=None):
    """Agent and designer means of weight 1 and 0.5, at one temperature; NLL without `olds`."""
    total, index = 0.0, 0
    clipped = [] if clipped is None else clipped
    for group, weight in zip(groups, (1.0, 0.5), strict=True):
        counts = [int(t.loss_mask[1:].sum()) for t in group.trajectories]
        for t, advantage, own in zip(group.trajectories, group.advantages, counts, strict=True):
            table = log_softmax(w, t.tokens)[:-1]
            places = np.flatnonzero(t.loss_mask[1:])
            current = table[places, t.tokens[places + 1]]
            size = {  # each role has one group
                "token": sum(counts),
                "group": sum(counts),
                "sequence": len(counts) * own,
                "constant": len(counts) * config.constant_tokens,
            }[config.reduction]
            if olds is None:
                total += weight / size * -current.sum()
                continue
            weights = importance(config, olds[index] - t.sampler_logprobs[places + 1])
            policy = weights * surrogate(config, advantage, current, olds[index], clipped)
            kl = divergence(config, current - references[index])
            entropy = -(np.exp(table) * table).sum(-1)[places]
            terms = policy + config.kl_coef * kl - config.entropy_coef * entropy
            total += weight / size * terms.sum()
            index += 1
    return total


def logprobs(w, groups):
    """Of every loss token, trajectory by trajectory."""
    found = []
    for t in (t for group in groups for t in group.trajectories):
        places = np.flatnonzero(t.loss_mask[1:])
        found.append(log_softmax(w, t.tokens)[places, t.tokens[places + 1]].real)
    return found


def gradient(w, *given):
    grads = {}
    for name, array in w.items():
        grads[name] = np.zeros(array.shape)
        for at in np.ndindex(array.shape):
            moved = array.astype(np.complex128)
            moved[at] += 1j * STEP
            grads[name][at] = loss(w | {name: moved}, *given).imag / STEP
    return grads


def adamw(config, w, grads, moments, count):
    total = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert total > config.max_grad_norm  # the clip is at work
    for name, g in grads.items():
        g = g * min(1.0, config.max_grad_norm / total)
        mean, square = moments[name]
        mean = config.beta1 * mean + (1 - config.beta1) * g
        square = config.beta2 * square + (1 - config.beta2) * g**2
        moments[name] = mean, square
        scale = np.sqrt(square / (1 - config.beta2**count)) + 1e-8
        direction = mean / (1 - config.beta1**count) / scale
        decay = 0.0 if "norm" in name else config.weight_decay
        w[name] = w[name] - config.lr * (direction + decay * w[name])


class Task(NamedTuple):
    """Three trajectories and the weights to start from, for both sides."""

    groups: list[Group]
    start: Any
    w: dict[str, np.ndarray]

    def batch(self, config: LearnerConfig) -> Batch:
        return pack_groups(
            self.groups, 16, 2, weights={Role.AGENT: 1.0, Role.DESIGNER: 0.5}, learner=config
        )


def make_task() -> Task:
    """The sampler's log-probabilities are near those of the weights, as after a few updates."""
    rng, of_weights = np.random.default_rng(0), np.random.default_rng(6)
    start = jax.tree.map(
        lambda leaf: jnp.asarray(of_weights.normal(leaf.ndim == 1, 0.4, leaf.shape), jnp.float32),
        transformer.abstract_params(MODEL),
    )
    w = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(start)}

    def draw(length, prompt):
        tokens = rng.integers(0, 11, length).astype(np.int32)
        own = log_softmax(w, tokens)[np.arange(length - 1), tokens[1:]]
        sampled = np.append(0.0, own) + rng.normal(0.0, 0.3, length)
        return make_trajectory(
            prompt,
            length - prompt,
            tokens=tokens,
            sampler_logprobs=sampled.astype(np.float32),
        )

    groups = [
        Group(Role.AGENT, "a", (draw(7, 3), draw(9, 2)), np.ones(2), np.array([1.5, -2.0])),
        Group(Role.DESIGNER, "d", (draw(6, 2),), np.ones(1), np.array([-1.0])),
    ]
    return Task(groups, start, w)


def one_device() -> jax.sharding.Mesh:
    return build_mesh(1, 1, 1, 1, jax.devices()[:1])


def compare(params, expected) -> None:
    for name, leaf in named_leaves(params):
        np.testing.assert_allclose(leaf, expected[name], **CLOSE, err_msg=name)


def test_two_optimiser_steps() -> None:
    groups, start, w = task = make_task()
    learner = Learner(MODEL, LEARNER, one_device())
    references = logprobs({name: array * 1.1 for name, array in w.items()}, groups)
    frozen = jax.tree.map(lambda leaf: leaf * 1.1, start)
    state, moments = learner.init(start), dict.fromkeys(w, (0.0, 0.0))
    batch = task.batch(LEARNER)
    for count in (1, 2):
        grads = gradient(w, LEARNER, groups, logprobs(w, groups), references)
        with_reference = batch.rows._replace(
            reference_logprobs=learner.logprobs(frozen, [batch])[0]
        )
        found, _ = learner.gradients(state.params, Batch(with_reference, batch.sizes))
        compare(found, grads)
        state, _ = update(learner, state, [batch], frozen)
        adamw(LEARNER, w, grads, moments, count)
        compare(state.params, w)


OFF_POLICY = {
    "grpo": {"reduction": "token", "tis": "token", "dual_clip": 1.5},
    "dr_grpo": {"reduction": "constant", "constant_tokens": 8, "tis": "none", "kl_kind": "k2"},
    "gspo": {
        "reduction": "sequence",
        "tis": "sequence",
        "tis_cap": 1.05,
        "clip_high": 0.05,
        "kl_kind": "k1",
    },
    "cispo": {"reduction": "group", "tis": "sequence", "tis_cap": 1.05, "kl_kind": "k2"},
    "rloo": {"reduction": "token", "tis": "token", "kl_kind": "k3"},
}


def shifted(sampled, tokens, by: float):
    """Log-probabilities as some other weights might give them, by the token alone."""
    return sampled + by * np.sin(3.0 * tokens).astype(np.float32)


@pytest.mark.parametrize("name", [*OFF_POLICY, "nll"])
def test_one_optimiser_step_of_each_loss_off_policy(name) -> None:
    groups, start, w = task = make_task()
    objective, config = "nll", LEARNER
    if name in OFF_POLICY:
        objective, config = "policy", dataclasses.replace(LEARNER, loss=name, **OFF_POLICY[name])
    sampled = [
        (t.sampler_logprobs, t.tokens, t.loss_mask) for group in groups for t in group.trajectories
    ]
    olds, references = (
        [shifted(logprobs, tokens, by)[1:][mask[1:]] for logprobs, tokens, mask in sampled]
        for by in (0.5, -0.5)
    )
    given = config, groups, olds if name in OFF_POLICY else None, references
    clipped: list[bool] = []
    loss(w, *given, clipped)
    grads = gradient(w, *given)

    learner, batch = Learner(MODEL, config, one_device()), task.batch(config)
    rows = batch.rows._replace(
        old_logprobs=shifted(batch.rows.sampler_logprobs, batch.rows.tokens, 0.5),
        reference_logprobs=shifted(batch.rows.sampler_logprobs, batch.rows.tokens, -0.5),
    )
    batch = Batch(rows, batch.sizes)
    found, _ = learner.gradients(start, batch, objective)
    compare(found, grads)
    state, metrics = learner.step(learner.init(start), batch, objective)
    adamw(config, w, grads, dict.fromkeys(w, (0.0, 0.0)), 1)
    compare(state.params, w)
    assert bool(clipped) == (name not in ("rloo", "nll"))
    if clipped:
        assert 0 < np.mean(clipped) < 1  # some tokens, and not all
        assert metrics["loss/clip_frac"] == pytest.approx(np.mean(clipped))
    if objective == "policy":
        assert (metrics["loss/tis_clip_frac"] > 0) == (config.tis != "none")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "cispo"])
def test_with_one_step_for_a_rollout_the_ratio_is_exactly_one(name) -> None:
    """Clips of no width take a good token's ratio above 1 and a bad one's below: with either sign
    of the advantages, none is taken.
    """
    config = LearnerConfig(
        loss=name,
        reduction="constant",
        constant_tokens=8,
        clip_low=1e-9,
        clip_high=1e-9,
        lr=0.05,
    )
    model = dataclasses.replace(MODEL, num_layers=1)
    learner = Learner(model, config, one_device())
    rng, task = np.random.default_rng(3), make_task()
    state = learner.init(
        jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(leaf.ndim == 1, 0.4, leaf.shape), jnp.float32),
            transformer.abstract_params(model),
        )
    )
    for sign in (1.0, -1.0):
        groups = [
            dataclasses.replace(group, advantages=sign * group.advantages) for group in task.groups
        ]
        state, metrics = update(learner, state, [task._replace(groups=groups).batch(config)])
        assert metrics["loss/clip_frac"] == 0.0
        assert metrics["optim/grad_norm"] > 0.01
