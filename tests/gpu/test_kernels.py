"""The kernels that a GPU chooses, run on it, against plain arithmetic in float64 or in XLA.

Elsewhere they are only compiled, and interpreted where that is possible.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kernels
from models.attention import attend_packed
from models.grouped import grouped_matmul

pytestmark = pytest.mark.gpu

GROUPS = {
    "even": [256, 256, 256, 256],
    "uneven": [3, 900, 1, 100],
    "empty groups": [0, 700, 0, 324],
    "rows past the last group": [100, 0, 33, 7],
    "nothing": [0, 0, 0, 0],
}


def chosen(dtype: str) -> str:
    """The back-end of grouped products that `auto` becomes here."""
    name = kernels.grouped_backend(jax.devices()[0], dtype)
    assert name is not None, f"{jax.devices()[0].device_kind} has no kernel for {dtype}"
    return name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS.keys())
def test_grouped_products_and_their_gradients(sizes: list[int], dtype: str):
    rng = np.random.default_rng(0)
    rows, size, out = 1024, 256, 384
    x = jnp.asarray(rng.standard_normal((rows, size)), dtype)
    w = jnp.asarray(rng.standard_normal((len(sizes), size, out)) / 16, dtype)
    weight = jnp.asarray(rng.standard_normal((rows, out)), dtype)
    groups = jnp.asarray(sizes, jnp.int32)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        product = grouped_matmul(x, w, groups, chosen(dtype))
        return jnp.sum(product.astype(jnp.float32) * weight.astype(jnp.float32))

    product = jax.jit(grouped_matmul, static_argnums=3)(x, w, groups, chosen(dtype))
    grad_x, grad_w = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, w)
    x64, w64, g64 = (np.asarray(part).astype(np.float64) for part in (x, w, weight))
    wanted, wanted_x, wanted_w = np.zeros((rows, out)), np.zeros_like(x64), np.zeros_like(w64)
    start = 0
    for expert, count in enumerate(sizes):
        own = slice(start, start + count)
        wanted[own], wanted_x[own] = x64[own] @ w64[expert], g64[own] @ w64[expert].T
        wanted_w[expert] = x64[own].T @ g64[own]
        start += count
    # float32 products on tensor cores keep ten bits of each factor.
    tolerance = 2**-8 if dtype == "bfloat16" else 2**-9
    for got, right in ((product, wanted), (grad_x, wanted_x), (grad_w, wanted_w)):
        error = np.abs(np.asarray(got).astype(np.float64) - right).max()
        assert error <= tolerance * max(np.abs(right).max(), 1e-3)


def test_attention_and_its_gradients():
    name = kernels.attention_backend(jax.devices()[0], "bfloat16")
    assert name is not None, f"{jax.devices()[0].device_kind} has no kernel for attention"
    rng = np.random.default_rng(0)
    query = jnp.asarray(rng.standard_normal((2, 256, 8, 64)), jnp.bfloat16)
    key, value = (jnp.asarray(rng.standard_normal((2, 256, 4, 64)), jnp.bfloat16) for _ in range(2))
    ids = np.repeat([[1, 2, 3, 0], [5, 5, 6, 6]], 64, axis=1).astype(np.int32)
    weight = jnp.asarray(rng.standard_normal(query.shape), jnp.float32) * (ids > 0)[..., None, None]

    def loss(backend: str, *parts: jax.Array) -> jax.Array:
        output = attend_packed(*parts, jnp.asarray(ids), None, backend)
        return jnp.sum(output.astype(jnp.float32) * weight)

    def outputs(backend: str) -> tuple[jax.Array, ...]:
        output = attend_packed(query, key, value, jnp.asarray(ids), None, backend)
        grads = jax.grad(loss, argnums=(1, 2, 3))(backend, query, key, value)
        return output, *grads

    ours = jax.jit(outputs, static_argnums=0)(name)
    plain = jax.jit(outputs, static_argnums=0)("xla")
    for got, right in zip(ours, plain, strict=True):
        got, right = (np.asarray(part).astype(np.float64) for part in (got, right))
        assert np.abs(got - right).max() <= 2**-5 * np.abs(right).max()
    assert not np.asarray(ours[0])[ids == 0].any()
