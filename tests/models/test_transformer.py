"""The forward against a NumPy transformer, against itself packed and cached; decode in a loop."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import tree_allclose
from models import kernels, layout, transformer
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN
from models.kernels import splash
from models.transformer import init_cache, init_params

TINY = TransformerConfig(
    vocab_size=23,
    num_layers=2,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp=10,
    num_experts=4,
    experts_per_token=2,
    qk_norm=True,
    scale_embedding=True,
)
OTHER = TransformerConfig(
    vocab_size=23,
    num_layers=1,
    embed=16,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    mlp=10,
    num_experts=1,
    experts_per_token=1,
    qk_norm=False,
    tied_head=False,
    scale_embedding=False,
    rope_theta=500.0,
    norm_eps=1e-2,
)

ONE = jnp.ones((1, 1), jnp.int32)
SCANNED = dataclasses.replace(PLAIN, layers="scanned")

forward = partial(jax.jit, static_argnums=0, static_argnames="execution")(transformer.forward)


def norm(x, scale, eps):
    return x / np.sqrt(np.mean(x**2) + eps) * scale


def turn(x, position, theta):
    """Rotate one head: pairs (i, i + half) as complex numbers."""
    half = x.shape[0] // 2
    angles = position / theta ** (np.arange(half) / half)
    pairs = (x[:half] + 1j * x[half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag])


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def silu(x):
    return x / (1 + np.exp(-x))


def reference(config: TransformerConfig, params, tokens, positions, segment_ids) -> np.ndarray:
    """Logits of one row, token by token, head by head, expert by expert, in float64."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def read(*path):
        node = weights
        for key in path:
            node = node[key]
        return node[...]

    group = config.num_heads // config.num_kv_heads
    x = read("embedding")[tokens] * (config.embed**0.5 if config.scale_embedding else 1.0)
    for layer in range(config.num_layers):
        part = partial(read, "blocks", layer)
        normed = [norm(v, part("attention_norm", "scale"), config.norm_eps) for v in x]
        heads = {}
        for name in ("query", "key", "value"):
            heads[name] = np.einsum("se,ehd->shd", normed, part("attention", name))
            if name != "value":
                for index in np.ndindex(heads[name].shape[:2]):
                    head = heads[name][index]
                    if config.qk_norm:
                        scale = part("attention", f"{name}_norm", "scale")
                        head = norm(head, scale, config.norm_eps)
                    heads[name][index] = turn(head, positions[index[0]], config.rope_theta)
        for q in range(len(tokens)):
            seen = [c for c in range(q + 1) if segment_ids[c] == segment_ids[q] != 0]
            for head in range(config.num_heads if seen else 0):
                keys, values = (heads[n][seen, head // group] for n in ("key", "value"))
                scores = keys @ heads["query"][q, head] / config.head_dim**0.5
                mixed = softmax(scores) @ values
                x[q] = x[q] + mixed @ part("attention", "output")[head]
        for q in range(len(tokens)):
            token = norm(x[q], part("moe_norm", "scale"), config.norm_eps)
            shares = {0: 1.0}
            if config.num_experts > 1:
                probs = softmax(token @ part("moe", "router"))
                best = np.argsort(-probs)[: config.experts_per_token]
                shares = {expert: probs[expert] / probs[best].sum() for expert in best}
            for expert, share in shares.items():
                gate, up = (token @ part("moe", "gate_up")[expert, :, i] for i in (0, 1))
                x[q] = x[q] + share * (silu(gate) * up) @ part("moe", "down")[expert]
    x = np.stack([norm(v, read("final_norm", "scale"), config.norm_eps) for v in x])
    return x @ (read("embedding").T if config.tied_head else read("head"))


def random_tokens(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, shape).astype(np.int32)


def random_params(config: TransformerConfig):
    """Parameters with every norm off one and scores far from uniform, without compiling a draw."""
    rng = np.random.default_rng(0)

    def draw(leaf):
        norm = len(leaf.shape) == 1
        values = rng.uniform(0.5, 2.0, leaf.shape) if norm else rng.normal(0.0, 0.4, leaf.shape)
        return jnp.asarray(values, jnp.float32)

    return jax.tree.map(draw, transformer.abstract_params(config))


def page_table(rows: int, context: int, page_tokens: int, seed: int = 0) -> np.ndarray:
    """Pages for each row, in no order."""
    width = -(-context // page_tokens)
    pages = np.random.default_rng(seed).permutation(rows * width)
    return pages.reshape(rows, width).astype(np.int32)


# Two segments and padding, packed in one row; positions restart.
SEGMENTS = np.array([1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], np.int32)
POSITIONS = np.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0], np.int32)


@pytest.mark.parametrize("config", [TINY, OTHER], ids=["experts", "dense"])
def test_forward_equals_numpy_reference(config):
    params = random_params(config)
    tokens = random_tokens(0, 2, 11)
    rows = np.stack([SEGMENTS, np.ones(11, np.int32)])
    positions = np.stack([POSITIONS, np.arange(11, dtype=np.int32)])
    out = forward(config, params, tokens, positions, segment_ids=rows)
    got = transformer.logits(config, params, out.hidden)
    assert got.dtype == jnp.float32
    for row in range(2):
        expected = reference(config, params, tokens[row], positions[row], rows[row])
        live = rows[row] > 0
        np.testing.assert_allclose(got[row][live], expected[live], atol=1e-4, rtol=1e-4)
    assert np.isfinite(got).all()
    load = np.asarray(out.expert_load)
    assert load.shape == (config.num_layers, config.num_experts)
    assert load.sum(axis=1).tolist() == [20.0 * config.experts_per_token] * config.num_layers


def test_packed_segments_equal_separate_rows():
    params = random_params(TINY)
    tokens = random_tokens(1, 1, 11)
    packed = forward(TINY, params, tokens, POSITIONS[None], segment_ids=SEGMENTS[None]).hidden
    for piece in (slice(0, 4), slice(4, 9)):
        length = piece.stop - piece.start
        alone, ids = np.zeros((1, 11), np.int32), np.zeros((1, 11), np.int32)
        alone[:, :length], ids[:, :length] = tokens[:, piece], 1
        places = np.arange(11, dtype=np.int32)[None]
        hidden = forward(TINY, params, alone, places, segment_ids=ids).hidden
        np.testing.assert_allclose(packed[:, piece], hidden[:, :length], atol=1e-5)


def test_padding_changes_nothing():
    params = random_params(TINY)
    tokens = random_tokens(2, 1, 11)
    changed = np.where(SEGMENTS > 0, tokens, (tokens + 1) % TINY.vocab_size).astype(np.int32)
    one, two = (
        forward(TINY, params, t, POSITIONS[None], segment_ids=SEGMENTS[None])
        for t in (tokens, changed)
    )
    assert not np.array_equal(tokens, changed)
    live = SEGMENTS > 0
    assert np.array_equal(one.hidden[0][live], two.hidden[0][live])
    assert np.array_equal(one.expert_load, two.expert_load)


@pytest.mark.parametrize("page_tokens", [1, 3, 16])
def test_prefill_and_decode_equal_the_packed_forward(page_tokens):
    params = random_params(TINY)
    lengths = np.array([9, 6, 3])
    tokens = random_tokens(3, 3, 9)
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (3, 9))
    expected = forward(TINY, params, tokens, positions).hidden

    # Two chunks of prefill into pages here and there; rows end at different places.
    table = page_table(3, 9, page_tokens)
    num_pages = table.size + 1  # the last one belongs to nobody
    cache = init_cache(TINY, num_pages, page_tokens)
    prompt = np.minimum(lengths - 2, 5)
    for chunk in (slice(0, 3), slice(3, 6)):
        where = np.where(positions < prompt[:, None], positions, -1)[:, chunk]
        out = forward(TINY, params, tokens[:, chunk], where, cache=cache, page_table=table)
        cache = out.cache
        for row in range(3):
            live = where[row] >= 0
            want = expected[row, chunk][live]
            np.testing.assert_allclose(out.hidden[row][live], want, atol=1e-4)
        assert float(out.expert_load.sum()) == (where >= 0).sum() * 2 * TINY.num_layers

    # Decode rows 1, 2, 0 with an empty row among them, until the longest is through.
    order = np.array([1, -1, 2, 0])
    nowhere = np.full_like(table[:1], -1)
    decode_table = np.concatenate([table, nowhere])[order]
    for offset in range(4):
        column, live = np.zeros(4, np.int32), np.full(4, -1, np.int32)
        for place, row in enumerate(order):
            if row >= 0 and prompt[row] + offset < lengths[row]:
                live[place] = prompt[row] + offset
                column[place] = tokens[row, live[place]]
        out = forward(
            TINY, params, column[:, None], live[:, None], cache=cache, page_table=decode_table
        )
        cache = out.cache
        for place, row in enumerate(order):
            if live[place] >= 0:
                want = expected[row, live[place]]
                np.testing.assert_allclose(out.hidden[place, 0], want, atol=1e-4)
    assert not cache.keys[0][-1].any() and not cache.values[1][-1].any()


