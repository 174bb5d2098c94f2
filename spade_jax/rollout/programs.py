"""What the sampler runs on the device: programs of fixed shapes over one state that they pass on.

A lane is a sequence the device knows of; a slot is a row of the decode call. Lanes that are
prefilled wait in line, and a slot that falls free takes the next one without the host:

    lanes   A B C D E F G .      slots  [A B C D]   line [E F G]
    step 3  B has ended          slots  [A E C D]   line [F G]

Prefill and decode are calls of their own and are never fused into one product: how many rows a
product has decides its last bits, and a sequence's would then hang on its neighbours. Decode has
one shape, and what follows a prompt is drawn in a fixed number of rows whatever the call. Planning
is the host's work (`rounds`), and how one token is drawn is `sampling`'s.
"""

import concurrent.futures
import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from models import cache as kv
from models import sharding, transformer
from models.backends import compiler_options
from models.config import TransformerConfig
from models.execution import Execution
from spade_jax.engine_config import EngineConfig, WeightFormat
from spade_jax.rollout import weights
from spade_jax.rollout.sampling import Drawn, Rule, draw

logger = logging.getLogger(__name__)

MAX_STOP_IDS = 8
"""Stop ids one request may name: a fixed width keeps the compiled shapes few."""


class State(NamedTuple):
    """All that is on the device but the weights; each program takes it and returns it changed."""

    cache: kv.Cache
    pages: Int[Array, "lanes pages_per_row"]
    tokens: Int[Array, " lanes"]  # the last token, whose keys and values are not in the cache yet
    positions: Int[Array, " lanes"]  # of `tokens`
    done: Bool[Array, " lanes"]  # a stop id was drawn, or the scores were no numbers
    stop_ids: Int[Array, "lanes stops"]  # padded with -1
    rule: Rule


class Placed(NamedTuple):
    """Lanes whose sequence or pages are new; rows past the last one name a lane that is not."""

    lanes: Int[Array, " rows"]
    pages: Int[Array, "rows pages_per_row"]
    stop_ids: Int[Array, "rows stops"]
    rule: Rule


class Copies(NamedTuple):
    """Pages to copy; a target of -1 is no copy."""

    source: Int[Array, " rows"]
    target: Int[Array, " rows"]


class Pieces(NamedTuple):
    """Parts of prompts; position -1 is padding, which writes nothing.

    tokens [t0 .. t31]   positions [ 0 .. 31]   a lane's first piece, and its second and last:
           [t32 t33 0 ]            [32 33 -1]   `ends` names the second piece for this lane
    """

    tokens: Int[Array, "pieces piece"]
    positions: Int[Array, "pieces piece"]
    lanes: Int[Array, " pieces"]
    ends: Int[Array, " slots"]  # pieces after which a token is drawn, one for each lane that waits
    end_lanes: Int[Array, " slots"]  # for which it is drawn; one that is not there for no draw


class Run(NamedTuple):
    """A run of decode steps."""

    slots: Int[Array, " slots"]  # the lane in each slot; -1 none
    line: Int[Array, " lanes"]  # lanes that wait for a slot, in order; -1 behind them
    limits: Int[Array, " lanes"]  # position of the last token that the lane may draw in this run
    spare: Int[Array, " spare"]  # pages to be had, in order; -1 behind them
    exit_after: Int[Array, ""]  # slots that fall empty before the run ends early


class Decoded(NamedTuple):
    """What a run drew, slot by slot and step by step."""

    lanes: Int[Array, "slots steps"]  # whose token it is; -1 for none
    tokens: Int[Array, "slots steps"]  # -1 where the scores were no numbers
    logprobs: Float[Array, "slots steps"]
    untruncated: Float[Array, "slots steps"]
    taken: Int[Array, "slots steps"]  # the spare page that the lane goes on in; -1 for none
    slots: Int[Array, " slots"]  # the lane in each slot at the end
    num_steps: Int[Array, ""]


