"""The grouped products, in interpret mode, against a product of each group alone in float64."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import absent_gpu

from models import kernels
from models.errors import ModelError
from models.kernels import hopper, megablox, tiles, triton

INTERPRETED = {"megablox": megablox, "triton": triton}

# rows, in, out, group sizes
CASES = {
    "even": (64, 32, 48, [16, 16, 16, 16]),
    "uneven": (70, 32, 48, [3, 41, 1, 25]),
    "empty groups": (70, 32, 48, [0, 41, 0, 29]),
    "empty ends": (70, 32, 48, [0, 0, 70, 0]),
    "one group has all": (300, 32, 16, [0, 300, 0, 0]),
    "rows past the last group": (290, 32, 48, [100, 0, 33, 7]),
    "no rows at all": (40, 32, 48, [0, 0, 0, 0]),
    "widths that no tile divides": (50, 100, 40, [20, 30]),
    "fewer rows than a tile": (5, 32, 48, [2, 3]),
    "several tiles a group": (1200, 768, 192, [130, 0, 1, 1000]),
}
WIDE = {"several tiles deep and wide": (150, 1536, 1100, [90, 50])}


def inputs(case: tuple, dtype: str):
    rows, size, out, group_sizes = case
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, size)), dtype)
    w = jnp.asarray(rng.standard_normal((len(group_sizes), size, out)), dtype)
    grad = jnp.asarray(rng.standard_normal((rows, out)), dtype)
    return x, w, grad, jnp.asarray(group_sizes, jnp.int32)


def expected(x, w, grad, group_sizes):
    """The three products in float64."""
    x, w, grad = (np.asarray(part).astype(np.float64) for part in (x, w, grad))
    product = np.zeros((x.shape[0], w.shape[2]))
    transposed, outer = np.zeros_like(x), np.zeros_like(w)
    start = 0
    for expert, size in enumerate(np.asarray(group_sizes)):
        own = slice(start, start + size)
        product[own], transposed[own] = x[own] @ w[expert], grad[own] @ w[expert].T
        outer[expert] = x[own].T @ grad[own]
        start += size
    return product, transposed, outer


def assert_near(actual: jax.Array, wanted: np.ndarray, dtype: str) -> None:
    """Equal up to rounding of the sums in float32, and of the result in its dtype."""
    assert actual.dtype == jnp.dtype(dtype) and actual.shape == wanted.shape
    scale = max(np.abs(wanted).max(), 1e-3)
    tolerance = 1e-6 if dtype == "float32" else 2**-8
    actual = np.asarray(actual).astype(np.float64)
    assert np.abs(actual - wanted).max() <= tolerance * scale
    assert not actual[wanted == 0].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", INTERPRETED)
def test_products_equal_those_of_each_group(name: str, case: str):
    check(INTERPRETED[name], case, "float32")


@pytest.mark.parametrize("case", ["rows past the last group", "several tiles a group"])
@pytest.mark.parametrize("name", INTERPRETED)
def test_products_of_bfloat16_sum_in_float32(name: str, case: str):
    check(INTERPRETED[name], case, "bfloat16")


def test_megablox_cuts_the_last_tile_of_a_wide_matrix():
    check(megablox, "several tiles deep and wide", "bfloat16", WIDE)


def check(module, case: str, dtype: str, cases: dict = CASES) -> None:
    x, w, grad, group_sizes = inputs(cases[case], dtype)
    product, transposed, outer = expected(x, w, grad, group_sizes)
    run = functools.partial(_run, group_sizes=group_sizes)
    assert_near(run(module.product, x, w), product, dtype)
    assert_near(run(module.transposed, grad, w), transposed, dtype)
    assert_near(run(module.outer, x, grad), outer, dtype)


@pytest.mark.parametrize("name", INTERPRETED)
def test_what_lies_past_the_groups_does_not_count(name: str):
    module = INTERPRETED[name]
    x, w, grad, group_sizes = inputs(CASES["rows past the last group"], "float32")
    past = jnp.arange(x.shape[0])[:, None] >= jnp.sum(group_sizes)
    x, grad = jnp.where(past, jnp.nan, x), jnp.where(past, jnp.nan, grad)
    run = functools.partial(_run, group_sizes=group_sizes)
    for result in (run(module.product, x, w), run(module.outer, x, grad)):
        assert np.isfinite(np.asarray(result)).all()


def _run(function, *operands, group_sizes):
    # The upstream kernels rely on implicit promotion.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.jit(functools.partial(function, interpret=True))(*operands, group_sizes)


@pytest.mark.parametrize(
    ("name", "function", "platform", "call"),
    [
        *[("megablox", name, "tpu", "tpu_custom_call") for name in kernels.Grouped._fields],
        *[("triton", name, "cuda", "triton") for name in kernels.Grouped._fields],
        # The warpgroup instructions have no interpreter: what they compute is seen on a GPU only.
        # `outer` asks the GPU for its number of processors, so it is only lowered on one.
        ("hopper", "product", "cuda", "mosaic_gpu"),
        ("hopper", "transposed", "cuda", "mosaic_gpu"),
    ],
)
def test_kernel_lowers_for_its_platform(name: str, function: str, platform: str, call: str):
    x, w, grad, group_sizes = inputs((200, 96, 160, [100, 0, 90]), "bfloat16")
    operands = {"product": (x, w), "transposed": (grad, w), "outer": (x, grad)}[function]
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        absent_gpu() if name == "triton" else contextlib.nullcontext(),
    ):
        traced = jax.jit(getattr(kernels.grouped(name), function)).trace(*operands, group_sizes)
        assert call in traced.lower(lowering_platforms=(platform,)).as_text()


def test_hopper_refuses_float32():
    x, w, _, group_sizes = inputs(CASES["even"], "float32")
    with pytest.raises(ModelError, match="float32"):
        hopper.product(x, w, group_sizes)


@pytest.mark.parametrize(
    ("rows", "experts", "tile"),
    [(32768, 128, 256), (4096, 128, 128), (10**6, 16, 512), (7, 128, 128)],
)
def test_tile_of_rows_follows_the_share_of_an_expert(rows: int, experts: int, tile: int):
    assert tiles.row_tile(rows, experts, 128, 512) == tile


@pytest.mark.parametrize(
    ("size", "tile"), [(768, 768), (192, 192), (1536, 768), (2048, 1024), (1100, 640)]
)
def test_tile_of_columns_wastes_little(size: int, tile: int):
    assert megablox._column_tile(size) == tile