@pytest.mark.parametrize("execution", [PLAIN, SCANNED], ids=["unrolled", "scanned"])
def test_decode_loop_copies_no_cache(execution):
    config = TransformerConfig(num_layers=2)
    params = transformer.abstract_params(config, execution)
    cache = jax.eval_shape(lambda: init_cache(config, 8 * 256, 16, execution))
    table = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    layer = 4 * 8 * 4096 * config.num_kv_heads * config.head_dim
    row = jax.ShapeDtypeStruct((8, 1), jnp.int32)

    @partial(jax.jit, donate_argnums=1)
    def decode(params, cache, table, tokens, positions):
        def step(_, carry):
            cache, positions = carry
            out = transformer.forward(
                config, params, tokens, positions, cache=cache, page_table=table
            )
            return out.cache, positions + 1

        return jax.lax.fori_loop(0, 4, step, (cache, positions))

    memory = decode.lower(params, cache, table, row, row).compile().memory_analysis()
    # A scan on CPU copies the weights of the layer it is at, which the chip it is for does not.
    weights = sum(leaf.size for leaf in jax.tree.leaves(params)) * 4 if execution is SCANNED else 0
    assert memory.temp_size_in_bytes < layer + weights
    assert memory.alias_size_in_bytes >= 4 * layer