class Model(NamedTuple):
    """The model that runs, where, and how; its parameters come as a flat tuple, which costs the
    host next to nothing to hand over.
    """

    config: TransformerConfig
    mesh: Mesh
    execution: Execution
    form: WeightFormat

    def params(self, leaves: tuple[Array, ...]) -> transformer.Params:
        tree = jax.tree.structure(weights.abstract_params(self.config, self.execution, self.form))
        return jax.tree.unflatten(tree, leaves)

    def hidden(
        self,
        params: transformer.Params,
        state: State,
        lanes: Int[Array, " rows"],
        tokens: Int[Array, "rows seq"],
        positions: Int[Array, "rows seq"],
    ) -> tuple[Float[Array, "rows seq embed"], State]:
        """Run tokens of lanes through the cache."""
        out = transformer.forward(
            self.config,
            params,
            tokens,
            positions,
            cache=state.cache,
            page_table=state.pages[lanes],
            mesh=self.mesh,
            execution=self.execution,
        )
        assert out.cache is not None
        return out.hidden, state._replace(cache=out.cache)

    def draw(
        self,
        params: transformer.Params,
        hidden: Float[Array, "rows 1 embed"],
        rule: Rule,
        positions: Int[Array, " rows"],
    ) -> Drawn:
        """Draw the tokens of `positions`; -1 where the scores are no numbers."""
        scores = transformer.logits(self.config, params, hidden, self.mesh, rows_split=False)
        drawn = draw(scores[:, 0], rule, positions)
        return drawn._replace(tokens=jnp.where(drawn.finite, drawn.tokens, -1))


def place(state: State, rows: Placed) -> State:
    """Write the rows of lanes."""

    def put(all_lanes: Array, new: Array) -> Array:
        return all_lanes.at[rows.lanes].set(new, mode="drop")

    return state._replace(
        pages=put(state.pages, rows.pages),
        stop_ids=put(state.stop_ids, rows.stop_ids),
        rule=Rule(*map(put, state.rule, rows.rule)),
    )


def copy(state: State, pages: Copies) -> State:
    """Copy pages, so that each sequence may write to its own."""
    return state._replace(cache=kv.copy_pages(state.cache, *pages))


def prefill(
    model: Model, leaves: tuple[Array, ...], state: State, pieces: Pieces
) -> tuple[State, Drawn]:
    """Write pieces of prompts into the cache; draw the token that follows each one's last piece."""
    params = model.params(leaves)
    hidden, state = model.hidden(params, state, pieces.lanes, pieces.tokens, pieces.positions)
    last = jnp.argmax(pieces.positions, axis=1)
    rows = hidden[pieces.ends, last[pieces.ends]][:, None]
    positions = pieces.positions[pieces.ends, last[pieces.ends]] + 1
    lanes = jnp.minimum(pieces.end_lanes, state.tokens.shape[0] - 1)
    rule = Rule(*(x[lanes] for x in state.rule))

    def follow() -> Drawn:
        return model.draw(params, rows, rule, positions)

    def none() -> Drawn:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(follow))

    drawn = jax.lax.cond((pieces.end_lanes < state.tokens.shape[0]).any(), follow, none)

    def put(all_lanes: Array, new: Array) -> Array:
        return all_lanes.at[pieces.end_lanes].set(new, mode="drop")

    stopped = _stops(drawn, state.stop_ids[lanes])
    return state._replace(
        tokens=put(state.tokens, drawn.tokens),
        positions=put(state.positions, positions),
        done=put(state.done, stopped),
    ), drawn


