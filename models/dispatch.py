"""Applying a token's experts to it: copies of tokens sorted by expert, grouped products, and sums.

Dropless at any load. On one device all copies are computed at once. Where experts lie on several
devices, the worst load would need a buffer many times the even one, so buffers hold 1.5 times the
even load, and what does not fit is computed in further rounds, as many as the load needs:

    copies of 3 experts      0 0 0 0 0 | 0 1 1 2 2 | 2 2 _ _ _      rounds of 5 rows
                              round 0     round 1     round 2

Transports, over the mesh axis `expert`, from within shard_map:

    all tokens here    "replicated" and "gather": a device computes its experts' share of each
                       token, and the caller adds up the shares
    ragged             each copy travels to the device of its expert, and its result back

The router is `models.routing`; which transport is taken, and the sums, are `models.moe`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from models.grouped import grouped_matmul
from models.sharding import ROW_AXES

AXIS = "expert"
SLACK = 1.5  # rows of a buffer over those of an even load
MIN_ROWS = 512  # smallest buffer worth a second round


class Experts(NamedTuple):
    """The weights that a device computes with."""

    gate_up: Float[Array, "experts embed two_mlp"]
    down: Float[Array, "experts mlp embed"]


class Plan(NamedTuple):
    """Copies in the order of their experts; copy c is choice c % chosen of token c // chosen."""

    order: Int[Array, " copies"]  # the copy at each place
    place: Int[Array, "tokens chosen"]  # the place of each copy
    sizes: Int[Array, " experts"]  # copies of each expert; copies for no expert come last


class Result(NamedTuple):
    """Sum over a token's experts of weight * output, and how much work that was."""

    output: Float[Array, "tokens embed"]  # float32
    computed: Float[Array, ""]  # copies that went through an expert


def sort_copies(experts: Int[Array, "tokens chosen"], num_experts: int) -> Plan:
    """Plan copies by expert, stably; ids outside 0..num_experts-1 are for no expert."""
    here = (experts >= 0) & (experts < num_experts)
    flat = jnp.where(here, experts, jnp.full_like(experts, num_experts)).reshape(-1)
    order = jnp.argsort(flat, stable=True)
    copies = jnp.arange(flat.shape[0], dtype=order.dtype)
    place = jnp.zeros_like(order).at[order].set(copies, unique_indices=True)
    ids = jnp.arange(num_experts, dtype=flat.dtype)
    sizes = jnp.sum(flat[:, None] == ids[None, :], axis=0, dtype=jnp.int32)
    return Plan(order, place.reshape(experts.shape), sizes)


@jax.custom_vjp
def take(
    x: Float[Array, "tokens *size"], token: Int[Array, " rows"], slot: Int[Array, "tokens copies"]
) -> Float[Array, "rows *size"]:
    """Return x[token]; `slot` holds the rows that are copies of each token, or `rows` for none.

    The gradient gathers by `slot`, where autodiff would scatter. Rows that no slot names have none.
    """
    return x[token]


def _take_backward(residuals: tuple[Array, Array], grad: Array):
    token, slot = residuals
    return collect(grad, token, slot).astype(grad.dtype), None, None


@jax.custom_vjp
def collect(
    rows: Float[Array, "rows *size"], token: Int[Array, " rows"], slot: Int[Array, "tokens copies"]
) -> Float[Array, "tokens *size"]:
    """Sum in float32 the copies of each token: the transpose of `take`."""
    total = jnp.zeros((slot.shape[0], *rows.shape[1:]), jnp.float32)
    for copy in range(slot.shape[1]):  # unrolled: one pass that keeps no copies
        row = slot[:, copy]
        found = jnp.expand_dims(row < rows.shape[0], tuple(range(1, rows.ndim)))
        value = rows[jnp.minimum(row, rows.shape[0] - 1)].astype(jnp.float32)
        total = total + jnp.where(found, value, 0.0)
    return total


def _collect_forward(rows: Array, token: Array, slot: Array):
    return collect(rows, token, slot), (jnp.zeros((), rows.dtype), token, slot)