def packed_loss(config, execution, params, tokens):
    positions, segment_ids = jnp.asarray(POSITIONS)[None], jnp.asarray(SEGMENTS)[None]
    out = transformer.forward(
        config, params, tokens, positions, segment_ids=segment_ids, execution=execution
    )
    scores = transformer.logits(config, params, out.hidden)
    likely = jnp.sin(jax.nn.log_softmax(scores, axis=-1))
    live = (segment_ids > 0)[:, :, None]
    return jnp.sum(jnp.where(live, likely, 0.0)) / 64, (scores, out)


def differentiated(config, execution, params, tokens):
    function = jax.value_and_grad(partial(packed_loss, config, execution), has_aux=True)
    return jax.jit(function)(params, tokens)


@pytest.fixture(scope="module")
def unrolled():
    """Parameters, tokens, and the loss with its gradients as the CPU runs them."""
    params, tokens = random_params(TINY), jnp.asarray(random_tokens(5, 1, 11))
    params = jax.tree.map(lambda leaf: leaf * 0.5, params)
    return params, tokens, differentiated(TINY, PLAIN, params, tokens)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_scanned_equals_unrolled_with_any_remat(unrolled, remat):
    params, tokens, ((total, (scores, out)), grads) = unrolled
    execution = dataclasses.replace(SCANNED, remat=remat)
    (got, (got_scores, got_out)), got_grads = differentiated(
        TINY, execution, layout.stacked(params), tokens
    )
    np.testing.assert_allclose(got, total, rtol=1e-6)
    np.testing.assert_allclose(got_scores, scores, rtol=1e-6, atol=1e-6)
    assert np.array_equal(got_out.expert_load, out.expert_load)
    assert tree_allclose(layout.per_layer(got_grads), grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_remat_changes_no_gradient_and_keeps_less(unrolled, remat):
    params, tokens, (_, grads) = unrolled
    execution = dataclasses.replace(PLAIN, remat=remat)
    function = jax.grad(partial(packed_loss, TINY, execution), has_aux=True)
    assert tree_allclose(jax.jit(function)(params, tokens)[0], grads, rtol=1e-6, atol=1e-6)

    def residuals(execution) -> int:
        _, pull = jax.vjp(lambda params: packed_loss(TINY, execution, params, tokens)[0], params)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(pull))

    assert residuals(execution) < residuals(PLAIN)


def test_scanned_cache_equals_unrolled(unrolled):
    params, tokens, _ = unrolled
    positions = np.arange(11, dtype=np.int32)[None]
    table = np.array([[5, 1, 2]], np.int32)
    caches = [init_cache(TINY, 6, 4, execution, routing=True) for execution in (PLAIN, SCANNED)]
    for columns in (slice(0, 6), slice(6, 7), slice(7, 8)):
        outs = [
            forward(TINY, p, tokens[:, columns], positions[:, columns], cache=c, page_table=table)
            for p, c in zip((params, layout.stacked(params)), caches, strict=True)
        ]
        np.testing.assert_allclose(outs[0].hidden, outs[1].hidden, rtol=1e-6, atol=1e-6)
        caches = [out.cache for out in outs]
    for one, other in zip(*caches, strict=True):
        np.testing.assert_allclose(jnp.stack(one), other, rtol=1e-6, atol=1e-6)
    with pytest.raises(ModelError, match="one is unrolled, the other scanned"):
        forward(TINY, params, tokens, positions, cache=caches[1], page_table=table)


