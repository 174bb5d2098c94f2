"""The decoder-only transformer: one forward for training and for sampling.

Functions are pure over `Params`, the `nnx.State` of the parameters, so callers jit over plain
pytrees; the module structure is rebuilt from a cached graph definition while tracing and costs
nothing afterwards. Layers are unrolled: on CPU a scan over layers copies each layer's weights at
every decode step. Losses and sampling are not here.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, PRNGKeyArray

from models.attention import Attention, Cache, attend, attend_packed, init_cache, write_cache
from models.config import TransformerConfig
from models.errors import ModelError
from models.layers import RMSNorm, fan_in, normal, rotary_angles
from models.moe import MoE
from models.sharding import gather_columns, keep_rows, param_shardings

__all__ = [
    "Cache",
    "Forward",
    "Params",
    "Transformer",
    "abstract_params",
    "forward",
    "init_cache",
    "init_params",
    "logits",
]

Params = nnx.State  # of nnx.Param leaves, in the layout of Transformer


class Forward(NamedTuple):
    """What `forward` returns."""

    hidden: Float[Array, "rows seq embed"]  # after the final norm; `logits` takes it from here
    cache: Cache | None  # the cache with this call's keys and values written
    expert_load: Float[Array, "layers experts"]  # live tokens each expert received


class Block(nnx.Module):
    """Pre-norm attention and experts, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.moe_norm = RMSNorm(config.embed, config.norm_eps)
        self.moe = MoE(config, rngs)


class Transformer(nnx.Module):
    """The parameters and their structure; `forward` and `logits` say how they are used."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        shape = (config.vocab_size, config.embed)
        # Scaled, a token starts as large as what the blocks add to it, and the same small table is
        # a head with logits of one: copying a token is then one map for the whole vocabulary.
        std = fan_in(config.embed) if config.scale_embedding else 0.02
        self.embedding = normal(rngs, shape, ("vocab", "embed"), std)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.embed, config.norm_eps)
        self.head = (
            None
            if config.tied_head
            else normal(rngs, shape[::-1], ("embed", "vocab"), fan_in(config.embed))
        )


@functools.lru_cache(maxsize=32)
def _abstract(config: TransformerConfig) -> tuple[nnx.GraphDef, Params]:
    """Return the graph definition and the parameters' shapes, without allocating anything."""
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(params=0))))


def abstract_params(config: TransformerConfig) -> Params:
    """Return the parameters as shapes and dtypes."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _abstract(config)[1]
    )


def init_params(config: TransformerConfig, key: PRNGKeyArray, mesh: Mesh | None = None) -> Params:
    """Draw parameters, each directly on its devices when a mesh is given."""
    return _initializer(config, mesh)(key)


@functools.lru_cache(maxsize=32)
def _initializer(config: TransformerConfig, mesh: Mesh | None) -> Callable[[PRNGKeyArray], Params]:
    """Return the jitted draw, compiled once for a config and a mesh."""
    shardings = None if mesh is None else param_shardings(config, mesh)

    def draw(key: PRNGKeyArray) -> Params:
        return nnx.state(Transformer(config, nnx.Rngs(params=key)))

    return jax.jit(draw, out_shardings=shardings)


def _merge(config: TransformerConfig, params: Params) -> Transformer:
    return nnx.merge(_abstract(config)[0], params)


def forward(
    config: TransformerConfig,
    params: Params,
    tokens: Int[Array, "rows seq"],
    positions: Int[Array, "rows seq"],
    *,
    segment_ids: Int[Array, "rows seq"] | None = None,
    cache: Cache | None = None,
    slot_ids: Int[Array, " rows"] | None = None,
    mesh: Mesh | None = None,
) -> Forward:
    """Run the transformer over packed rows, or through a cache when one is given.

    Args:
        positions: position of each token in its own sequence; with a cache, -1 is padding.
        segment_ids: without a cache, tokens attend within runs of equal ids and 0 is padding; None
            is one run a row.
        slot_ids: the cache row of each row, without repeats; None means row i is slot i.
        mesh: without a cache, the mesh whose devices split the rows; None leaves the splitting to
            the compiler, which may gather every row on every device.
    """
    if cache is None and slot_ids is not None:
        raise ModelError("slot_ids describe a cache, but cache is None; pass one")
    if cache is not None and (segment_ids is not None or mesh is not None):
        raise ModelError(
            "segment_ids and mesh are for rows without a cache; remove them or the cache"
        )
    model = _merge(config, params)
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    live = segment_ids > 0 if cache is None else positions >= 0
    cos, sin = rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    x = keep_rows(mesh, gather_columns(mesh, model.embedding[...])[tokens])
    if config.scale_embedding:
        x = x * config.embed**0.5
    keys, values, loads = [], [], []
    for layer, block in enumerate(model.blocks):
        with jax.named_scope(f"attention_{layer}"):
            query, key, value = block.attention.project(block.attention_norm(x), cos, sin)
            if cache is None:
                heads = attend_packed(query, key, value, segment_ids, mesh)
            else:
                rows = jnp.arange(tokens.shape[0]) if slot_ids is None else slot_ids
                keys.append(write_cache(cache.keys[layer], key, positions, rows))
                values.append(write_cache(cache.values[layer], value, positions, rows))
                first = jnp.zeros_like(positions)
                heads = attend(query, keys[-1], values[-1], rows, first, positions)
            x = keep_rows(mesh, x + block.attention.merge(heads))
        with jax.named_scope(f"experts_{layer}"):
            output, routing = block.moe(block.moe_norm(x), live, mesh)
            x = keep_rows(mesh, x + output)
        loads.append(routing.load)
    written = None if cache is None else Cache(tuple(keys), tuple(values))
    return Forward(model.final_norm(x), written, jnp.stack(loads))


def logits(
    config: TransformerConfig, params: Params, hidden: Float[Array, "*batch embed"]
) -> Float[Array, "*batch vocab"]:
    """Return float32 scores of the vocabulary for final-normed hidden states."""
    model = _merge(config, params)
    table = model.embedding[...].T if model.head is None else model.head[...]
    return jnp.einsum("...e,ev->...v", hidden, table, preferred_element_type=jnp.float32)
