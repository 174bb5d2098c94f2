"""Attention over pages, with kernels (interpreted) and without, against a dense softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent import absent_gpu

from models import kernels, paged
from models.cache import places
from models.errors import ModelError
from models.kernels import ragged_pages


def dense(query, key, value, last):
    """Every query of [rows, seq, heads, dim] over [rows, context, kv_heads, dim], and a mask."""
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("rqhd,rchd->rhqc", query, key) / query.shape[3] ** 0.5
    mask = (jnp.arange(scores.shape[3])[None, None] <= last[:, :, None])[:, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("rhqc,rchd->rqhd", jnp.where(mask, weights, 0.0), value)


class Situation:
    """Six rows, their keys and values in pages here and there that held something else before."""

    def __init__(
        self, backend, seq, page_tokens, width, heads=6, kv_heads=2, dim=8, dtype="float32"
    ):
        rng = np.random.default_rng(seq * 100 + page_tokens)
        rows, context = 6, page_tokens * width

        def random(*shape):
            return jnp.asarray(rng.standard_normal(shape), jnp.dtype(dtype))

        self.module, self.kv_heads = kernels.paged(backend), kv_heads
        self.query = random(rows, seq, heads, dim)
        self.key, self.value = (random(rows, context, kv_heads, dim) for _ in range(2))
        num_pages = rows * width + 1
        table = rng.permutation(num_pages)[: rows * width].reshape(rows, width)
        self.table = jnp.asarray(table, jnp.int32)
        last = rng.integers(0, context - seq + 1, (rows, 1)) + np.arange(seq)
        last[0], last[1] = np.arange(seq), context - seq + np.arange(seq)  # start and end
        last[2] = -1
        last[3, seq // 2 + 1 :] = -1
        self.last = jnp.asarray(last, jnp.int32)
        before = [
            None if shape is None else jnp.full(shape, 1e3, jnp.dtype(dtype))
            for shape in self.module.shapes(num_pages, page_tokens, kv_heads, dim)
        ]
        ends = self.last.max(axis=1, keepdims=True)
        positions = jnp.arange(context, dtype=jnp.int32)[None]
        where = places(
            self.table, jnp.where(positions <= ends, positions, -1), num_pages, page_tokens
        )
        self.keys, self.values = self.module.write(*before, self.key, self.value, where)

    def attend(self, jit=True, **options):
        function = functools.partial(self.module.attend, kv_heads=self.kv_heads, **options)
        return (jax.jit(function) if jit else function)(
            self.query, self.keys, self.values, self.table, self.last
        )

    def expected(self):
        query, key, value = (x.astype(jnp.float32) for x in (self.query, self.key, self.value))
        return dense(query, key, value, self.last)

    def check(self, got):
        half = self.query.dtype == jnp.bfloat16
        assert got.dtype == self.query.dtype and got.shape == self.query.shape
        got = got.astype(jnp.float32)
        np.testing.assert_allclose(got, self.expected(), atol=0.05 if half else 2e-5)
        assert not got[2].any() and not got[3, self.query.shape[1] // 2 + 1 :].any()


GRID = [(1, 1, 7), (1, 16, 5), (1, 4, 9), (5, 4, 6), (9, 16, 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("seq", "page_tokens", "width"), GRID)
def test_attention_without_a_kernel(monkeypatch, seq, page_tokens, width, dtype):
    """A block, and a chunk of pages, each smaller and larger than there are keys."""
    made = Situation("xla", seq, page_tokens, width, dtype=dtype)
    for block, chunk in ((8, 200), (512, 2**20)):
        monkeypatch.setattr(paged, "KEY_BLOCK", block)
        monkeypatch.setattr(paged, "CHUNK_BYTES", chunk)
        made.check(made.attend())


@pytest.mark.parametrize(("seq", "page_tokens", "width"), GRID)
def test_wide_attention(monkeypatch, seq, page_tokens, width):
    """What other devices than a CPU run when there is no kernel."""
    monkeypatch.setattr(paged, "KEY_BLOCK", 8)
    made = Situation("xla", seq, page_tokens, width)
    scaled, keys = made.query * made.query.shape[3] ** -0.5, made.keys.swapaxes(2, 3)
    made.check(paged.attend_wide(scaled, keys, made.values, made.table, made.last))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("seq", "page_tokens", "width", "heads", "kv_heads", "dim"),
    [
        (1, 16, 5, 8, 2, 32),
        (1, 64, 2, 8, 8, 64),
        (1, 4, 40, 6, 2, 24),  # heads padded to 32, and more steps than splits
        (1, 128, 3, 48, 2, 16),
        (6, 16, 5, 8, 2, 32),
    ],
)
def test_the_kernel_of_a_gpu(seq, page_tokens, width, heads, kv_heads, dim, dtype):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = Situation("cudnn", seq, page_tokens, width, heads, kv_heads, dim, dtype)
        made.check(made.attend(interpret=True))


@pytest.mark.parametrize(
    ("seq", "page_tokens", "width", "heads", "kv_heads", "dim", "dtype"),
    [
        (1, 64, 2, 8, 4, 128, "bfloat16"),
        (1, 16, 3, 6, 3, 24, "float32"),  # padded to four heads of 128 numbers
        (6, 16, 5, 8, 2, 128, "float32"),
        (40, 32, 3, 4, 1, 128, "bfloat16"),
    ],
)
def test_what_the_kernel_of_a_tpu_is_given(
    monkeypatch, seq, page_tokens, width, heads, kv_heads, dim, dtype
):
    """Neither of jax's interpreters takes the kernel, so its own reference stands in for it."""

    def reference(*inputs, num_kv_pages_per_block, num_queries_per_block, **options):
        blocks = num_kv_pages_per_block, num_queries_per_block
        for check in (kernel.static_validate_inputs, kernel.dynamic_validate_inputs):
            check(
                *inputs,
                **options,
                num_kv_pages_per_block=blocks[0],
                num_queries_per_block=blocks[1],
            )
        kernel.get_min_heads_per_blk(
            *(x.shape[-2] for x in inputs[:2]), *(x.dtype for x in inputs[:2])
        )
        return kernel.ref_ragged_paged_attention(*inputs, **options)

    kernel = ragged_pages.kernel
    monkeypatch.setattr(kernel, "ragged_paged_attention", reference)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        made = Situation("splash", seq, page_tokens, width, heads, kv_heads, dim, dtype)
        made.check(made.attend(jit=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seq", [1, 32])
def test_the_kernel_of_a_gpu_lowers_without_one(dtype, seq):
    """That of a TPU asks which TPU it is for: benchmarks/aot_sampler.py tells it."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        absent_gpu(),
    ):
        made = Situation("cudnn", seq, 32, 4, 8, 4, 128, dtype)
        attend = jax.jit(functools.partial(made.module.attend, kv_heads=4))
        inputs = made.query, made.keys, made.values, made.table, made.last
        text = attend.trace(*inputs).lower(lowering_platforms=("cuda",)).as_text()
    assert ("__gpu$xla.gpu.triton" in text) == (seq == 1)


@pytest.mark.parametrize("seq", [1, 4])
def test_pages_that_are_not_there_yet_may_be_any_number(seq):
    made = Situation("xla", seq, 4, 5)
    made.last = jnp.minimum(made.last, 9)  # of page 2
    expected = made.attend()
    made.table = made.table.at[:, 3:].set(jnp.array([[-1, 10**6]]))
    assert np.array_equal(made.attend(), expected)


def test_a_page_that_triton_cannot_take_is_refused():
    with pytest.raises(ModelError, match=r"48 tokens; execution\.attention=cudnn takes"):
        kernels.paged("cudnn").shapes(4, 48, 2, 64)