@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize("config", [TINY, OTHER], ids=["experts", "dense"])
def test_bfloat16_stays_near_float32(config, layers):
    """Under strict promotion: nothing is widened or rounded but where the code says so."""
    execution = dataclasses.replace(PLAIN, layers=layers, compute_dtype="bfloat16")
    params = jax.tree.map(lambda leaf: leaf * 0.5, random_params(config))
    tokens = random_tokens(5, 1, 11)
    (total, (scores, _)), grads = differentiated(config, PLAIN, params, tokens)
    own = layout.stacked(params) if layers == "scanned" else params
    (got, (got_scores, out)), got_grads = differentiated(config, execution, own, tokens)
    assert got_scores.dtype == jnp.float32 and out.hidden.dtype == jnp.bfloat16
    live = SEGMENTS > 0
    scale = float(abs(scores[0][live]).max())
    assert 0 < abs(got_scores - scores)[0][live].max() < 0.05 * scale
    assert abs(got - total) < 0.02 * abs(total)
    for one, other in zip(
        jax.tree.leaves(layout.per_layer(got_grads)), jax.tree.leaves(grads), strict=True
    ):
        assert one.dtype == jnp.float32  # of the parameters
        assert float(jnp.linalg.norm(one - other)) < 0.15 * float(jnp.linalg.norm(other)) + 1e-4


def test_splash_is_taken_for_packed_rows(monkeypatch):
    """In interpret mode, in place of the kernel of a TPU."""
    execution = dataclasses.replace(PLAIN, attention="splash")
    params = random_params(OTHER)
    tokens = jnp.asarray(random_tokens(7, 2, 140))
    positions = jnp.tile(jnp.arange(140, dtype=jnp.int32)[None], (2, 1))
    segments = jnp.asarray([[1] * 70 + [2] * 60 + [0] * 10, [3] * 140], jnp.int32)
    expected = forward(OTHER, params, tokens, positions, segment_ids=segments).hidden

    taken = []

    def interpreted(function):
        def attend(*inputs):
            taken.append(function.__name__)
            with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                return function(*inputs, interpret=True)

        return lambda name: attend

    monkeypatch.setattr(kernels, "attention", interpreted(splash.attend))
    splashed = partial(transformer.forward, OTHER, params, execution=execution)
    out = splashed(tokens, positions, segment_ids=segments)
    live = segments > 0
    np.testing.assert_allclose(out.hidden[live], expected[live], atol=1e-4)
    assert taken == ["attend"]


def test_default_config_is_small_enough():
    config = TransformerConfig()
    count = sum(leaf.size for leaf in jax.tree.leaves(transformer.abstract_params(config)))
    experts = config.num_experts * 3 * config.embed * config.mlp
    router = config.embed * config.num_experts
    heads = 2 * (config.num_heads + config.num_kv_heads)
    norms = 2 * config.embed + 2 * config.head_dim * config.qk_norm
    layer = experts + router + heads * config.embed * config.head_dim + norms
    assert count == config.num_layers * layer + (config.vocab_size + 1) * config.embed
    assert count <= 9_000_000


def test_abstract_params_match_and_every_axis_is_named():
    params = init_params(TINY, jax.random.key(0))
    abstract = transformer.abstract_params(TINY)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, params, abstract)
    assert all(jax.tree.leaves(same))
    for _, param in nnx.to_flat_state(abstract):
        assert len(param.get_metadata("axes")) == len(param.shape)


def test_parameters_depend_on_the_key_alone():
    one, two, other = (init_params(TINY, jax.random.key(seed)) for seed in (0, 0, 1))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), one, two)))
    assert not np.array_equal(one["embedding"][...], other["embedding"][...])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_table": ONE}, "go together"),
        ({"cache": init_cache(TINY, 1, 4)}, "go together"),
        (
            {"cache": init_cache(TINY, 1, 4), "page_table": ONE, "segment_ids": ONE},
            "rows without a cache",
        ),
    ],
)
def test_contradicting_options_are_refused(options, message):
    with pytest.raises(ModelError, match=message):
        transformer.forward(TINY, random_params(TINY), ONE, ONE, **options)
