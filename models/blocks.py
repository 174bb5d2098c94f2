"""The decoder blocks, and running all of them: over packed rows or through the cache, unrolled or
scanned.

A stack of layers is scanned with its cache as one array that is carried along and updated in place;
a layer finds its pages in it by an offset. Every layer is alike: where a family alternates kinds of
layers (sliding windows, state spaces), a block takes its kind here and a stack becomes a stack of
periods.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Integer

from models import kernels
from models.attention import Attention, attend_cached, attend_packed
from models.cache import Cache, Places, places, write_choices
from models.config import TransformerConfig
from models.errors import ModelError
from models.execution import Execution
from models.layers import RMSNorm, cast_params
from models.moe import MoE
from models.routing import Routing
from models.sharding import keep_rows

REMAT: dict[str, Callable[..., Any] | None] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": None,  # nothing is kept but the inputs of a layer
}


class Block(nnx.Module):
    """Pre-norm attention and experts, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.embed, config.norm_eps)
        self.attention = Attention(config, rngs)
        self.moe_norm = RMSNorm(config.embed, config.norm_eps)
        self.moe = MoE(config, rngs)


class Call(NamedTuple):
    """What the layers of one forward share."""

    config: TransformerConfig
    execution: Execution
    mesh: Mesh | None
    cos: Float[Array, "rows seq 1 half"]
    sin: Float[Array, "rows seq 1 half"]
    live: Bool[Array, "rows seq"]


@functools.lru_cache(maxsize=32)
def _graph(config: TransformerConfig) -> nnx.GraphDef:
    return nnx.split(nnx.eval_shape(lambda: Block(config, nnx.Rngs(params=0))))[0]


def _run(
    call: Call,
    params: nnx.State,
    x: Array,
    attend: Callable[[Array, Array, Array], tuple[Array, Any]],
    *,
    split: bool,
    name: str = "",
    replay: Array | None = None,
) -> tuple[Array, Routing, Any]:
    """Run one block; `attend` returns the heads and what it wrote, `split` says of the rows whether
    the mesh splits them.
    """
    block = nnx.merge(_graph(call.config), cast_params(params, x.dtype))
    keep = functools.partial(keep_rows, call.mesh, split=split)
    with jax.named_scope(f"attention{name}"):
        heads, written = attend(
            *block.attention.project(block.attention_norm(x), call.cos, call.sin)
        )
        x = keep(x + block.attention.merge(heads))
    with jax.named_scope(f"experts{name}"):
        output, routing = block.moe(
            block.moe_norm(x),
            call.live,
            call.mesh,
            split=split,
            backend=call.execution.experts,
            transport=call.execution.transport,
            replay=replay,
        )
        x = keep(x + output)
    return x, routing, written


def run_packed(
    call: Call,
    blocks: nnx.State,
    x: Float[Array, "rows seq embed"],
    segment_ids: Int[Array, "rows seq"],
    replay: Integer[Array, "layers rows seq chosen"] | None = None,
) -> tuple[Float[Array, "rows seq embed"], Routing]:
    """Run all blocks over packed rows; return the residual stream and the routing of each layer."""
    scanned = 0 not in blocks

    def attend(query: Array, key: Array, value: Array) -> tuple[Array, None]:
        backend = call.execution.attention
        return attend_packed(query, key, value, segment_ids, call.mesh, backend), None

    def layer(name: str, x: Array, inputs: tuple[nnx.State, Array | None]) -> tuple[Array, Routing]:
        params, replay = inputs
        return _run(call, params, x, attend, split=True, name=name, replay=replay)[:2]

    if (remat := call.execution.remat) != "none":
        # A scan keeps what is computed again apart from the first computation by itself.
        layer = jax.checkpoint(
            layer, policy=REMAT[remat], prevent_cse=not scanned, static_argnums=0
        )
    if scanned:
        return jax.lax.scan(functools.partial(layer, ""), x, (blocks, replay))
    routings = []
    for index in range(len(blocks)):
        inputs = blocks[index], None if replay is None else replay[index]
        x, routing = layer(f"_{index}", x, inputs)
        routings.append(routing)
    return x, _stack(routings)


def _stack(routings: list[Routing]) -> Routing:
    """Join the layers' routings as a scan would."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)


class _Pages(NamedTuple):
    """The cache of one layer, or of all layers as one axis."""

    keys: Float[Array, "pages _ _ _"]
    values: Float[Array, "pages _ _ _"] | None
    chosen: Array | None


def run_cached(
    call: Call,
    blocks: nnx.State,
    x: Float[Array, "rows seq embed"],
    positions: Int[Array, "rows seq"],
    page_table: Int[Array, "rows pages_per_row"],
    cache: Cache,
) -> tuple[Float[Array, "rows seq embed"], Routing, Cache]:
    """Run all blocks through the cache; return what `run_packed` does, and the cache written to."""
    if isinstance(cache.keys, tuple) != (0 in blocks):
        raise ModelError(
            "the layers of parameters and cache are not alike: one is unrolled, the other scanned; "
            "make both with the same `execution`"
        )
    num_pages, *page = cache.keys[0].shape  # of the first layer, in either layout
    page_tokens = page[kernels.paged(call.execution.attention).TOKENS_AXIS - 1]
    where = places(page_table, positions, num_pages, page_tokens)

    def layer(
        x: Array, params: nnx.State, pages: _Pages, table: Array, where: Places, name: str = ""
    ) -> tuple[Array, Routing, _Pages]:
        backend = call.execution.attention

        def attend(query: Array, key: Array, value: Array) -> tuple[Array, list[Array | None]]:
            heads, *written = attend_cached(
                query,
                key,
                value,
                pages.keys,
                pages.values,
                table,
                positions,
                where,
                call.mesh,
                backend,
            )
            return heads, written

        x, routing, written = _run(call, params, x, attend, split=False, name=name)
        chosen = pages.chosen
        if chosen is not None:
            chosen = write_choices(chosen, routing.chosen, where)
        return x, routing, _Pages(written[0], written[1], chosen)

    if isinstance(cache.keys, tuple):
        chosen = cache.chosen or (None,) * len(cache.keys)
        layers, routings = [], []
        for index, parts in enumerate(zip(cache.keys, cache.values, chosen, strict=True)):
            pages = _Pages(*parts)
            x, routing, pages = layer(x, blocks[index], pages, page_table, where, f"_{index}")
            layers.append(pages)
            routings.append(routing)
        keys, values, chosen = zip(*layers, strict=True)
        return x, _stack(routings), Cache(keys, values, None if cache.chosen is None else chosen)

    # Layers and pages as one axis: a layer's part is never cut out, which would copy it.
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), cache)
    num_layers = cache.keys.shape[0]
    there, nowhere = where.pages < num_pages, num_layers * num_pages

    def step(
        carry: tuple[Array, _Pages], inputs: tuple[nnx.State, Array]
    ) -> tuple[tuple[Array, _Pages], Routing]:
        (x, pages), (params, offset) = carry, inputs
        moved = jnp.where(there, where.pages + offset, jnp.asarray(nowhere, where.pages.dtype))
        x, routing, pages = layer(
            x, params, pages, page_table + offset, where._replace(pages=moved)
        )
        return (x, pages), routing

    offsets = num_pages * jnp.arange(num_layers, dtype=page_table.dtype)
    (x, pages), routing = jax.lax.scan(step, (x, _Pages(*flat)), (blocks, offsets))
    written = jax.tree.map(lambda leaf, like: leaf.reshape(like.shape), Cache(*pages), cache)
    return x, routing, written