def _collect_backward(residuals: tuple[Any, Array, Array], grad: Array):
    like, token, slot = residuals
    return take(grad.astype(like.dtype), token, slot), None, None


take.defvjp(lambda x, token, slot: (take(x, token, slot), (token, slot)), _take_backward)
collect.defvjp(_collect_forward, _collect_backward)


def feed_forward(
    x: Float[Array, "tokens embed"],
    token: Int[Array, " rows"],
    slot: Int[Array, "tokens copies"],
    scale: Float[Array, " rows"],
    sizes: Int[Array, " experts"],
    experts: Experts,
    backend: str,
) -> Float[Array, "tokens embed"]:
    """Apply SwiGLU experts to the rows x[token], sorted by expert, and add up the rows of a token.

    `scale` multiplies what an expert gives, before the last product, so that the backward pass
    needs none of that product's results. What it does need is computed again, but for the first
    product: sorted rows and hidden values are many times the tokens.
    """

    @jax.checkpoint
    def enter(x: Array, gate_up: Array) -> Array:
        with jax.named_scope("moe_dispatch"):
            rows = take(x, token, slot)
        with jax.named_scope("moe_experts"):
            return grouped_matmul(rows, gate_up, sizes, backend)

    @jax.checkpoint
    def leave(hidden: Array, scale: Array, down: Array) -> Array:
        with jax.named_scope("moe_experts"):
            output = grouped_matmul(gated(hidden, scale), down, sizes, backend)
        with jax.named_scope("moe_combine"):
            return collect(output, token, slot)

    return leave(enter(x, experts.gate_up), scale, experts.down)


@jax.custom_vjp
def gated(
    gate_up: Float[Array, "rows two_mlp"], scale: Float[Array, " rows"]
) -> Float[Array, "rows mlp"]:
    """Return silu(gate) * up * scale, in float32 inside; gate and up are stored side by side.

    The backward pass computes it again from them: nothing else of this size is kept.
    """
    gate, up = _halves(gate_up)
    return (jax.nn.silu(gate) * up * scale[:, None]).astype(gate_up.dtype)


def _halves(gate_up: Array) -> tuple[Array, Array]:
    """Part and then widen: the other way a TPU keeps a float32 copy of both."""
    gate, up = (half.astype(jnp.float32) for half in jnp.split(gate_up, 2, axis=-1))
    return gate, up


def _gated_forward(gate_up: Array, scale: Array):
    return gated(gate_up, scale), (gate_up, scale)


def _gated_backward(residuals: tuple[Array, Array], grad: Array):
    """With s the logistic of gate: d silu / d gate = s (1 + gate (1 - s))."""
    gate_up, scale = residuals
    gate, up = _halves(gate_up)
    share = jax.nn.sigmoid(gate)
    wide = grad.astype(jnp.float32)
    of_scale = jnp.sum(wide * gate * share * up, axis=-1)
    wide = wide * scale[:, None]
    halves = wide * up * share * (1.0 + gate * (1.0 - share)), wide * gate * share
    both = jnp.concatenate([half.astype(gate_up.dtype) for half in halves], axis=-1)  # as above
    return both, of_scale.astype(scale.dtype)


gated.defvjp(_gated_forward, _gated_backward)


# ---- all tokens here


def apply_experts(
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens chosen"],
    chosen: Int[Array, "tokens chosen"],
    experts: Experts,
    backend: str,
    shards: int = 1,
) -> Result:
    """Apply those of the tokens' experts that are here.

    Args:
        chosen: experts counted from the first one here; all other ids are computed elsewhere, or
            nowhere.
        shards: over how many devices an even load spreads.
    """
    num_experts = experts.down.shape[0]
    plan = sort_copies(chosen, num_experts)
    worst = x.shape[0] * min(chosen.shape[1], num_experts)  # a token's experts differ
    rows = buffer_rows(chosen.size, shards, worst)
    part = functools.partial(_part, rows, backend)
    if rows == worst:
        return part(jnp.zeros((), jnp.int32), (x, weights, experts), plan)
    plan = plan._replace(order=jnp.pad(plan.order, (0, rows)))
    rounds = (jnp.sum(plan.sizes) + rows - 1) // rows
    return in_rounds(part, rounds, (x, weights, experts), plan)


