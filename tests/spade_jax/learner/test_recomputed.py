"""Two optimiser steps of a two-layer model against NumPy in double precision.

The model, the loss and AdamW are written again here from their formulas. The gradient is that of
the complex step: Im f(x + ih) / h, one parameter at a time, which is exact to rounding for the
analytic functions a transformer is made of.
"""

import jax
import jax.numpy as jnp
import numpy as np

from helpers import make_trajectory, pack_groups
from models import transformer
from models.config import TransformerConfig
from models.sharding import build_mesh
from models.weights import named_leaves
from spade_jax.config import LearnerConfig
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


def loss(w, groups, olds, references):
    """Agent and designer token means of weight 1 and 0.5, at one temperature."""
    total, index = 0.0, 0
    for group, weight in zip(groups, (1.0, 0.5), strict=True):
        count = sum(t.loss_mask[1:].sum() for t in group.trajectories)
        for t, advantage in zip(group.trajectories, group.advantages, strict=True):
            table = log_softmax(w, t.tokens)[:-1]
            places = np.flatnonzero(t.loss_mask[1:])
            current = table[places, t.tokens[places + 1]]
            importance = np.minimum(np.exp(olds[index] - t.sampler_logprobs[places + 1]), 1.5)
            policy = -importance * advantage * np.exp(current - olds[index])
            change = current - references[index]
            kl = np.exp(-change) - 1 + change
            entropy = -(np.exp(table) * table).sum(-1)[places]
            total += weight / count * (policy + 0.3 * kl - 0.02 * entropy).sum()
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


def adamw(w, grads, moments, count):
    total = np.sqrt(sum((g**2).sum() for g in grads.values()))
    assert total > LEARNER.max_grad_norm  # the clip is at work
    for name, g in grads.items():
        g = g * min(1.0, LEARNER.max_grad_norm / total)
        mean, square = moments[name]
        mean = LEARNER.beta1 * mean + (1 - LEARNER.beta1) * g
        square = LEARNER.beta2 * square + (1 - LEARNER.beta2) * g**2
        moments[name] = mean, square
        scale = np.sqrt(square / (1 - LEARNER.beta2**count)) + 1e-8
        direction = mean / (1 - LEARNER.beta1**count) / scale
        decay = 0.0 if "norm" in name else LEARNER.weight_decay
        w[name] = w[name] - LEARNER.lr * (direction + decay * w[name])


def test_two_optimiser_steps() -> None:
    rng = np.random.default_rng(0)

    def draw(length, prompt):
        return make_trajectory(
            prompt,
            length - prompt,
            tokens=rng.integers(0, 11, length).astype(np.int32),
            sampler_logprobs=rng.normal(-2.4, 0.5, length).astype(np.float32),
        )

    groups = [
        Group(Role.AGENT, "a", (draw(7, 3), draw(9, 2)), np.ones(2), np.array([1.5, -2.0])),
        Group(Role.DESIGNER, "d", (draw(6, 2),), np.ones(1), np.array([-1.0])),
    ]
    learner = Learner(MODEL, LEARNER, build_mesh(1, 1, 1, 1, jax.devices()[:1]))
    start = jax.tree.map(
        lambda leaf: jnp.asarray(rng.normal(leaf.ndim == 1, 0.4, leaf.shape), jnp.float32),
        transformer.abstract_params(MODEL),
    )
    w = {name: np.asarray(leaf, np.float64) for name, leaf in named_leaves(start)}
    references = logprobs({name: array * 1.1 for name, array in w.items()}, groups)
    frozen = jax.tree.map(lambda leaf: leaf * 1.1, start)
    state, moments = learner.init(start), dict.fromkeys(w, (0.0, 0.0))
    batch = pack_groups(
        groups, 16, 2, weights={Role.AGENT: 1.0, Role.DESIGNER: 0.5}, learner=LEARNER
    )
    for count in (1, 2):
        grads = gradient(w, groups, logprobs(w, groups), references)
        with_reference = batch.rows._replace(
            reference_logprobs=learner.logprobs(frozen, [batch])[0]
        )
        found, _ = learner.gradients(state.params, type(batch)(with_reference, batch.sizes))
        for name, leaf in named_leaves(found):
            np.testing.assert_allclose(leaf, grads[name], **CLOSE, err_msg=name)
        state, _ = update(learner, state, [batch], frozen)
        adamw(w, grads, moments, count)
        for name, leaf in named_leaves(state.params):
            np.testing.assert_allclose(leaf, w[name], **CLOSE, err_msg=name)