def decode(
    model: Model,
    max_steps: int,
    page_tokens: int,
    leaves: tuple[Array, ...],
    state: State,
    run: Run,
) -> tuple[State, Decoded]:
    """Draw up to `max_steps` tokens in every slot; lanes in line take the slots that fall free, and
    those at the end of their pages a spare one, or they leave their slots.
    """
    params = model.params(leaves)
    num_slots, num_lanes = run.slots.shape[0], run.line.shape[0]
    # A lane whose first token was its last is out of the line before it begins.
    out = (run.line < 0) | state.done[run.line]
    line = run.line[jnp.argsort(out, stable=True)]
    in_line = (~out).sum(dtype=jnp.int32)

    def fill(slots: Array, first: Array) -> tuple[Array, Array]:
        free = slots < 0
        place = first + jnp.cumsum(free, dtype=jnp.int32) - 1
        taken = free & (place < in_line)
        slots = jnp.where(taken, line[jnp.minimum(place, num_lanes - 1)], slots)
        return slots, first + taken.sum(dtype=jnp.int32)

    slots, first = fill(run.slots, jnp.int32(0))
    num_idle = (slots < 0).sum(dtype=jnp.int32)

    def go_on(carry: tuple) -> Array:
        step, slots = carry[0], carry[1]
        idle = (slots < 0).sum(dtype=jnp.int32)
        return (step < max_steps) & (idle < num_slots) & (idle - num_idle < run.exit_after)

    def body(carry: tuple) -> tuple:
        step, slots, first, used, state, decoded = carry
        lanes, active = jnp.maximum(slots, 0), slots >= 0
        positions = jnp.where(active, state.positions[lanes], -1)
        hidden, state = model.hidden(
            params, state, lanes, state.tokens[lanes][:, None], positions[:, None]
        )
        rule = Rule(*(x[lanes] for x in state.rule))
        drawn = model.draw(params, hidden, rule, positions + 1)
        decoded = decoded._replace(
            lanes=decoded.lanes.at[:, step].set(slots),
            tokens=decoded.tokens.at[:, step].set(drawn.tokens),
            logprobs=decoded.logprobs.at[:, step].set(drawn.logprobs),
            untruncated=decoded.untruncated.at[:, step].set(drawn.untruncated),
        )
        stopped = _stops(drawn, state.stop_ids[lanes])
        positions = positions + 1
        stays = active & ~stopped & (positions < run.limits[lanes])
        crosses = stays & (positions % page_tokens == 0)
        order = jnp.where(crosses, used + jnp.cumsum(crosses, dtype=jnp.int32) - 1, -1)
        taken = jnp.where(crosses, run.spare.at[order].get(mode="fill", fill_value=-1), -1)
        stays &= ~crosses | (taken >= 0)
        decoded = decoded._replace(taken=decoded.taken.at[:, step].set(taken))
        target = jnp.where(active, lanes, num_lanes)
        crossing = jnp.where(taken >= 0, lanes, num_lanes)
        state = state._replace(
            pages=state.pages.at[crossing, positions // page_tokens].set(taken, mode="drop"),
            tokens=state.tokens.at[target].set(drawn.tokens, mode="drop"),
            positions=state.positions.at[target].set(positions, mode="drop"),
            done=state.done.at[target].set(stopped, mode="drop"),
        )
        slots, first = fill(jnp.where(stays, slots, -1), first)
        used = used + (taken >= 0).sum(dtype=jnp.int32)
        return step + 1, slots, first, used, state, decoded

    carry = (jnp.int32(0), slots, first, jnp.int32(0), state, _nothing(num_slots, max_steps))
    step, slots, _, _, state, decoded = jax.lax.while_loop(go_on, body, carry)
    return state, decoded._replace(slots=slots, num_steps=step)


def _nothing(num_slots: int, max_steps: int) -> Decoded:
    """A run before its first step."""
    shape = (num_slots, max_steps)
    none, zeros = jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.float32)
    slots = jnp.full(num_slots, -1, jnp.int32)
    return Decoded(none, none, zeros, zeros, none, slots, jnp.int32(0))


def _stops(drawn: Drawn, stop_ids: Int[Array, "rows stops"]) -> Bool[Array, " rows"]:
    return ~drawn.finite | (drawn.tokens[:, None] == stop_ids).any(axis=1)


class Program(NamedTuple):
    """Names a compiled device program."""

    kind: Literal["allocate", "place", "copy", "prefill", "decode", "routing"]
    pieces: int = 0  # of a prefill call