def buffer_rows(copies: int, shards: int, worst: int) -> int:
    """Rows of a buffer for `copies` over `shards` devices: SLACK times the even load."""
    even = -(-int(SLACK * copies) // (128 * shards)) * 128  # whole tiles
    return min(max(even, MIN_ROWS), worst)


def _part(rows: int, backend: str, index: Array, operands: Any, plan: Plan) -> Result:
    """Compute round `index`: the copies at `rows` places."""
    x, weights, experts = operands
    first = index * rows
    ends = jnp.cumsum(plan.sizes)
    sizes = jnp.clip(ends, first, first + rows) - jnp.clip(ends - plan.sizes, first, first + rows)
    copy = jax.lax.dynamic_slice_in_dim(plan.order, first, rows)
    place = plan.place - first
    present = (place >= 0) & (place < jnp.sum(sizes))
    slot = jnp.where(present, place, rows)
    token = copy // weights.shape[1]
    scale = take(weights.reshape(-1), copy, slot.reshape(-1, 1))
    output = feed_forward(x, token, slot, scale, sizes, experts, backend)
    return Result(output, jnp.sum(present, dtype=jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_rounds(part: Callable, rounds: Int[Array, ""], operands: Any, plan: Any) -> Result:
    """Add up part(index, operands, plan) over a number of rounds known only at run time.

    The backward pass computes each round again, so that memory does not follow their number.
    """
    index = jnp.zeros((), jnp.int32)
    start = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(part, index, operands, plan)
    )

    def step(index: Array, total: Result) -> Result:
        return jax.tree.map(jnp.add, total, part(index, operands, plan))

    return jax.lax.fori_loop(0, rounds, step, start)


def _rounds_forward(part: Callable, rounds: Array, operands: Any, plan: Any):
    return in_rounds(part, rounds, operands, plan), (rounds, operands, plan)


def _rounds_backward(part: Callable, residuals: tuple[Array, Any, Any], grad: Result):
    rounds, operands, plan = residuals

    def step(index: Array, total: Any) -> Any:
        _, pull = jax.vjp(lambda operands: part(index, operands, plan), operands)
        return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, pull(grad)[0])

    start = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), operands)
    total = jax.lax.fori_loop(0, rounds, step, start)
    return None, jax.tree.map(lambda a, leaf: a.astype(leaf.dtype), total, operands), None


in_rounds.defvjp(_rounds_forward, _rounds_backward)


# ---- copies travel


class _Trips(NamedTuple):
    """The copies of this device, and how many go from where to where."""

    plan: Plan  # over all experts, so that the copies for a device are next to one another
    target: Int[Array, "tokens chosen"]  # the device of each copy's expert
    live: Bool[Array, "tokens chosen"]
    counts: Int[Array, "sources targets experts"]  # the experts of each target


