"""The layer against a loop over tokens, and over meshes against one device, at every load."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from models import dispatch
from models.config import TransformerConfig
from models.moe import MoE, choose_transport
from models.sharding import build_mesh, partition

CONFIG = TransformerConfig(num_layers=1, embed=12, mlp=10, num_experts=4, experts_per_token=2)


def apply(moe: MoE, x: np.ndarray | jax.Array, live: np.ndarray):
    return jax.jit(lambda x, live: moe(x, live))(x, live)


def moe_by_loop(moe: MoE, x: np.ndarray, live: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token at a time, one expert at a time."""
    assert moe.router is not None
    router, gate_up, down = (np.asarray(p[...]) for p in (moe.router, moe.gate_up, moe.down))
    output, load = np.zeros_like(x), np.zeros(router.shape[1])
    for index in np.argwhere(live):
        token = x[tuple(index)]
        probs = np.exp(token @ router)
        chosen = np.argsort(-probs)[: moe.experts_per_token]
        total = probs[chosen].sum() if moe.normalize else probs.sum()
        for expert in chosen:
            gate, up = token @ gate_up[expert, :, 0], token @ gate_up[expert, :, 1]
            result = (gate / (1 + np.exp(-gate)) * up) @ down[expert]
            output[tuple(index)] += probs[expert] / total * result
            load[expert] += 1
    return output, load


@pytest.mark.parametrize("normalize", [True, False])
def test_moe_equals_loop_and_ignores_padding(getkey, normalize):
    config = TransformerConfig(
        num_layers=1,
        embed=12,
        mlp=10,
        num_experts=4,
        experts_per_token=2,
        norm_topk_prob=normalize,
    )
    moe = MoE(config, nnx.Rngs(params=getkey()))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 9, 12)).astype(np.float32)
    live = rng.random((3, 9)) < 0.7
    expected, load = moe_by_loop(moe, x, live)
    output, routing = apply(moe, x, live)
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert routing.load.tolist() == load.tolist()
    assert float(routing.tokens) == live.sum() and float(routing.dropped) == 0
    x[~live] = 1e3
    assert np.array_equal(output, apply(moe, x, live)[0])


def test_no_token_is_dropped_when_all_choose_the_same_experts(getkey):
    moe = MoE(CONFIG, nnx.Rngs(params=getkey()))
    assert moe.router is not None
    moe.router[...] = jnp.zeros_like(moe.router[...]).at[0].set(jnp.array([0.0, 9.0, 0.0, 5.0]))
    x = np.random.default_rng(0).standard_normal((2, 50, 12)).astype(np.float32)
    x[:, :, 0] = 1.0
    live = np.ones((2, 50), bool)
    output, routing = apply(moe, x, live)
    assert routing.load.tolist() == [0, 100, 0, 100]
    assert float(routing.dropped) == 0
    np.testing.assert_allclose(output, moe_by_loop(moe, x, live)[0], atol=1e-5)


def test_replay_of_its_own_choice_changes_nothing_and_of_another_does(getkey):
    moe = MoE(CONFIG, nnx.Rngs(params=getkey()))
    x = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
    live = np.ones((2, 5), bool)
    run = jax.jit(lambda x, live, replay: moe(x, live, replay=replay))
    output, routing = apply(moe, x, live)
    again, same = run(x, live, routing.chosen)
    assert np.array_equal(output, again)
    assert np.array_equal(routing.chosen, same.chosen)
    other, routed = run(x, live, (routing.chosen + 1) % 4)
    assert np.array_equal(routed.chosen, (routing.chosen + 1) % 4)
    assert float(jnp.abs(other - output).max()) > 1e-2


def test_single_expert_is_dense_without_router(getkey):
    config = TransformerConfig(embed=12, mlp=10, num_experts=1, experts_per_token=1)
    moe = MoE(config, nnx.Rngs(params=getkey()))
    assert moe.router is None
    x = np.random.default_rng(0).standard_normal((2, 4, 12)).astype(np.float32)
    live = np.array([[True] * 4, [True] * 3 + [False]])
    output, routing = apply(moe, x, live)
    gate_up, down = np.asarray(moe.gate_up[...]), np.asarray(moe.down[...])
    gate, up = x @ gate_up[0, :, 0], x @ gate_up[0, :, 1]
    expected = (gate / (1 + np.exp(-gate)) * up) @ down[0] * live[:, :, None]
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert routing.load.tolist() == [7] and routing.chosen.shape == (2, 4, 1)


def test_bfloat16_is_close_to_float32(getkey):
    moe = MoE(CONFIG, nnx.Rngs(params=getkey()))
    x = np.random.default_rng(0).standard_normal((3, 9, 12)).astype(np.float32)
    x = np.asarray(jnp.asarray(x, jnp.bfloat16).astype(jnp.float32))  # so that routing is the same
    live = np.ones((3, 9), bool)
    wide, routing = apply(moe, x, live)
    narrow, other = apply(moe, jnp.asarray(x, jnp.bfloat16), live)
    assert narrow.dtype == jnp.bfloat16
    assert np.array_equal(routing.chosen, other.chosen)
    np.testing.assert_allclose(narrow.astype(jnp.float32), wide, atol=0.02)


# ---- meshes

