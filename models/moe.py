"""Mixture-of-experts feed-forward: router, transport of tokens to their experts, combination.

Dropless at any load: every live token is computed by each of its experts, whatever the balance.
Over a mesh, experts stay on the devices of the axis `expert` and are never gathered, their hidden
width is split over `tensor`, and what `fsdp` splits is gathered for use. The router is in
`models.routing`, the work on one device in `models.dispatch`.
"""

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Integer

from models.config import TransformerConfig
from models.dispatch import Experts, Result, apply_experts, gated, send_to_experts
from models.execution import Transport
from models.layers import fan_in, normal
from models.routing import Routes, Routing, route
from models.sharding import ROW_AXES, split_rows, sum_over

logger = logging.getLogger(__name__)

FEW_TOKENS = 64  # tokens a device up to which all of them go everywhere


@functools.lru_cache(maxsize=256)  # settled once for a shape, and logged once
def choose_transport(
    name: Transport, mesh: Mesh, tokens: int, chosen: int, split: bool
) -> Transport:
    """Say how tokens reach experts on other devices.

    replicated    every device of `expert` has all tokens, and the results are added up: little to
                  send when tokens are few, and the only way when the mesh does not split the rows
    gather        tokens are gathered, and each device keeps the sum of its own
    ragged        each copy of a token goes to its expert's device: less to send where a token has
                  fewer experts than `expert` has devices, and by default on TPU alone, whose
                  interconnect the ragged all-to-all uses well
    """
    shards = mesh.shape["expert"]
    each = tokens // (mesh.size // mesh.shape["tensor"])
    if not split or (name == "auto" and each <= FEW_TOKENS):
        found: Transport = "replicated"
    elif name != "auto":
        found = name
    else:
        is_tpu = mesh.devices.flat[0].platform == "tpu"
        found = "ragged" if is_tpu and chosen < shards else "gather"
    if shards > 1:
        logger.info("%d tokens over %d shards of the experts: %s (%s)", tokens, shards, found, name)
    return found


