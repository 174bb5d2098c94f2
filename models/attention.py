"""Grouped-query attention, over packed rows (training) and over pages of a cache (sampling).

    packed row   ids   1 1 1 2 2 0       query 4 (id 2) sees keys 3..4, query 5 (padding) sees none
    pages        keys  0 1 | 2 x         the query at position 2 sees keys 0..2, never what an
                                         earlier sequence left at x

Under a mesh each device attends with its own heads, and over packed rows to its own rows. Where
`tensor` has more devices than there are key-value heads, each head is computed by all of them and
repeated, so that every device holds just the one that its queries read.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from models import kernels
from models.blockwise import attend
from models.cache import Places, heads_spec, keep_finite
from models.config import TransformerConfig
from models.execution import AttentionBackend
from models.layers import RMSNorm, fan_in, normal, rotate, zeros
from models.sharding import ROW_AXES, split_rows


class Attention(nnx.Module):
    """The projections around attention."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        embed, dim = config.embed, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        std = fan_in(embed)
        self.query = normal(rngs, (embed, heads, dim), ("embed", "heads", "head_dim"), std)
        self.key = normal(rngs, (embed, kv_heads, dim), ("embed", "kv_heads", "head_dim"), std)
        self.value = normal(rngs, (embed, kv_heads, dim), ("embed", "kv_heads", "head_dim"), std)
        out_std = fan_in(heads * dim) / (2 * config.num_layers) ** 0.5
        self.output = normal(rngs, (heads, dim, embed), ("heads", "head_dim", "embed"), out_std)
        bias = config.qkv_bias
        self.query_bias = zeros((heads, dim), ("heads", "head_dim")) if bias else None
        self.key_bias = zeros((kv_heads, dim), ("kv_heads", "head_dim")) if bias else None
        self.value_bias = zeros((kv_heads, dim), ("kv_heads", "head_dim")) if bias else None
        self.query_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None
        self.key_norm = RMSNorm(dim, config.norm_eps) if config.qk_norm else None

    def project(
        self,
        x: Float[Array, "rows seq embed"],
        cos: Float[Array, "rows seq 1 half"],
        sin: Float[Array, "rows seq 1 half"],
    ) -> tuple[
        Float[Array, "rows seq heads head_dim"],
        Float[Array, "rows seq kv_heads head_dim"],
        Float[Array, "rows seq kv_heads head_dim"],
    ]:
        """Return rotated queries, rotated keys, and values."""
        query = jnp.einsum("rse,ehd->rshd", x, self.query[...])
        key = jnp.einsum("rse,ehd->rshd", x, self.key[...])
        value = jnp.einsum("rse,ehd->rshd", x, self.value[...])
        if self.query_bias is not None and self.key_bias is not None:
            query, key = query + self.query_bias[None, None], key + self.key_bias[None, None]
        if self.value_bias is not None:
            value = value + self.value_bias[None, None]
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, cos, sin), rotate(key, cos, sin), value

    def merge(
        self, heads: Float[Array, "rows seq heads head_dim"]
    ) -> Float[Array, "rows seq embed"]:
        """Project the heads back to the residual stream."""
        # As one axis: over two, the CPU's compiler turns the weights around at every step.
        joined = heads.reshape(*heads.shape[:2], -1)
        return joined @ self.output[...].reshape(joined.shape[2], -1)


def packed_ranges(
    segment_ids: Int[Array, "rows seq"],
) -> tuple[Int[Array, "rows seq"], Int[Array, "rows seq"]]:
    """Return first and last key of each token: its run of equal ids up to itself; none for id 0."""
    index = jnp.broadcast_to(
        jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None], segment_ids.shape
    )
    changed = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(jnp.where(changed, index[:, 1:], 0), ((0, 0), (1, 0)))
    return jax.lax.cummax(starts, axis=1), jnp.where(segment_ids > 0, index, -1)


def attend_packed(
    query: Float[Array, "rows seq heads head_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    segment_ids: Int[Array, "rows seq"],
    mesh: Mesh | None = None,
    backend: AttentionBackend = "xla",
) -> Float[Array, "rows seq heads head_dim"]:
    """Attend causally within segments; with a mesh, each device does its own rows and heads."""

    def blockwise(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
        rows = jnp.arange(query.shape[0], dtype=jnp.int32)
        return attend(query, key, value, rows, *packed_ranges(segment_ids))

    local = blockwise if backend == "xla" else kernels.attention(backend)
    heads = PartitionSpec(ROW_AXES, None, "tensor")
    split = split_rows(mesh, local, (heads, heads, heads, PartitionSpec(ROW_AXES)), heads)
    return split(query, _spread(mesh, key), _spread(mesh, value), segment_ids)


def attend_cached(
    query: Float[Array, "rows seq heads head_dim"],
    key: Float[Array, "rows seq kv_heads head_dim"],
    value: Float[Array, "rows seq kv_heads head_dim"],
    keys: Float[Array, "pages _ _ _"],
    values: Float[Array, "pages _ _ _"] | None,
    page_table: Int[Array, "rows pages_per_row"],
    positions: Int[Array, "rows seq"],
    where: Places,
    mesh: Mesh | None = None,
    backend: AttentionBackend = "xla",
) -> tuple[
    Float[Array, "rows seq heads head_dim"],
    Float[Array, "pages _ _ _"],
    Float[Array, "pages _ _ _"] | None,
]:
    """Write `key` and `value` of all rows at their places, then attend from each query to the keys
    of its row's pages up to its position; return the caches as well. With a mesh, each device does
    its own heads.
    """
    paged = kernels.paged(backend)

    def local(query, key, value, keys, values, page_table, positions, where):
        key, value = keep_finite(key, value)
        keys, values = paged.write(keys, values, key, value, where)
        heads = paged.attend(query, keys, values, page_table, positions, key.shape[2])
        return heads, keys, values

    heads, whole = PartitionSpec(None, None, "tensor"), PartitionSpec()
    pages = heads_spec(backend)
    split = split_rows(
        mesh, local, (heads,) * 3 + (pages,) * 2 + (whole,) * 3, (heads, pages, pages)
    )
    key, value = _spread(mesh, key), _spread(mesh, value)
    return split(query, key, value, keys, values, page_table, positions, where)


def _spread(mesh: Mesh | None, x: Array) -> Array:
    """Repeat key-value heads until there is one for each device along `tensor`."""
    copies = 1 if mesh is None else mesh.shape["tensor"] // x.shape[2]
    return x if copies <= 1 else jnp.repeat(x, copies, axis=2)
