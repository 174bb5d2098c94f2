"""RMSNorm and rotary positions against hand-computed and independent values."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from models.layers import RMSNorm, rms_norm, rotary_angles, rotate


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.5)
    norm.scale[...] = jnp.array([1.0, 10.0])
    # mean square of (3, 4) is 12.5; with eps 0.5 the root is sqrt(13)
    expected = [[3 / 13**0.5, 40 / 13**0.5]]
    np.testing.assert_allclose(norm(jnp.array([[3.0, 4.0]])), expected, rtol=1e-6)


def test_gradients_of_rms_norm_are_those_of_its_formula():
    """Against automatic differentiation of the formula as it is written down."""
    rng = np.random.default_rng(1)
    x, grad = (jnp.asarray(rng.standard_normal((2, 5, 12)), jnp.float32) for _ in range(2))
    scale = jnp.asarray(rng.standard_normal(12), jnp.float32)

    def formula(x, scale):
        root = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 0.1)
        return x / root * scale[None, None]

    found, back = jax.vjp(lambda x, scale: rms_norm(x, scale, 0.1), x, scale)
    expected, plain = jax.vjp(formula, x, scale)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(back(grad), plain(grad), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    low = jax.grad(lambda x: rms_norm(x, scale, 0.1).astype(jnp.float32).sum())(
        x.astype(jnp.bfloat16)
    )
    assert low.dtype == jnp.bfloat16


def test_rms_norm_of_split_heads_gathers_nothing():
    """Normed queries and keys: rows lie on some devices, heads on others."""
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), devices=jax.devices()[:8])
    x = jax.ShapeDtypeStruct((2, 6, 4, 8), jnp.float32)
    scale = jax.ShapeDtypeStruct((8,), jnp.float32)
    heads = NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())

    def both(x, scale, grad):
        found, back = jax.vjp(lambda x, scale: rms_norm(x, scale, 1e-6), x, scale)
        return found, *back(grad)

    split = jax.jit(both, in_shardings=(heads, whole, heads), out_shardings=(heads, heads, whole))
    text = split.lower(x, scale, x).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert "all-reduce" in text  # of the gradient of the scale


def test_rotary_is_a_complex_rotation_of_half_split_pairs():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 2, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2], [7, 100, 5]], np.int32)
    angles = rotary_angles(jnp.asarray(positions), 6, 100.0)
    rotated = np.asarray(rotate(jnp.asarray(x), *angles))
    for row, column, head, pair in np.ndindex(2, 3, 2, 3):
        angle = positions[row, column] / 100.0 ** (2 * pair / 6)
        before = complex(x[row, column, head, pair], x[row, column, head, pair + 3])
        after = before * np.exp(1j * angle)
        got = complex(rotated[row, column, head, pair], rotated[row, column, head, pair + 3])
        assert abs(after - got) < 1e-4


def test_rotary_scores_depend_on_distance_alone():
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(rng.standard_normal((1, 1, 1, 8)), jnp.float32) for _ in range(2))

    def score(query_position: int, key_position: int) -> float:
        query_angles, key_angles = (
            rotary_angles(jnp.full((1, 1), position, jnp.int32), 8, 1e4)
            for position in (query_position, key_position)
        )
        return float(jnp.sum(rotate(query, *query_angles) * rotate(key, *key_angles)))

    assert abs(score(5, 2) - score(105, 102)) < 1e-4
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
