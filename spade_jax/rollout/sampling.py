"""What the sampler runs on the device: the sampling rule, a prefill call, a run of decode steps.

Keys are folded with the absolute position of the token being sampled, so a token depends on its
sequence and its key, never on its slot, its neighbours or when it was scheduled. Top-p, top-k and
paged caches are deliberately not here.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution

MAX_STOP_IDS = 8
"""Stop ids one request may name: a fixed width keeps the compiled shapes few."""


class PrefillRows(NamedTuple):
    """One chunk of a few sequences; position -1 is padding, which writes nothing.

    tokens [t5 t6 t7  0  0]    positions [ 5  6  7 -1 -1]    samples the token of position 8
           [ 0  0  0  0  0]              [-1 -1 -1 -1 -1]    an unused row
    """

    tokens: Int[Array, "rows chunk"]
    positions: Int[Array, "rows chunk"]
    slots: Int[Array, " rows"]
    keys: UInt32[Array, "rows 2"]
    temperature: Float[Array, " rows"]


class DecodeRows(NamedTuple):
    """Every slot at the start of a decode run."""

    tokens: Int[Array, " slots"]  # the last token, whose keys and values are not in the cache yet
    positions: Int[Array, " slots"]  # of `tokens`; -1 for a slot that is not decoding
    last_positions: Int[Array, " slots"]  # of the last token the slot may sample
    stop_ids: Int[Array, "slots stops"]  # padded with -1
    keys: UInt32[Array, "slots 2"]
    temperature: Float[Array, " slots"]


class Decoded(NamedTuple):
    """What a decode run sampled: the first `counts` columns of each row."""

    tokens: Int[Array, "slots steps"]
    logprobs: Float[Array, "slots steps"]
    counts: Int[Array, " slots"]
    num_steps: Int[Array, ""]


def prefill_shapes(num_rows: int, chunk: int) -> PrefillRows:
    """Shapes and types of a prefill call's rows."""
    shape: Any = jax.ShapeDtypeStruct  # stands in for the array
    return PrefillRows(
        tokens=shape((num_rows, chunk), jnp.int32),
        positions=shape((num_rows, chunk), jnp.int32),
        slots=shape((num_rows,), jnp.int32),
        keys=shape((num_rows, 2), jnp.uint32),
        temperature=shape((num_rows,), jnp.float32),
    )


def decode_shapes(num_slots: int) -> DecodeRows:
    """Shapes and types of a decode run's rows."""
    shape: Any = jax.ShapeDtypeStruct  # stands in for the array
    return DecodeRows(
        tokens=shape((num_slots,), jnp.int32),
        positions=shape((num_slots,), jnp.int32),
        last_positions=shape((num_slots,), jnp.int32),
        stop_ids=shape((num_slots, MAX_STOP_IDS), jnp.int32),
        keys=shape((num_slots, 2), jnp.uint32),
        temperature=shape((num_slots,), jnp.float32),
    )


def sample(
    logits: Float[Array, "rows vocab"],
    keys: UInt32[Array, "rows 2"],
    positions: Int[Array, " rows"],
    temperature: Float[Array, " rows"],
) -> tuple[Int[Array, " rows"], Float[Array, " rows"]]:
    """Draw one token a row from softmax(logits / temperature), and its float32 log-probability.

    Temperature 0 takes the most likely token, with its log-probability at temperature 1.
    `positions` are those of the tokens drawn.
    """
    greedy = temperature == 0
    scaled = logits.astype(jnp.float32) / jnp.where(greedy, 1.0, temperature)[:, None]

    def gumbel(key_data: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, position), scaled.shape[1:], jnp.float32)

    perturbed = scaled + jax.vmap(gumbel)(keys, positions)
    tokens = jnp.argmax(jnp.where(greedy[:, None], scaled, perturbed), axis=-1).astype(jnp.int32)
    chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
    return tokens, chosen - jax.nn.logsumexp(scaled, axis=-1)


class Sampler(NamedTuple):
    """The model that runs, where, and how."""

    config: TransformerConfig
    mesh: Mesh | None = None
    execution: Execution = PLAIN

    def scores(
        self,
        params: transformer.Params,
        tokens: Int[Array, "rows seq"],
        positions: Int[Array, "rows seq"],
        **options: Any,
    ) -> tuple[Float[Array, "rows vocab"], transformer.Cache]:
        """Run tokens through the cache; return the scores that follow each row's last token."""
        out = transformer.forward(
            self.config,
            params,
            tokens,
            positions,
            mesh=self.mesh,
            execution=self.execution,
            **options,
        )
        assert out.cache is not None
        hidden = out.hidden
        if tokens.shape[1] > 1:
            last = jnp.argmax(positions, axis=1)
            hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)
        scores = transformer.logits(self.config, params, hidden, self.mesh, rows_split=False)
        return scores[:, 0], out.cache


def prefill(
    sampler: Sampler,
    params: transformer.Params,
    cache: transformer.Cache,
    rows: PrefillRows,
) -> tuple[transformer.Cache, tuple[Int[Array, " rows"], Float[Array, " rows"]]]:
    """Write a chunk of each row into its slot, and sample the token that follows the chunk."""
    scores, cache = sampler.scores(
        params, rows.tokens, rows.positions, cache=cache, page_table=rows.slots[:, None]
    )
    sampled_positions = rows.positions.max(axis=1) + 1
    return cache, sample(scores, rows.keys, sampled_positions, rows.temperature)


def decode(
    sampler: Sampler,
    max_steps: int,
    params: transformer.Params,
    cache: transformer.Cache,
    rows: DecodeRows,
    exit_after: Int[Array, ""],
) -> tuple[transformer.Cache, Decoded]:
    """Sample up to `max_steps` tokens in every decoding slot, until `exit_after` have finished."""
    num_slots = rows.tokens.shape[0]
    decoding = rows.positions >= 0
    page_table = jnp.arange(num_slots, dtype=jnp.int32)[:, None]  # a slot is one page

    def go_on(carry: tuple) -> Array:
        step, active = carry[0], carry[1]
        num_finished = (decoding & ~active).sum(dtype=jnp.int32)
        return (step < max_steps) & active.any() & (num_finished < exit_after)

    def body(carry: tuple) -> tuple:
        step, active, tokens, positions, cache, sampled, logprobs, counts = carry
        live = jnp.where(active, positions, -1)[:, None]
        scores, cache = sampler.scores(
            params, tokens[:, None], live, cache=cache, page_table=page_table
        )
        drawn, drawn_logprobs = sample(scores, rows.keys, positions + 1, rows.temperature)
        # Columns beyond a row's count hold what it drew while idle; the host never reads them.
        sampled = sampled.at[:, step].set(drawn)
        logprobs = logprobs.at[:, step].set(drawn_logprobs)
        counts = counts + active.astype(jnp.int32)
        positions = positions + 1
        stopped = (drawn[:, None] == rows.stop_ids).any(axis=1) | (positions >= rows.last_positions)
        return step + 1, active & ~stopped, drawn, positions, cache, sampled, logprobs, counts

    carry = (
        jnp.int32(0),
        decoding,
        rows.tokens,
        rows.positions,
        cache,
        jnp.zeros((num_slots, max_steps), jnp.int32),
        jnp.zeros((num_slots, max_steps), jnp.float32),
        jnp.zeros(num_slots, jnp.int32),
    )
    step, _, _, _, cache, sampled, logprobs, counts = jax.lax.while_loop(go_on, body, carry)
    return cache, Decoded(sampled, logprobs, counts, step)