class Programs:
    """The programs of one configuration, compiled ahead or, if late, when they are needed."""

    def __init__(
        self, model: TransformerConfig, config: EngineConfig, mesh: Mesh, execution: Execution
    ) -> None:
        self._model = Model(model, mesh, execution, config.weights)
        self._config = config
        self._compiled: dict[Program, Callable[..., Any]] = {}
        self.num_late = 0

    @property
    def num_compiles(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def names(self) -> list[Program]:
        """Every program that this configuration can need."""
        prefills = [Program("prefill", pieces) for pieces in self._config.prefill_pieces]
        reads = [Program("routing")] if self._config.routing else []
        first = [Program("allocate"), Program("place"), Program("copy")]
        return [*first, *prefills, Program("decode"), *reads]

    def compile(self) -> None:
        """Compile what is not compiled yet, and say what memory each program takes."""
        missing = [program for program in self.names() if program not in self._compiled]
        # Tracing holds the interpreter's lock and compiling does not, so only that runs in threads.
        lowered = [self.lower(program) for program in missing]
        with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
            compiled = list(pool.map(lambda stage: stage.compile(), lowered))
        self._compiled.update(zip(missing, compiled, strict=True))
        for program, executable in zip(missing, compiled, strict=True):
            logger.info("%s: %s", _label(program), _memory(executable))

    def __call__(self, program: Program, *inputs: Any) -> Any:
        """Run a program, which is compiled first if it was not ahead of time."""
        if program not in self._compiled:
            self.num_late += 1
            logger.warning("%s was not compiled ahead: a defect", _label(program))
            self._compiled[program] = self.lower(program).compile()
        return self._compiled[program](*inputs)

    def shapes(self, program: Program) -> Any:
        """Shapes of a program's inputs besides weights and state; the host fills arrays like it."""
        config = self._config
        shape: Any = jax.ShapeDtypeStruct  # stands in for the array
        slots, ints = config.slots, jnp.int32
        pages = shape((slots, config.pages_per_row), ints)
        if program.kind == "place":
            return Placed(shape((slots,), ints), pages, *_settings(slots))
        if program.kind == "copy":
            return Copies(shape((slots,), ints), shape((slots,), ints))
        if program.kind == "prefill":
            piece = shape((program.pieces, config.piece_tokens), ints)
            row = shape((slots,), ints)
            return Pieces(piece, piece, shape((program.pieces,), ints), row, row)
        lanes = shape((config.lanes,), ints)
        spare = shape((config.spare_pages,), ints)
        return Run(shape((slots,), ints), lanes, lanes, spare, shape((), ints))

    def _allocate(self) -> State:
        config, (model, mesh, execution, _) = self._config, self._model
        lanes = config.lanes
        cache = kv.init_cache(
            model, config.num_pages, config.page_tokens, execution, mesh, routing=config.routing
        )
        stop_ids, rule = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), _settings(lanes))
        return State(
            cache,
            jnp.zeros((lanes, config.pages_per_row), jnp.int32),
            jnp.zeros(lanes, jnp.int32),
            jnp.zeros(lanes, jnp.int32),
            jnp.zeros(lanes, jnp.bool_),
            stop_ids,
            rule,
        )

    def lower(self, program: Program) -> jax.stages.Lowered:
        """Trace a program for the devices of the mesh, which need not be here."""
        config, (model, mesh, execution, form) = self._config, self._model
        whole = sharding.replicated(mesh)
        in_cache = kv.cache_sharding(mesh, execution)
        states = State(in_cache, *(whole for _ in State._fields[1:]))  # type: ignore[arg-type]
        if program.kind == "allocate":
            return jax.jit(self._allocate, out_shardings=states).lower()
        state = jax.eval_shape(self._allocate)
        if program.kind == "routing":
            read = jax.jit(kv.read_routing, in_shardings=(in_cache, whole), out_shardings=whole)
            return read.lower(state.cache, jax.ShapeDtypeStruct((config.pages_per_row,), jnp.int32))
        inputs = self.shapes(program)
        if program.kind in ("place", "copy"):
            run = place if program.kind == "place" else copy
            jitted = jax.jit(
                run, donate_argnums=0, in_shardings=(states, whole), out_shardings=states
            )
            return jitted.lower(state, inputs)
        if program.kind == "prefill":
            run = functools.partial(prefill, self._model)
        else:
            run = functools.partial(decode, self._model, config.decode_steps, config.page_tokens)
        params = tuple(jax.tree.leaves(weights.abstract_params(model, execution, form)))
        places = tuple(jax.tree.leaves(weights.shardings(model, mesh, execution, form)))
        jitted = jax.jit(
            run,
            donate_argnums=1,
            in_shardings=(places, states, whole),
            out_shardings=(states, whole),
            compiler_options=compiler_options(mesh),
        )
        return jitted.lower(params, state, inputs)


def blank(shapes: Any) -> Any:
    """Zeros on the host, in the shapes of a program's input."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)


def _settings(rows: int) -> tuple[Any, Rule]:
    """Shapes of the stop ids and rules of some rows."""
    shape: Any = jax.ShapeDtypeStruct  # stands in for the array
    floats = shape((rows,), jnp.float32)
    keys, top_k = shape((rows, 2), jnp.uint32), shape((rows,), jnp.int32)
    return shape((rows, MAX_STOP_IDS), jnp.int32), Rule(keys, floats, floats, floats, top_k)


def _label(program: Program) -> str:
    return f"program {program.kind}" + (f"[{program.pieces}]" if program.pieces else "")


def _memory(executable: Any) -> str:
    """The compiler's account of a program's memory."""
    found = executable.memory_analysis()
    if found is None:
        return "no memory analysis on this platform"
    sizes = {
        "arguments": found.argument_size_in_bytes,
        "of which updated in place": found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
    }
    return ", ".join(f"{size / 2**20:.1f} MiB {name}" for name, size in sizes.items())