def send_to_experts(
    x: Float[Array, "tokens embed"],
    weights: Float[Array, "tokens chosen"],
    chosen: Int[Array, "tokens chosen"],
    experts: Experts,
    backend: str,
    shards: int,
    *,
    native: bool,
) -> Result:
    """Send each copy to the device of its expert, and add up what comes back.

    Args:
        chosen: experts counted over all devices; other ids are computed nowhere.
        native: whether the platform has a ragged all-to-all; else the gaps travel as well.
    """
    local_experts = experts.down.shape[0]
    plan = sort_copies(chosen, shards * local_experts)
    counts = jax.lax.all_gather(plan.sizes, AXIS).reshape(shards, shards, local_experts)
    live = (chosen >= 0) & (chosen < shards * local_experts)
    target = jnp.where(live, chosen // local_experts, jnp.zeros_like(chosen))
    worst = x.shape[0] * min(chosen.shape[1], local_experts)
    quota = buffer_rows(chosen.size, shards, worst)  # rows from one device to one other
    part = functools.partial(_trip, quota, backend, native)
    operands, trips = (x, weights, experts), _Trips(plan, target, live, counts)
    if quota == worst:
        return part(jnp.zeros((), jnp.int32), operands, trips)
    rounds = (jnp.max(jnp.sum(counts, axis=-1)) + quota - 1) // quota
    rounds = jax.lax.pmax(rounds, ROW_AXES)  # collectives in a loop: all devices as often
    return in_rounds(part, rounds, operands, trips)


def _trip(
    quota: int, backend: str, native: bool, index: Array, operands: Any, trips: _Trips
) -> Result:
    """Move round `index`: `quota` copies from each device to each other, and their results."""
    x, weights, experts = operands
    plan, counts, me = trips.plan, trips.counts, jax.lax.axis_index(AXIS)
    shards, first = counts.shape[0], index * quota
    pairs = jnp.sum(counts, axis=-1)
    sent = jnp.clip(pairs[me] - first, 0, quota)
    received = jnp.clip(pairs[:, me] - first, 0, quota)
    begins = jnp.cumsum(pairs[me]) - pairs[me]  # the place of the first copy for each device

    offset = plan.place - begins[trips.target] - first
    present = trips.live & (offset >= 0) & (offset < quota)
    slot = jnp.where(present, trips.target * quota + offset, shards * quota)
    place = (begins[:, None] + first + jnp.arange(quota, dtype=first.dtype)[None, :]).reshape(-1)
    copy = plan.order[jnp.minimum(place, plan.order.shape[0] - 1)]  # beyond `sent`: anything
    token = copy // weights.shape[1]
    move = functools.partial(exchange, native)
    with jax.named_scope("moe_dispatch"):
        arrived = move(take(x, token, slot), sent, received)
    # Copies come in the order of their experts, so the counts tell the expert of each.
    ends = jnp.cumsum(counts[:, me], axis=1)
    row = first + jnp.arange(quota, dtype=first.dtype)
    expert = jnp.sum(row[None, :, None] >= ends[:, None, :], axis=-1, dtype=jnp.int32)
    local = sort_copies(expert.reshape(-1, 1), experts.down.shape[0])
    computed = jnp.sum(local.sizes)
    here = jnp.where(local.place < computed, local.place, shards * quota)
    one = jnp.ones((shards * quota,), jnp.float32)  # weights are applied at home
    output = feed_forward(arrived, local.order, here, one, local.sizes, experts, backend)
    output = output.astype(x.dtype)
    with jax.named_scope("moe_combine"):
        back = move(output, received, sent).astype(jnp.float32)
        scale = take(weights.reshape(-1), copy, slot.reshape(-1, 1))
        total = collect(back * scale[:, None], token, slot)
    return Result(total, computed.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def exchange(
    native: bool,
    rows: Float[Array, "rows embed"],
    sent: Int[Array, " shards"],
    received: Int[Array, " shards"],
) -> Float[Array, "rows embed"]:
    """Send the first `sent[d]` rows of part d of the rows to device d, and receive likewise.

    Part d of the result is what device d sent; the rest of it is undefined.
    """
    shards = sent.shape[0]
    quota = rows.shape[0] // shards
    if not native:
        parts = rows.reshape(shards, quota, -1)
        return jax.lax.all_to_all(parts, AXIS, 0, 0).reshape(rows.shape)
    begins = jnp.arange(shards, dtype=sent.dtype) * quota
    mine = jnp.full_like(begins, quota) * jax.lax.axis_index(AXIS).astype(sent.dtype)
    return jax.lax.ragged_all_to_all(
        rows, jnp.zeros_like(rows), begins, sent, mine, received, axis_name=AXIS
    )


def _exchange_forward(native: bool, rows: Array, sent: Array, received: Array):
    return exchange(native, rows, sent, received), (sent, received)


def _exchange_backward(native: bool, residuals: tuple[Array, Array], grad: Array):
    sent, received = residuals
    return exchange(native, grad, received, sent), None, None


exchange.defvjp(_exchange_forward, _exchange_backward)
