"""The attention kernels against attention written out in float64, with their gradients.

cuDNN itself runs on a GPU only; here its mask, scale and head order are put through the plain
implementation of the same jax function.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.errors import ModelError
from models.kernels import cudnn, splash

SEGMENTS = {
    "one segment": lambda seq: np.ones(seq, int),
    "packed, padded": lambda seq: np.repeat(
        [1, 2, 3, 0], [seq // 3, 1, seq // 3, seq - 2 * (seq // 3) - 1]
    ),
    "an id comes back": lambda seq: np.repeat(
        [1, 2, 1], [seq // 3, seq // 3, seq - 2 * (seq // 3)]
    ),
    "padding between": lambda seq: np.repeat([0, 4, 0, 5], [3, seq // 2, 2, seq - seq // 2 - 5]),
    "all padding": lambda seq: np.zeros(seq, int),
}


def reference(query, key, value, segment_ids):
    """Attention with the whole matrix of scores, in float64."""
    rows, seq, heads, dim = query.shape
    group = heads // key.shape[2]
    output = np.zeros(query.shape)
    for row in range(rows):
        ids = segment_ids[row]
        run = np.cumsum(np.concatenate([[0], np.diff(ids) != 0]))
        for head in range(heads):
            for place in range(seq):
                if not ids[place]:
                    continue
                seen = np.flatnonzero((run == run[place]) & (np.arange(seq) <= place))
                scores = key[row, seen, head // group] @ query[row, place, head] / np.sqrt(dim)
                weights = np.exp(scores - scores.max())
                output[row, place, head] = (weights / weights.sum()) @ value[
                    row, seen, head // group
                ]
    return output


def plain(query, key, value, segment_ids):
    """The reference as jax code, to be differentiated; held to `reference` by a test."""
    changed = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    run = jnp.cumsum(changed, axis=1)
    seq = query.shape[1]
    place = jnp.arange(seq)
    mask = (run[:, :, None] == run[:, None, :]) & (place[:, None] >= place[None, :])[None]
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    scores = jnp.einsum("rqhd,rkhd->rhqk", query, key) * query.shape[3] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    output = jnp.einsum("rhqk,rkhd->rqhd", weights, value)
    return jnp.where((segment_ids > 0)[:, :, None, None], output, 0.0)


def inputs(rows: int, seq: int, heads: int, kv_heads: int, dim: int, segments: str):
    rng = np.random.default_rng(0)
    shapes = (
        [(rows, seq, heads, dim)] + [(rows, seq, kv_heads, dim)] * 2 + [(rows, seq, heads, dim)]
    )
    arrays = [rng.standard_normal(shape) for shape in shapes]
    ids = np.stack([SEGMENTS[segments](seq)] + [SEGMENTS["packed, padded"](seq)] * (rows - 1))
    return *arrays, ids.astype(np.int32)


@pytest.fixture
def loose():
    """The upstream code relies on implicit promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def cudnn_stand_in(monkeypatch, loose):
    """cuDNN attention with the plain implementation of jax in place of the GPU's."""
    real = jax.nn.dot_product_attention

    def stand_in(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return real(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    return cudnn.attend


def check(attend, dtype: str, *shape_and_segments) -> None:
    """Output and gradients of all three inputs, to the rounding of the dtype."""
    *arrays, grad, ids = inputs(*shape_and_segments)
    ids = jnp.asarray(ids)
    with jax.enable_x64():
        wanted, backward = jax.vjp(lambda *x: plain(*x, ids), *(jnp.asarray(x) for x in arrays))
        wanted = [np.asarray(x) for x in (wanted, *backward(jnp.asarray(grad)))]
    cast = [jnp.asarray(x, dtype) for x in arrays]
    output, backward = jax.jit(lambda *x: jax.vjp(lambda *y: attend(*y, ids), *x))(*cast)
    actual = [output, *jax.jit(lambda f, g: f(g))(backward, jnp.asarray(grad, dtype))]
    for found, want in zip(actual, wanted, strict=True):
        assert found.dtype == jnp.dtype(dtype)
        found = np.asarray(found).astype(np.float64)
        scale = max(np.abs(want).max(), 1e-6)
        assert np.abs(found - want).max() <= (1e-5 if dtype == "float32" else 3e-2) * scale
        assert not found[np.asarray(ids) == 0].any()


def test_plain_equals_loops():
    *arrays, _, ids = inputs(2, 12, 4, 2, 8, "an id comes back")
    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        actual = plain(*(jnp.asarray(x) for x in arrays), jnp.asarray(ids))
    np.testing.assert_allclose(np.asarray(actual), reference(*arrays, ids), atol=1e-12)


@pytest.mark.parametrize("segments", SEGMENTS)
def test_splash_keeps_segments_apart(segments: str, loose):
    attend = functools.partial(splash.attend, interpret=True)
    check(attend, "float32", 2, 200, 2, 1, 64, segments)


@pytest.mark.parametrize(
    ("dtype", "seq", "heads", "kv_heads", "dim"),
    [
        ("bfloat16", 256, 4, 2, 128),  # whole blocks, grouped heads
        ("float32", 256, 3, 3, 128),  # as many key heads as query heads
        ("float32", 640, 4, 1, 64),  # several blocks, one key head
        ("float32", 7, 2, 1, 32),  # shorter than a block
    ],
)
def test_splash_equals_plain_attention(dtype, seq, heads, kv_heads, dim, loose):
    attend = functools.partial(splash.attend, interpret=True)
    check(attend, dtype, 1, seq, heads, kv_heads, dim, "packed, padded")


@pytest.mark.parametrize("segments", SEGMENTS)
def test_cudnn_mask_keeps_segments_apart(segments: str, cudnn_stand_in):
    check(cudnn_stand_in, "bfloat16", 2, 45, 4, 2, 16, segments)


def test_cudnn_refuses_float32():
    x = jnp.zeros((1, 4, 2, 16))
    with pytest.raises(ModelError, match="float32"):
        cudnn.attend(x, x, x, jnp.ones((1, 4), jnp.int32))


@pytest.mark.parametrize("dim", [64, 128])
def test_splash_lowers_for_a_tpu(dim: int, loose):
    *arrays, ids = inputs(1, 300, 4, 2, dim, "packed, padded")
    query, key, value, grad = (jnp.asarray(x, jnp.bfloat16) for x in arrays)

    def gradients(query, key, value, grad):
        return jax.vjp(lambda *x: splash.attend(*x, jnp.asarray(ids)), query, key, value)[1](grad)

    traced = jax.jit(gradients).trace(query, key, value, grad)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert all(f"splash_mha_{phase}" in text for phase in ("fwd", "dq", "dkv"))
