"""The output head where tokens are known: their log-probabilities and the entropy, a chunk of
tokens at a time.

Scores of the vocabulary exist for one chunk only, in the forward pass and in the backward pass,
which computes them again and adds up the gradient of the table. Tokens without a loss are sorted
behind the others and never multiplied. Under a mesh each device runs over its own rows with its
part of the vocabulary. Scores for sampling are `transformer.logits`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from models.config import TransformerConfig
from models.sharding import ROW_AXES, split_rows
from models.transformer import Params


class Predicted(NamedTuple):
    """Of each token that has a loss, under softmax(scores / temperature); 0 for the others."""

    logprobs: Float[Array, "rows seq"]
    entropy: Float[Array, "rows seq"]  # nats


def predict(
    config: TransformerConfig,
    params: Params,
    hidden: Float[Array, "rows seq embed"],
    targets: Int[Array, "rows seq"],
    temperatures: Float[Array, "rows seq"],
    mask: Bool[Array, "rows seq"],
    mesh: Mesh | None = None,
    *,
    chunk: int,
) -> Predicted:
    """Speak of the target that each final-normed hidden state predicts.

    Args:
        temperatures: 0 (greedy) counts as 1, as it does in the sampler.
        mask: the targets that have a loss.
        chunk: tokens whose scores exist at once, on each device.
    """
    table = params["embedding"][...].T if config.tied_head else params["head"][...]
    mesh = None if mesh is None or mesh.size == 1 else mesh
    axis = None if mesh is None else "tensor"

    def local(table: Array, hidden: Array, targets: Array, heat: Array, mask: Array) -> Predicted:
        if mesh is not None:
            table = jax.lax.all_gather(table, "fsdp", axis=0, tiled=True)
        size = min(chunk, mask.size)
        count = (jnp.sum(mask) + size - 1) // size
        if mesh is not None:  # as many turns on every device: there are sums over them inside
            count = jax.lax.pmax(count, ROW_AXES)
        order = jnp.argsort(~mask.reshape(-1), stable=True)
        inverse = jnp.argsort(order)
        heat = jnp.where(heat > 0, heat, jnp.ones_like(heat)).reshape(-1)[order]
        moved = _permute(hidden.reshape(mask.size, -1), order, inverse)
        padding = -mask.size % size
        moved, heat = jnp.pad(moved, ((0, padding), (0, 0))), jnp.pad(heat, (0, padding), "edge")
        wanted = jnp.pad(targets.reshape(-1)[order], (0, padding))
        found: Any = _chunked(axis, size, table, moved, wanted, heat, count)
        logprobs, entropy = (part[: mask.size][inverse].reshape(mask.shape) for part in found)
        return Predicted(jnp.where(mask, logprobs, 0.0), jnp.where(mask, entropy, 0.0))

    rows = PartitionSpec(ROW_AXES)
    inputs = (PartitionSpec("fsdp", "tensor"), rows, rows, rows, rows)
    split = split_rows(mesh, local, inputs, Predicted(rows, rows))  # pyright: ignore[reportArgumentType]
    return split(table, hidden, targets, temperatures, mask)


@jax.custom_vjp
def _permute(x: Array, order: Array, inverse: Array) -> Array:
    """Take rows in another order; its gradient is a gather as well, and not a scatter."""
    return x[order]


def _permute_forward(x: Array, order: Array, inverse: Array):
    return x[order], inverse


def _permute_backward(inverse: Array, grad: Array):
    return grad[inverse], None, None


_permute.defvjp(_permute_forward, _permute_backward)


class _Chunk:
    """The tokens of one turn, and their scores over this device's part of the vocabulary."""

    def __init__(self, axis: str | None, size: int, table: Array, index: Array) -> None:
        self.axis, self.size, self.table = axis, size, table
        self.start = index * size

    def cut(self, x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, self.start, self.size)

    def put(self, x: Array, part: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(x, part, self.start, 0)

    def scores(self, hidden: Array, heat: Array) -> Array:
        wide = {"preferred_element_type": jnp.float32}
        table = self.table.astype(hidden.dtype)
        return jnp.einsum("te,ev->tv", self.cut(hidden), table, **wide) / self.cut(heat)[:, None]

    def hit(self, targets: Array) -> Array:
        vocab = self.table.shape[1]
        first = 0 if self.axis is None else jax.lax.axis_index(self.axis) * vocab
        own = jnp.arange(vocab, dtype=targets.dtype)[None]
        return own == self.cut(targets)[:, None] - first

    def sum(self, x: Array) -> Array:
        total = x.sum(-1)
        return total if self.axis is None else jax.lax.psum(total, self.axis)

    def max(self, x: Array) -> Array:
        most = x.max(-1)
        return most if self.axis is None else jax.lax.pmax(most, self.axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(
    axis: str | None,
    size: int,
    table: Array,
    hidden: Array,
    targets: Array,
    heat: Array,
    count: Array,
) -> tuple[Array, Array]:
    """Return log-probability and entropy of the tokens in the first `count` chunks."""
    return _chunked_forward(axis, size, table, hidden, targets, heat, count)[0]


def _chunked_forward(
    axis: str | None,
    size: int,
    table: Array,
    hidden: Array,
    targets: Array,
    heat: Array,
    count: Array,
):
    def turn(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        chunk = _Chunk(axis, size, table, index)
        scores = chunk.scores(hidden, heat)
        peak = chunk.max(scores)
        weights = jnp.exp(scores - peak[:, None])
        total = chunk.sum(weights)
        mean = chunk.sum(weights * scores) / total
        picked = chunk.sum(jnp.where(chunk.hit(targets), scores, 0.0))
        # Of the peak first: the logarithm of the total has its last bits, which scores do not.
        found = picked - peak - jnp.log(total), peak + jnp.log(total), mean
        return (
            chunk.put(state[0], found[0]),
            chunk.put(state[1], found[1]),
            chunk.put(state[2], found[2]),
        )

    zeros = jnp.zeros(targets.shape, jnp.float32)
    logprobs, log_total, mean = jax.lax.fori_loop(0, count, turn, (zeros, zeros, zeros))
    # entropy = log_total - sum(p * scores)
    result = logprobs, log_total - mean
    return result, (table, hidden, targets, heat, count, log_total, mean)


def _chunked_backward(
    axis: str | None, size: int, residuals: tuple[Array, ...], grads: tuple[Array, Array]
):
    """d log p / d score_j = [j is the target] - p_j; d entropy / d score_j = p_j (mean - score_j).

    Products take their operands in the dtype of `hidden` and add up in float32.
    """
    table, hidden, targets, heat, count, log_total, mean = residuals
    if axis is not None:  # each device has its share of the gradient of what all of them computed
        grads = jax.lax.psum(grads, axis)

    def turn(index: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        chunk = _Chunk(axis, size, table, index)
        scores = chunk.scores(hidden, heat)
        probs = jnp.exp(scores - chunk.cut(log_total)[:, None])
        by_logprob, by_entropy = (chunk.cut(grad)[:, None] for grad in grads)
        slope = by_logprob + by_entropy * (scores - chunk.cut(mean)[:, None])
        grad = jnp.where(chunk.hit(targets), by_logprob, 0.0) - probs * slope
        grad = (grad / chunk.cut(heat)[:, None]).astype(hidden.dtype)
        wide = {"preferred_element_type": jnp.float32}
        own, rows = table.astype(hidden.dtype), chunk.cut(hidden)
        grad_hidden = jnp.einsum("tv,ev->te", grad, own, **wide).astype(hidden.dtype)
        return (
            state[0] + jnp.einsum("te,tv->ev", rows, grad, **wide),
            chunk.put(state[1], grad_hidden),
        )

    start = jnp.zeros(table.shape, jnp.float32), jnp.zeros_like(hidden)
    grad_table, grad_hidden = jax.lax.fori_loop(0, count, turn, start)
    return grad_table.astype(table.dtype), grad_hidden, None, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)
