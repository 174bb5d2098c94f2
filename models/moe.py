"""Mixture-of-experts feed-forward: router, dispatch by sorting, grouped matrix products, combine.

Dropless at any load: every routed token is computed by each of its experts, whatever the balance.
Router probabilities are a float32 softmax over all experts, and the chosen ones are renormalised to
sum to one (Qwen3-MoE `norm_topk_prob`). Balance losses and accelerator kernels are not here.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.config import TransformerConfig
from models.layers import fan_in, normal
from models.sharding import ROW_AXES, split_rows, sum_over


def block_rows(rows: int, experts: int) -> int:
    """Rows of one block of the grouped product: a power of two below an expert's fair share / 8."""
    share = max(rows // (8 * experts), 1)
    return min(max(1 << (share.bit_length() - 1), 8), 256)


def _for_each_expert(group_sizes: Array, function: Callable, carry: Array) -> Array:
    """Fold function(expert, first row, end row, carry) over the experts with rows, in order."""
    ends = jnp.cumsum(group_sizes)
    order = jnp.argsort(group_sizes == 0, stable=True)

    def step(index: Array, carry: Array) -> Array:
        expert = order[index]
        return function(expert, ends[expert] - group_sizes[expert], ends[expert], carry)

    return jax.lax.fori_loop(0, jnp.sum(group_sizes > 0), step, carry)


def _product(x: Array, w: Array, group_sizes: Array, contract: int) -> Array:
    """Multiply each group of rows by its expert's matrix, contracting that matrix's given axis.

    The rows that a group's last block computes beyond the group are overwritten by the next group,
    which starts exactly there: no mask, and no gather into padding. Groups of 3, 0 and 5 rows in
    blocks of 4, rows in brackets written twice:

        expert 0    0 1 2 [3]
        expert 2          3 4 5 6
                                  7 [8 9 10]     set to zero at the end
    """
    rows, out = x.shape[0], w.shape[2 - contract]
    block = block_rows(rows, w.shape[0])
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def expert_rows(expert: Array, start: Array, end: Array, result: Array) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(w, expert, keepdims=False)

        def step(index: Array, result: Array) -> Array:
            row = start + index * block
            tile = jax.lax.dynamic_slice_in_dim(padded, row, block)
            product = jax.lax.dot_general(tile, matrix, (((1,), (contract,)), ((), ())))
            return jax.lax.dynamic_update_slice_in_dim(result, product, row, 0)

        return jax.lax.fori_loop(0, (end - start + block - 1) // block, step, result)

    result = jnp.zeros((rows + block, out), x.dtype)
    result = _for_each_expert(group_sizes, expert_rows, result)
    tail = jnp.zeros((block, out), x.dtype)
    return jax.lax.dynamic_update_slice_in_dim(result, tail, jnp.sum(group_sizes), 0)[:rows]


@jax.custom_vjp
def grouped_matmul(
    x: Float[Array, "tokens in"],
    w: Float[Array, "experts in out"],
    group_sizes: Int[Array, " experts"],
) -> Float[Array, "tokens out"]:
    """Multiply consecutive groups of rows of `x` each by its own matrix.

    `group_sizes` may sum to fewer than `tokens`: rows past the sum give zeros and get no gradient.
    """
    return _product(x, w, group_sizes, contract=0)


def _grouped_matmul_forward(x: Array, w: Array, group_sizes: Array):
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _grouped_matmul_backward(residuals: tuple[Array, Array, Array], grad: Array):
    x, w, group_sizes = residuals
    return _product(grad, w, group_sizes, contract=1), _outer(x, grad, group_sizes), None


def _outer(x: Array, grad: Array, group_sizes: Array) -> Array:
    """Sum x^T grad over the rows of each group."""
    experts, shape = group_sizes.shape[0], (x.shape[1], grad.shape[1])
    block = block_rows(x.shape[0], experts)
    x, grad = jnp.pad(x, ((0, block), (0, 0))), jnp.pad(grad, ((0, block), (0, 0)))

    def expert_sum(expert: Array, start: Array, end: Array, result: Array) -> Array:
        def step(index: Array, total: Array) -> Array:
            row = start + index * block
            own = (row + jnp.arange(block) < end)[:, None]
            tile = jax.lax.dynamic_slice_in_dim(x, row, block)
            tile = jnp.where(own, tile, jnp.zeros((), x.dtype))
            grad_tile = jax.lax.dynamic_slice_in_dim(grad, row, block)
            return total + jax.lax.dot_general(tile, grad_tile, (((0,), (0,)), ((), ())))

        total = jnp.zeros(shape, x.dtype)
        total = jax.lax.fori_loop(0, (end - start + block - 1) // block, step, total)
        return jax.lax.dynamic_update_index_in_dim(result, total, expert, 0)

    return _for_each_expert(group_sizes, expert_sum, jnp.zeros((experts, *shape), x.dtype))


grouped_matmul.defvjp(_grouped_matmul_forward, _grouped_matmul_backward)


@jax.custom_vjp
def permute_rows(
    x: Float[Array, "rows size"], order: Int[Array, " rows"], inverse: Int[Array, " rows"]
) -> Float[Array, "rows size"]:
    """Return x[order]; the gradient gathers by `inverse`, where autodiff would scatter-add."""
    return x[order]


def _permute_forward(x: Array, order: Array, inverse: Array):
    return x[order], inverse


def _permute_backward(inverse: Array, grad: Array):
    return grad[inverse], None, None


permute_rows.defvjp(_permute_forward, _permute_backward)


def route(
    x: Float[Array, "tokens embed"],
    router: Float[Array, "embed experts"],
    experts_per_token: int,
    normalize: bool = True,
) -> tuple[Int[Array, "tokens chosen"], Float[Array, "tokens chosen"]]:
    """Return the experts of each token, best first, and their weights.

    With `normalize`, several weights are made to sum to one; a single one stays the router's
    probability, without which the router would have no gradient.
    """
    x, router = x.astype(jnp.float32), router.astype(jnp.float32)
    probs = jax.nn.softmax(jnp.dot(x, router, precision=jax.lax.Precision.HIGHEST), axis=-1)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(probs), experts_per_token)
    # Picked by comparison: the gradient of a gather would be a scatter.
    picked = chosen[:, :, None] == jnp.arange(router.shape[1])[None, None, :]
    weights = jnp.sum(jnp.where(picked, probs[:, None, :], 0.0), axis=-1)
    if experts_per_token == 1 or not normalize:
        return chosen, weights
    return chosen, weights / jnp.sum(weights, axis=-1, keepdims=True)


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
    ) -> tuple[Float[Array, "rows seq embed"], Float[Array, " experts"]]:
        """Return the output, zeros for tokens not live, and how many tokens each expert received.

        With a mesh, each device routes its own rows through its slice of every expert's `mlp`.
        """
        router = None if self.router is None else self.router[...]

        def local(x: Array, live: Array, router: Array | None, gate_up: Array, down: Array):
            flat, live = x.reshape(-1, x.shape[-1]), live.reshape(-1)
            if router is None:
                output, load = _dense(flat, live, gate_up, down)
            else:
                output, load = _routed(
                    flat, live, router, gate_up, down, self.experts_per_token, self.normalize
                )
            output = sum_over(mesh, output, "tensor")
            return output.reshape(x.shape), sum_over(mesh, load, ROW_AXES)

        inputs = (
            PartitionSpec(ROW_AXES),
            PartitionSpec(ROW_AXES),
            None if router is None else PartitionSpec(),
            PartitionSpec(None, None, None, "tensor"),
            PartitionSpec(None, "tensor"),
        )
        outputs = (PartitionSpec(ROW_AXES), PartitionSpec())
        split = split_rows(mesh, local, inputs, outputs)
        return split(x, live, router, self.gate_up[...], self.down[...])


def _dense(x: Array, live: Array, gate_up: Array, down: Array) -> tuple[Array, Array]:
    """Apply the only expert to every token."""
    hidden = _swiglu(x @ gate_up[0].reshape(x.shape[1], -1))
    zero = jnp.zeros((), x.dtype)
    return jnp.where(live[:, None], hidden @ down[0], zero), jnp.sum(live, dtype=jnp.float32)[None]


def _routed(
    x: Array,
    live: Array,
    router: Array,
    gate_up: Array,
    down: Array,
    experts_per_token: int,
    normalize: bool,
) -> tuple[Array, Array]:
    """Sort the tokens by expert, apply the experts, and add up the results of each token."""
    num_tokens, embed = x.shape
    experts = gate_up.shape[0]
    with jax.named_scope("moe_route"):
        chosen, weights = route(x, router, experts_per_token, normalize)
    with jax.named_scope("moe_dispatch"):
        # Padding is sorted behind the last group, which grouped_matmul does not compute.
        chosen = jnp.where(live[:, None], chosen, experts).reshape(-1)
        order, inverse = sort_by_expert(chosen)
        group_sizes = jnp.sum(
            chosen[:, None] == jnp.arange(experts)[None, :], axis=0, dtype=jnp.int32
        )
        copies = jnp.repeat(x, experts_per_token, axis=0)
        grouped = permute_rows(copies, order, inverse)
    with jax.named_scope("moe_experts"):
        hidden = grouped_matmul(grouped, gate_up.reshape(experts, embed, -1), group_sizes)
        output = grouped_matmul(_swiglu(hidden), down, group_sizes)
    with jax.named_scope("moe_combine"):
        output = permute_rows(output, inverse, order).reshape(num_tokens, -1, embed)
        output = jnp.sum(output.astype(jnp.float32) * weights[:, :, None], axis=1).astype(x.dtype)
    return output, group_sizes.astype(jnp.float32)


def sort_by_expert(
    chosen: Int[Array, " rows"],
) -> tuple[Int[Array, " rows"], Int[Array, " rows"]]:
    """Return the stable order of the rows by expert, and its inverse."""
    order = jnp.argsort(chosen, stable=True)
    rows = jnp.arange(chosen.shape[0], dtype=order.dtype)
    return order, jnp.zeros_like(order).at[order].set(rows, unique_indices=True)


def _swiglu(gate_up: Array) -> Array:
    """Return silu(gate) * up, from the two stored side by side."""
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up