class MoE(nnx.Module):
    """SwiGLU experts behind a top-k router; one expert is a plain dense layer without a router."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        experts, embed, mlp = config.num_experts, config.embed, config.mlp
        self.experts_per_token = config.experts_per_token
        self.normalize = config.norm_topk_prob
        self.router = (
            normal(rngs, (embed, experts), ("embed", "router"), fan_in(embed))
            if experts > 1
            else None
        )
        # Gate and up lie on an axis of their own: one product computes both, and `mlp` can still
        # be sharded.
        self.gate_up = normal(
            rngs, (experts, embed, 2, mlp), ("expert", "embed", None, "mlp"), fan_in(embed)
        )
        out_std = fan_in(mlp) / (2 * config.num_layers) ** 0.5
        self.down = normal(rngs, (experts, mlp, embed), ("expert", "mlp", "embed"), out_std)

    def __call__(
        self,
        x: Float[Array, "rows seq embed"],
        live: Bool[Array, "rows seq"],
        mesh: Mesh | None = None,
        *,
        split: bool = True,
        backend: str = "blocks",
        transport: Transport = "auto",
        replay: Integer[Array, "rows seq chosen"] | None = None,
    ) -> tuple[Float[Array, "rows seq embed"], Routing]:
        """Return the output, zeros for tokens not live, and what the router did.

        Args:
            mesh: where the weights lie; None is one device.
            split: whether the mesh splits the rows, or each device has all of them.
            backend, transport: as in `models.execution`.
            replay: experts to take instead of the router's choice; it still weighs them.
        """
        mesh = None if mesh is None or mesh.size == 1 else mesh
        rows: tuple[str, ...] = ROW_AXES if split else ()
        kind: Transport | None = None
        if mesh is not None:
            kind = choose_transport(transport, mesh, live.size, self.experts_per_token, split)
            if kind == "replicated":
                rows = tuple(axis for axis in rows if axis != "expert")
        layer = functools.partial(
            _layer,
            mesh=mesh,
            rows=rows,
            transport=kind,
            native=mesh is not None and mesh.devices.flat[0].platform == "tpu",
            backend=backend,
            chosen=self.experts_per_token,
            normalize=self.normalize,
        )
        whole, by_row = PartitionSpec(), PartitionSpec(rows)
        inputs = (
            by_row,
            by_row,
            None if self.router is None else whole,
            PartitionSpec("expert", "fsdp", None, "tensor"),
            PartitionSpec("expert", "tensor", "fsdp"),
            None if replay is None else by_row,
        )
        specs: Any = (by_row, whole, whole, whole, whole, whole)
        outputs = (by_row, Routing(*specs))
        router = None if self.router is None else self.router[...]
        gate_up, down = (weight[...].astype(x.dtype) for weight in (self.gate_up, self.down))
        return split_rows(mesh, layer, inputs, outputs)(x, live, router, gate_up, down, replay)


def _layer(
    x: Array,
    live: Array,
    router: Array | None,
    gate_up: Array,
    down: Array,
    replay: Array | None,
    *,
    mesh: Mesh | None,
    rows: tuple[str, ...],
    transport: Transport | None,
    native: bool,
    backend: str,
    chosen: int,
    normalize: bool,
) -> tuple[Array, Routing]:
    """Compute what one device has to: `rows` names the mesh axes that its rows are split over."""
    if mesh is not None:
        gate_up = jax.lax.all_gather(gate_up, "fsdp", axis=1, tiled=True)
        down = jax.lax.all_gather(down, "fsdp", axis=2, tiled=True)
    experts = Experts(gate_up.reshape(*gate_up.shape[:2], -1), down)
    if router is None:
        return _dense(x, live, experts, mesh, rows)
    with jax.named_scope("moe_route"):
        routes = route(x, live, router, chosen, normalize=normalize, replay=replay)
    # Padding goes to no expert.
    ids = jnp.where(live[:, :, None], routes.chosen, -1).reshape(-1, chosen)
    flat, weights = x.reshape(-1, x.shape[-1]), routes.weights.reshape(ids.shape)
    shards = 1 if mesh is None else mesh.shape["expert"]
    if transport == "ragged":
        result = send_to_experts(flat, weights, ids, experts, backend, shards, native=native)
        output = result.output.astype(x.dtype)
    elif transport == "gather":
        flat, weights, ids = (
            jax.lax.all_gather(part, "expert", tiled=True) for part in (flat, weights, ids)
        )
        result = apply_experts(flat, weights, _from_here(ids, experts), experts, backend, shards)
        output = jax.lax.psum_scatter(result.output.astype(x.dtype), "expert", tiled=True)
    else:
        here = ids if mesh is None else _from_here(ids, experts)
        result = apply_experts(flat, weights, here, experts, backend, shards)
        output = sum_over(mesh, result.output.astype(x.dtype), "expert")
    output = sum_over(mesh, output, "tensor").reshape(x.shape)
    return output, _summed(routes, live, result, mesh, rows)


def _from_here(ids: Array, experts: Experts) -> Array:
    """Count experts from the first one of this device, and none of other devices."""
    local_experts = experts.down.shape[0]
    here = ids - jax.lax.axis_index("expert") * local_experts
    return jnp.where((here >= 0) & (here < local_experts), here, -1)


def _summed(
    routes: Routes, live: Array, result: Result, mesh: Mesh | None, rows: tuple[str, ...]
) -> Routing:
    """Add up over the devices what each did with its rows."""
    total = functools.partial(sum_over, mesh, axes=rows)
    load = total(routes.load)
    computed = sum_over(mesh, result.computed, tuple(dict.fromkeys((*rows, "expert"))))
    return Routing(
        chosen=routes.chosen,
        load=load,
        tokens=total(jnp.sum(live, dtype=jnp.float32)),
        dropped=jnp.sum(load) - computed,
        balance=total(routes.balance),
        router_z=total(routes.router_z),
    )


def _dense(
    x: Array, live: Array, experts: Experts, mesh: Mesh | None, rows: tuple[str, ...]
) -> tuple[Array, Routing]:
    """Apply the only expert to every token."""
    flat = x.reshape(-1, x.shape[-1])
    hidden = gated(flat @ experts.gate_up[0], jnp.ones(flat.shape[:1], jnp.float32))
    output = sum_over(mesh, (hidden @ experts.down[0]).reshape(x.shape), "tensor")
    tokens = sum_over(mesh, jnp.sum(live, dtype=jnp.float32), rows)
    zero = jnp.zeros((), jnp.float32)
    chosen = jnp.zeros((*live.shape, 1), jnp.int32)
    routing = Routing(chosen, tokens[None], tokens, zero, zero, zero)
    return jnp.where(live[:, :, None], output, jnp.zeros_like(output)), routing
