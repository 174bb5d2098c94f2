"""Eight-bit weights: hand-computed roundings, the bound of the error, and what stays as it is."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models import quantized, transformer
from models.config import TransformerConfig
from models.execution import PLAIN
from models.quantized import Quantized

MODEL = TransformerConfig(
    vocab_size=16,
    num_layers=2,
    embed=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    mlp=8,
    num_experts=4,
    qkv_bias=True,
    qk_norm=True,
)


def test_rounding_by_hand():
    weights = jnp.array([[1.27, -2.0, 0.0], [-0.634, 4.0, 0.0]])
    found = quantized.quantize(weights, 0)
    np.testing.assert_allclose(found.scale, [[0.01, 4 / 127, 0.0]], rtol=1e-6)
    assert found.values.dtype == jnp.int8
    # -2 is 63.5 steps of 4/127: halves go to the even neighbour
    assert found.values.tolist() == [[127, -64, 0], [-63, 127, 0]]
    back = quantized.dequantize(found, jnp.float32)
    np.testing.assert_allclose(back, [[1.27, -64 * 4 / 127, 0.0], [-0.63, 4.0, 0.0]], rtol=1e-6)
    assert quantized.dequantize(found, jnp.bfloat16).dtype == jnp.bfloat16


def test_the_error_is_at_most_half_a_step():
    weights = np.random.default_rng(0).standard_t(2, (3, 50, 20)).astype(np.float32)
    back = quantized.dequantize(quantized.quantize(jnp.asarray(weights), 1), jnp.float32)
    half = np.abs(weights).max(1, keepdims=True) / 254
    assert (np.abs(back - weights) <= half * 1.0001).all()


def test_numbers_that_are_none_stay_none():
    found = quantized.quantize(jnp.array([[jnp.nan], [1.0]]), 0)
    assert jnp.isnan(quantized.dequantize(found, jnp.float32)).all()


def test_matrices_of_blocks_are_rounded_and_nothing_else():
    params = transformer.init_params(MODEL, jax.random.key(0))
    rounded = quantized.map_matrices(
        lambda value, axes: quantized.quantize(value, quantized.summed_axis(axes)), params
    )
    names = set()
    for path, leaf in nnx.to_flat_state(rounded):
        before = dict(nnx.to_flat_state(params))[path]
        if isinstance(leaf.get_value(), Quantized):
            names.add(path[-1])
            assert path[0] == "blocks"
            assert leaf.get_value().values.shape == before.get_value().shape
        else:
            assert leaf.get_value() is before.get_value()
    assert names == {"query", "key", "value", "output", "gate_up", "down"}


def test_the_forward_takes_the_rounded_weights():
    """It is bit for bit the forward of the weights that the integers and scales stand for."""
    params = transformer.init_params(MODEL, jax.random.key(0))

    def there_and_back(value, axes):
        return quantized.dequantize(
            quantized.quantize(value, quantized.summed_axis(axes)), jnp.float32
        )

    def run(params):
        tokens = jnp.arange(8, dtype=jnp.int32)[None]
        return transformer.forward(MODEL, params, tokens, tokens, execution=PLAIN).hidden

    rounded = quantized.map_matrices(
        lambda value, axes: quantized.quantize(value, quantized.summed_axis(axes)), params
    )
    found = run(rounded)
    np.testing.assert_array_equal(found, run(quantized.map_matrices(there_and_back, params)))
    error = np.abs(found - run(params)).max()
    assert 1e-4 < error < 0.05