WIDE = TransformerConfig(num_layers=1, embed=16, mlp=16, num_experts=8, experts_per_token=2)
SCORES = {  # a router's score for each expert, beside what the token itself says
    "even": np.zeros(8),
    "two experts get everything": np.array([0, 0, 0, 50.0, 0, 0, 40.0, 0]),
    "one shard gets everything": np.array([50.0, 40.0, 0, 0, 0, 0, 0, 0]),
    "some get nothing": np.array([0, -50.0, 0, 0, -50.0, -50.0, 0, 0]),
}
MESHES = {
    "fsdp": (1, 8, 1, 1),
    "tensor": (1, 1, 1, 8),
    "expert": (1, 1, 8, 1),
    "fsdp-expert-tensor": (1, 2, 2, 2),
    "data-expert": (2, 1, 4, 1),
}
CASES = [
    ("fsdp", "auto", None),
    ("tensor", "auto", None),
    ("expert", "replicated", None),
    ("expert", "gather", 3),
    ("expert", "ragged", None),
    ("expert", "ragged", 3),
    ("fsdp-expert-tensor", "replicated", 3),
    ("fsdp-expert-tensor", "gather", None),
    ("fsdp-expert-tensor", "ragged", 3),
    ("data-expert", "gather", 7),
]


def everything(state, x, live, weight, *, graph, mesh, transport):
    """Output, routing, and gradients of a loss that hangs on all of them."""

    def loss(state, x):
        output, routing = nnx.merge(graph, state)(x, live, mesh, transport=transport)
        losses = 0.1 * routing.balance + 0.01 * routing.router_z
        return jnp.sum(output * weight) + losses, (output, routing)

    grads, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(state, x)
    return results, grads


@pytest.fixture(scope="module")
def layer():
    graph, state = nnx.split(MoE(WIDE, nnx.Rngs(params=0)))
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((8, 6, 16)).astype(np.float32) for _ in range(2))
    x[:, :, 0] = 1.0  # carries the scores of SCORES
    live = rng.random((8, 6)) < 0.8
    live[3] = False
    return graph, state, (x, live, weight)


def with_scores(state, scores):
    router = state["router"][...].at[0].set(jnp.asarray(scores, jnp.float32))
    return nnx.State({**state, "router": state["router"].replace(router)})


@pytest.fixture(scope="module")
def expected(layer):
    graph, state, inputs = layer
    run = jax.jit(lambda *args: everything(*args, graph=graph, mesh=None, transport="auto"))
    return {
        name: jax.device_get(run(with_scores(state, scores), *inputs))
        for name, scores in SCORES.items()
    }


@pytest.mark.parametrize(("mesh", "transport", "rows"), CASES)
def test_sharded_equals_unsharded_at_every_load(
    layer, expected, mesh, transport, rows, monkeypatch
):
    """With `rows`, buffers of that many rows: what does not fit takes further rounds."""
    graph, state, inputs = layer
    if rows is not None:
        monkeypatch.setattr(dispatch, "buffer_rows", lambda copies, shards, worst: min(rows, worst))
    built = build_mesh(*MESHES[mesh])

    def place(param: nnx.Variable) -> nnx.Variable:
        return param.replace(NamedSharding(built, partition(param.get_metadata("axes"))))

    shardings = jax.tree.map(place, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    run = jax.jit(lambda *args: everything(*args, graph=graph, mesh=built, transport=transport))
    run = run.lower(jax.device_put(state, shardings), *inputs).compile()
    if mesh == "expert":  # one expert a device, and never all of them
        shapes = set(re.findall(r"f32\[(\d),16,(?:32|2,16)\]", str(run.as_text())))
        assert shapes == {"1"}
    for name, scores in SCORES.items():
        placed = jax.device_put(with_scores(state, scores), shardings)
        (output, routing), grads = jax.device_get(run(placed, *inputs))
        (other, known), other_grads = expected[name]
        np.testing.assert_allclose(output, other, atol=1e-5, err_msg=name)
        for one, two in zip(routing, known, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-5, err_msg=name)
        assert routing.dropped == 0 and routing.load.sum() == 2 * inputs[1].sum()
        for one, two in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
            assert np.isfinite(two).all()
            np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5, err_msg=name)


def test_rows_whole_on_all_devices(layer, expected):
    """As in the sampler, whose few rows the mesh need not divide."""
    graph, state, (x, live, _) = layer
    mesh = build_mesh(1, 2, 2, 2)
    run = jax.jit(lambda state, x, live: nnx.merge(graph, state)(x, live, mesh, split=False))
    output, routing = run(with_scores(state, SCORES["even"]), x[:7], live[:7])
    (whole, known), _ = expected["even"]
    np.testing.assert_allclose(output, whole[:7], atol=1e-5)
    assert np.array_equal(routing.chosen, known.chosen[:7])
    assert float(routing.dropped) == 0 and float(routing.tokens) == live[:7].sum()


def test_dropped_is_counted_not_assumed(layer, monkeypatch):
    """A round too few shows."""
    graph, state, (x, live, _) = layer
    monkeypatch.setattr(dispatch, "buffer_rows", lambda copies, shards, worst: min(5, worst))
    monkeypatch.setattr(
        dispatch,
        "in_rounds",
        lambda part, rounds, operands, plan: part(jnp.zeros((), jnp.int32), operands, plan),
    )
    moe = nnx.merge(graph, state)
    _, routing = jax.jit(lambda x, live: moe(x, live))(x, live)
    assert float(routing.dropped) == 2 * live.sum() - 5


def test_transport_is_chosen_by_tokens_and_logged(caplog):
    mesh = build_mesh(1, 1, 8, 1)
    with caplog.at_level("INFO", logger="models.moe"):
        assert choose_transport("auto", mesh, 8 * 64 + 8, 2, True) == "gather"
    assert "520 tokens over 8 shards of the experts: gather (auto)" in caplog.text
    assert choose_transport("auto", mesh, 8 * 64, 2, True) == "replicated"
    assert choose_transport("ragged", mesh, 8, 2, True) == "ragged"
    assert choose_transport("gather", mesh, 8, 2, False) == "replicated"
