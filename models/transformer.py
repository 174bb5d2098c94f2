"""The decoder-only transformer: one forward for training and for sampling.

Functions are pure over `Params`, the `nnx.State` of the parameters, so callers jit over plain
pytrees; a block's module structure is rebuilt from a cached graph definition while tracing and
costs nothing afterwards. Layers are a list or a stack (`models.layout`), and the forward follows
what it is given: unrolled, which CPUs want, since a scan copies each layer's weights at every
decode step; or scanned, where one layer is compiled for all. Losses and sampling are not here.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Integer, PRNGKeyArray

from models import embedding, layout
from models.blocks import Block, Call, run_cached, run_packed
from models.cache import Cache, init_cache
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import PLAIN, Execution
from models.layers import RMSNorm, fan_in, normal, rms_norm, rotary_angles
from models.routing import Routing
from models.sharding import keep_rows, param_shardings

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
    routing: Routing  # what the routers did, over a leading axis of layers

    @property
    def expert_load(self) -> Any:  # [layers, experts]; NumPy once fetched to the host
        """Live tokens that each expert received."""
        return self.routing.load


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


def abstract_params(config: TransformerConfig, execution: Execution = PLAIN) -> Params:
    """Return the parameters as shapes and dtypes."""
    return jax.tree.map(lambda leaf: leaf, _abstract(config, execution))  # a tree of its own


@functools.lru_cache(maxsize=32)
def _abstract(config: TransformerConfig, execution: Execution) -> Params:
    return jax.eval_shape(lambda: _draw(config, execution, jax.random.key(0)))


def init_params(
    config: TransformerConfig,
    key: PRNGKeyArray,
    mesh: Mesh | None = None,
    execution: Execution = PLAIN,
) -> Params:
    """Draw parameters, each directly on its devices when a mesh is given; the same numbers in
    either layout.
    """
    return _initializer(config, mesh, execution)(key)


@functools.lru_cache(maxsize=32)
def _initializer(
    config: TransformerConfig, mesh: Mesh | None, execution: Execution
) -> Callable[[PRNGKeyArray], Params]:
    """Return the jitted draw, compiled once for a config and a mesh."""
    shardings = None if mesh is None else param_shardings(config, mesh, execution)
    return jax.jit(functools.partial(_draw, config, execution), out_shardings=shardings)


def _draw(config: TransformerConfig, execution: Execution, key: PRNGKeyArray) -> Params:
    params = nnx.state(Transformer(config, nnx.Rngs(params=key)))
    if execution.layers == "scanned":
        params = layout.stacked(params)
    dtype = jnp.dtype(execution.param_dtype)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def forward(
    config: TransformerConfig,
    params: Params,
    tokens: Int[Array, "rows seq"],
    positions: Int[Array, "rows seq"],
    *,
    segment_ids: Int[Array, "rows seq"] | None = None,
    cache: Cache | None = None,
    page_table: Int[Array, "rows pages_per_row"] | None = None,
    mesh: Mesh | None = None,
    execution: Execution = PLAIN,
    replay: Integer[Array, "layers rows seq chosen"] | None = None,
) -> Forward:
    """Run the transformer over packed rows, or through a cache when one is given.

    Args:
        positions: position of each token in its own sequence; with a cache, those of a row follow
            one another, and -1 is padding behind them.
        segment_ids: without a cache, tokens attend within runs of equal ids and 0 is padding; None
            is one run a row.
        page_table: with a cache, the pages of each row, in the order of its positions. What is not
            there yet is any number. Rows may share pages, and may be pieces of one sequence: the
            keys of all rows are written before any of them attends.
        mesh: where the parameters lie. Its devices split the rows, which are whole on all of them
            with a cache. None leaves the splitting to the compiler, which may gather every row on
            every device.
        execution: dtype, kernels and rematerialisation; the layout is that of `params`.
        replay: without a cache, the experts of each token in each layer (`Routing.chosen`), instead
            of the routers' choice; the routers still weigh them.
    """
    if (cache is None) != (page_table is None):
        raise ModelError("a cache and the page_table of its rows go together; pass both or neither")
    if cache is not None and (segment_ids is not None or replay is not None):
        raise ModelError(
            "segment_ids and replay are for rows without a cache; remove them or the cache"
        )
    packed = cache is None
    if segment_ids is None:
        segment_ids = jnp.ones_like(tokens)
    live = segment_ids > 0 if packed else positions >= 0
    angles = rotary_angles(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    table, dtype = _array(params, "embedding"), jnp.dtype(execution.compute_dtype)
    x = embedding.lookup(table, tokens, dtype, mesh, rows_split=packed)
    x = keep_rows(mesh, x, split=packed)
    if config.scale_embedding:
        x = x * config.embed**0.5
    call = Call(config, execution, mesh, *angles, live)
    if cache is None or page_table is None:
        x, routing = run_packed(call, params["blocks"], x, segment_ids, replay)
    else:
        x, routing, cache = run_cached(call, params["blocks"], x, positions, page_table, cache)
    scale = _array(params, "final_norm", "scale")
    return Forward(rms_norm(x, scale, config.norm_eps), cache, routing)


def _array(params: Any, *path: str) -> Array:
    """Return one parameter outside the blocks."""
    for name in path:
        params = params[name]
    return params[...]


def logits(
    config: TransformerConfig,
    params: Params,
    hidden: Float[Array, "*batch embed"],
    mesh: Mesh | None = None,
    *,
    rows_split: bool = True,
) -> Float[Array, "*batch vocab"]:
    """Return float32 scores of the vocabulary for final-normed hidden states.

    With a mesh, the scores lie split by vocabulary, and by the rows of `hidden` if these are split
    as those of `forward` without a cache are.
    """
    table = _array(params, "embedding").T if config.tied_head else _array(params, "head")
    return embedding.scores(table, hidden, mesh, rows_split=rows_split)
