"""The sampling rule: how one token is drawn from the scores.

A token is drawn in two stages, first a group of the vocabulary and then a token of the group, by
the largest log-weight plus Gumbel noise each. That is exactly the categorical distribution, takes a
few hundred random numbers where one stage takes a whole vocabulary of them, and a small change of
the scores changes the token only where two perturbed values lie as close. Keys are folded with the
absolute position of the token being sampled, so a token depends on its sequence and its key, never
on its slot, its neighbours or when it was scheduled. Penalties, other truncations and beams are
deliberately not here.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from spade_jax.errors import SamplerError
from spade_jax.types import SamplingParams

GROUPS = 128
"""Groups of consecutive tokens. It divides the vocabularies of public models, and the devices along
`tensor` divide it, so that a split vocabulary stays where it lies."""

TEMPERATURES = (1e-20, 1e20)
"""What is colder or hotter draws as these do: a reciprocal beyond them is not a number to use."""

_SIGN = np.uint32(1 << 31)


class Rule(NamedTuple):
    """How each row is sampled; off are top_p 1, min_p 0 and top_k 0."""

    keys: UInt32[Array, "rows 2"]
    temperature: Float[Array, " rows"]  # 0 is greedy, and nothing is truncated then
    top_p: Float[Array, " rows"]
    min_p: Float[Array, " rows"]
    top_k: Int[Array, " rows"]


class Drawn(NamedTuple):
    """One token a row. Log-probabilities of a greedy row are those of temperature 1."""

    tokens: Int[Array, " rows"]
    logprobs: Float[Array, " rows"]  # under what was sampled from: tempered and truncated
    untruncated: Float[Array, " rows"]  # tempered only
    finite: Bool[Array, " rows"]  # False: NaN, +inf or nothing but -inf; the rest is not to be used


def check_params(params: SamplingParams) -> None:
    """Refuse parameters that describe no distribution.

    Raises:
        SamplerError: names the parameter, its value and its range.
    """
    ranges = {
        "temperature": (0 <= params.temperature < float("inf"), "0 (greedy) or more, and finite"),
        "top_p": (0 < params.top_p <= 1, "more than 0 and at most 1 (off)"),
        "top_k": (
            type(params.top_k) is int and 0 <= params.top_k < 2**31,
            "a whole number from 0 (off)",
        ),
        "min_p": (0 <= params.min_p <= 1, "0 (off) to 1"),
    }
    for name, (right, expected) in ranges.items():
        if not right:
            raise SamplerError(f"{name}={getattr(params, name)}; expected {expected}")


def draw(scores: Float[Array, "rows vocab"], rule: Rule, positions: Int[Array, " rows"]) -> Drawn:
    """Draw the tokens of `positions` from softmax(scores / temperature), truncated.

    As transformers does, top-k is applied first, top-p to what it leaves, then min-p, against the
    likeliest token. Of tokens with equal scores all are kept or none: the last one that top-k or
    top-p keeps brings its equals along. The likeliest token is always kept.
    """
    vocab = scores.shape[1]
    rows = _prepare(scores, rule)
    greedy = rule.temperature == 0
    cuts, least, floor = _truncation(rows, rule, vocab)

    def kept(part: Array) -> Array:
        return (part >= _over(least, part)) & (rows.tempered(part) >= _over(floor, part))

    # One sum for all rows, so that a row's bits do not depend on whether another one truncates.
    mass = jnp.where(kept(rows.x), rows.weights(), 0.0).sum(axis=2)
    total = mass.sum(axis=1)
    whole = jax.lax.cond(
        cuts.any(),
        lambda: jnp.where(cuts, rows.weights().sum(axis=(1, 2)), total),
        lambda: total,
    )
    size = rows.x.shape[2]
    noise = _gumbel(rule.keys, positions, (GROUPS, size))
    level = jnp.where(greedy[:, None], rows.group_best, jnp.log(mass) + noise[0])
    group = jnp.argmax(level, axis=1)
    members = jnp.take_along_axis(rows.x, group[:, None, None], axis=1)[:, 0]
    relative = rows.tempered(members)
    perturbed = jnp.where(kept(members), relative, -jnp.inf)
    perturbed = perturbed + jnp.where(greedy[:, None], 0.0, noise[1])
    member = jnp.argmax(perturbed, axis=1)
    chosen = jnp.take_along_axis(relative, member[:, None], axis=1)[:, 0]
    tokens = jnp.minimum(group * size + member, vocab - 1).astype(jnp.int32)
    finite = jnp.isfinite(rows.best)
    return Drawn(tokens, chosen - jnp.log(total), chosen - jnp.log(whole), finite)


class _Rows(NamedTuple):
    """Scores in groups of consecutive tokens, and what their softmax is taken with."""

    x: Array  # [rows, GROUPS, size]
    group_best: Array  # [rows, GROUPS]
    best: Array
    scale: Array  # 1 / temperature

    def tempered(self, part: Array) -> Array:
        """Tempered scores relative to the best: at most 0."""
        return (part - _over(self.best, part)) * _over(self.scale, part)

    def weights(self) -> Array:
        return jnp.exp(self.tempered(self.x))


def _prepare(scores: Array, rule: Rule) -> _Rows:
    missing = -scores.shape[1] % GROUPS
    x = scores.astype(jnp.float32)
    if missing:  # filled with what is never drawn
        x = jnp.pad(x, ((0, 0), (0, missing)), constant_values=-jnp.inf)
    x = x.reshape(x.shape[0], GROUPS, -1)
    group_best = x.max(axis=2)
    greedy = rule.temperature == 0
    scale = 1 / jnp.where(greedy, 1.0, rule.temperature.clip(*TEMPERATURES))
    return _Rows(x, group_best, group_best.max(axis=1), scale)


def _truncation(rows: _Rows, rule: Rule, vocab: int) -> tuple[Array, Array, Array]:
    """Which rows are truncated, the least score that each keeps, and the least tempered one."""
    x, best = rows.x, rows.best
    samples = rule.temperature > 0
    cuts_k = samples & (rule.top_k > 0) & (rule.top_k < vocab)
    cuts_p = samples & (rule.top_p < 1)
    cuts_min = samples & (rule.min_p > 0)
    off = jnp.full_like(best, -jnp.inf)

    def kth_best(least: Array) -> Array:
        # GROUPS scores are at least the worst of the best ones of all groups.
        start = jnp.where(rule.top_k <= GROUPS, rows.group_best.min(axis=1), off)
        goal = rule.top_k.astype(jnp.float32)
        found = _threshold(x, jnp.ones_like(x), goal, jnp.where(cuts_k, start, best), best)
        return jnp.where(cuts_k, found, least)

    def nucleus(least: Array) -> Array:
        weights = jnp.where(x >= _over(least, x), rows.weights(), 0.0)
        goal = rule.top_p * weights.sum(axis=(1, 2))
        # All scores below `start` together weigh less than what is cut, for the best weighs 1.
        start = best + (jnp.log((1 - rule.top_p) / vocab) - 1) / rows.scale
        start = jnp.where(cuts_p, jnp.maximum(start, least), best)
        return jnp.where(cuts_p, _threshold(x, weights, goal, start, best), least)

    least = jax.lax.cond(cuts_k.any(), kth_best, lambda least: least, off)
    least = jax.lax.cond(cuts_p.any(), nucleus, lambda least: least, least)
    floor = jnp.where(cuts_min, jnp.log(rule.min_p), off)
    return cuts_k | cuts_p | cuts_min, least, floor


def _threshold(x: Array, weights: Array, goal: Array, low: Array, high: Array) -> Array:
    """The largest number from `low` to `high` such that the scores from it on weigh the goal.

    Found by halving the float32 numbers between the two: exact as a sort, a tenth of the cost.
    """

    def halve(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = high - (high - low) // 2
        weight = jnp.where(x >= _over(_from_order(middle), x), weights, 0.0).sum(axis=(1, 2))
        going, enough = low < high, weight >= goal
        low = jnp.where(going & enough, middle, low)
        return low, jnp.where(going & ~enough, middle - 1, high)

    def going(bounds: tuple[Array, Array]) -> Array:
        return (bounds[0] < bounds[1]).any()

    return _from_order(jax.lax.while_loop(going, halve, (_order(low), _order(high)))[0])


def _order(x: Array) -> Array:
    """Integers in the order of float32 numbers, with none between those of two neighbours."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _from_order(order: Array) -> Array:
    bits = jnp.where(order >= _SIGN, order ^ _SIGN, ~order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _gumbel(keys: Array, positions: Array, sizes: Sequence[int]) -> list[Array]:
    """Noise for each stage, which depends on key and position alone."""

    def row(key_data: Array, position: Array) -> list[Array]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data, impl="threefry2x32"), position)
        # High: what lets an unlikely group win is not on a coarse grid. A key for each stage: parts
        # of one draw would be cut out of it across the devices that share the vocabulary.
        return [
            jax.random.gumbel(stage, (size,), jnp.float32, mode="high")
            for stage, size in zip(jax.random.split(key, len(sizes)), sizes, strict=True)
        ]

    return jax.vmap(row)(keys, positions)


def _over(values: Array, part: Array) -> Array:
    """A value a row, in as many dimensions as `part`."""
    return values.reshape(-1, *(1,) * (part.ndim - 1))
