"""The sampler: a service for coroutines, with continuous batching over the slots of one KV cache.

A round admits waiting requests into idle slots, prefills what the cache does not hold, and decodes
all slots for a bounded number of steps. Every device program has a fixed shape and is compiled
ahead. How a sequence is cut into prefill chunks depends on that sequence and on how much of it a
slot still holds, never on its neighbours, so that it is computed in the same shapes and to the same
bits. Paged caches, prompts shared between slots and decoding while environments reply are not here.
"""

import concurrent.futures
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, UInt32

from models import cache, sharding, transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from spade_jax.config import EngineConfig
from spade_jax.errors import SamplerError
from spade_jax.rollout import sampling, weights
from spade_jax.rollout.cache import SlotTable
from spade_jax.rollout.scheduler import Lockstep
from spade_jax.types import Completion, SamplingParams, Stop

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """What the engine did since it was last asked."""

    sampled_tokens: int = 0
    prefilled_tokens: int = 0  # run through the model to fill the cache
    prefix_hit_tokens: int = 0  # found in the cache instead
    decode_steps: int = 0
    occupied_slot_steps: int = 0  # of decode_steps x slots, those that sampled a token
    device_s: float = 0.0  # from dispatch to results on the host, late compiles included
    late_compiles: int = 0  # programs that `compile` had not compiled when needed: should stay 0


@dataclass(eq=False)
class Request:
    """One generate call in flight."""

    tokens: Int[np.ndarray, " seq"]
    params: SamplingParams
    key: UInt32[np.ndarray, "2"]
    slot: int = -1  # -1 until admitted
    stop: Stop | None = None  # set when finished
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole sequence so far."""
        return len(self.tokens) + len(self.sampled)


class Piece(NamedTuple):
    """Tokens `start..end` of a request, run by the prefill program of `chunk`."""

    chunk: int
    start: int
    end: int
    request: Request


class Program(NamedTuple):
    """Names a compiled device program."""

    kind: Literal["allocate", "prefill", "decode"]
    chunk: int = 0  # tokens of a prefill row


def plan_chunks(start: int, end: int, chunks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Cut tokens `start..end` into (chunk, start, end) with little padding in few pieces.

    Each piece takes the smallest chunk that covers the rest, unless more than half of that would be
    padding and a smaller chunk could be filled.
    """
    pieces = []
    while start < end:
        rest = end - start
        filled = [chunk for chunk in chunks if chunk <= rest]
        covering = [chunk for chunk in chunks if rest <= chunk <= 2 * rest or not filled]
        chunk = covering[0] if covering else filled[-1]
        pieces.append((chunk, start, min(start + chunk, end)))
        start += chunk
    return pieces


class Engine:
    """Samples from one policy version at a time, for the coroutines of `gather`."""

    def __init__(
        self,
        model: TransformerConfig,
        config: EngineConfig,
        mesh: Mesh,
        execution: Execution = PLAIN,
    ) -> None:
        self._model = model
        self._execution = execution
        self._config = config
        self._mesh = mesh
        self._prefill_rows = min(config.prefill_rows, config.slots)
        self._programs: dict[Program, Callable[..., Any]] = {}
        self._params: transformer.Params | None = None
        self._cache: transformer.Cache | None = None
        self._version = -1
        self._table = SlotTable(config.slots, config.context_tokens)
        self._lockstep: Lockstep[Request] = Lockstep(self._serve)
        self._stats = EngineStats()

    # ---- weights

    def load(self, params: transformer.Params, version: int) -> None:
        """Sample from these weights from now on; the cache of other weights is dropped."""
        self.release()
        self._params = weights.to_sampler(self._model, self._mesh, self._execution, params)
        self._cache = self._program(Program("allocate"))()
        self._version = version

    def release(self) -> None:
        """Let go of weights and cache, so that the learner may donate its arrays."""
        if self._lockstep.running:
            raise SamplerError(
                "load or release was called while gather runs, which would mix policy versions "
                "within a completion; call it after gather has returned"
            )
        self._params = None
        self._cache = None
        self._table.clear()

    # ---- programs

    @property
    def num_compiles(self) -> int:
        """Device programs compiled so far."""
        return len(self._programs)

    def programs(self) -> list[Program]:
        """Every program this configuration can need."""
        prefills = [Program("prefill", chunk) for chunk in self._config.prefill_chunks]
        return [Program("allocate"), *prefills, Program("decode")]

    def compile(self) -> None:
        """Compile every program that is not compiled yet."""
        missing = [program for program in self.programs() if program not in self._programs]
        # Tracing holds the interpreter's lock and compiling does not, so only that runs in threads.
        lowered = [self._lower(program) for program in missing]
        with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
            compiled = list(pool.map(lambda stage: stage.compile(), lowered))
        self._programs.update(zip(missing, compiled, strict=True))

    def _program(self, program: Program) -> Callable[..., Any]:
        if program not in self._programs:
            self._stats.late_compiles += 1
            self._programs[program] = self._lower(program).compile()
        return self._programs[program]

    def _lower(self, program: Program) -> jax.stages.Lowered:
        config, replicated = self._config, sharding.replicated(self._mesh)
        model, mesh, execution = self._model, self._mesh, self._execution
        cache_sharding = cache.cache_sharding(mesh, execution)
        allocate = functools.partial(
            cache.init_cache, model, config.slots, config.context_tokens, execution, mesh
        )
        if program.kind == "allocate":
            return jax.jit(allocate, out_shardings=cache_sharding).lower()
        runner = sampling.Sampler(model, mesh, execution)
        if program.kind == "prefill":
            run = functools.partial(sampling.prefill, runner)
            inputs: tuple[Any, ...] = (sampling.prefill_shapes(self._prefill_rows, program.chunk),)
        else:
            run = functools.partial(sampling.decode, runner, config.decode_steps)
            inputs = (sampling.decode_shapes(config.slots), jax.ShapeDtypeStruct((), np.int32))
        param_shardings = sharding.param_shardings(model, mesh, execution)
        jitted = jax.jit(
            run,
            donate_argnums=1,
            in_shardings=(param_shardings, cache_sharding, *(replicated for _ in inputs)),
            out_shardings=(cache_sharding, replicated),
        )
        params = weights.abstract_params(model, execution)
        return jitted.lower(params, jax.eval_shape(allocate), *inputs)

    def _run(self, program: Program, *inputs: Any) -> Any:
        cache, self._cache = self._cache, None  # donated: the result replaces it
        self._cache, output = self._program(program)(self._params, cache, *inputs)
        return output

    # ---- service

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines that call `generate`; return their results in order.

        They are served in rounds, each of which waits for all of them: see `scheduler.Lockstep`.
        """
        return await self._lockstep.run(coroutines)

    async def generate(
        self, tokens: Int[np.ndarray, " seq"], params: SamplingParams, key: Key[Array, ""]
    ) -> Completion:
        """Sample a continuation of `tokens`, the whole sequence so far.

        `key` belongs to the sequence: the token at absolute position p is drawn with
        fold_in(key, p).
        """
        self._validate(tokens, params)
        key_data = np.asarray(jax.random.key_data(key))
        request = Request(tokens.astype(np.int32), params, key_data)
        try:
            await self._lockstep.submit(request)
        finally:
            if request.stop is None and request.slot >= 0:
                self._table.release(request.slot)  # cancelled before it was finished
        assert request.stop is not None
        return Completion(
            tokens=np.array(request.sampled, np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            stop=request.stop,
            policy_version=self._version,
        )

    def stats(self) -> EngineStats:
        """Return what was done since the last call."""
        stats, self._stats = self._stats, EngineStats()
        return stats

    def _validate(self, tokens: Int[np.ndarray, " seq"], params: SamplingParams) -> None:
        vocab, context = self._model.vocab_size, self._config.context_tokens
        if self._params is None:
            raise SamplerError("generate was called before load; call load(params, version) first")
        if len(tokens) == 0:
            raise SamplerError("generate was given 0 tokens; expected at least a start token")
        if len(tokens) + 1 > context:
            raise SamplerError(
                f"a sequence of {len(tokens)} tokens leaves no room to sample in "
                f"engine.context_tokens={context}; shorten it to {context - 1} tokens or raise "
                "engine.context_tokens"
            )
        if tokens.min() < 0 or tokens.max() >= vocab:
            raise SamplerError(
                f"token ids span {tokens.min()}..{tokens.max()}; expected ids in 0..{vocab - 1} "
                "(model.vocab_size): encode with the tokenizer of this model"
            )
        if params.max_tokens < 1:
            raise SamplerError(
                f"max_tokens={params.max_tokens} samples nothing; expected 1 or more"
            )
        sampling.check_params(params)
        if len(params.stop_ids) > sampling.MAX_STOP_IDS:
            raise SamplerError(
                f"{len(params.stop_ids)} stop ids were given; expected at most "
                f"{sampling.MAX_STOP_IDS}"
            )

    # ---- one round

    def _serve(self, requests: list[Request]) -> list[Request]:
        started = time.perf_counter()
        waiting = [request for request in requests if request.slot < 0]
        if admitted := waiting[: self._table.num_idle]:
            self._prefill(self._admit(admitted))
        if live := [request for request in requests if request.slot >= 0 and not request.stop]:
            self._decode(live)
        self._stats.device_s += time.perf_counter() - started
        finished = [request for request in requests if request.stop]
        for request in finished:
            self._table.release(request.slot)
        return finished

    def _admit(self, admitted: list[Request]) -> list[list[Piece]]:
        """Give each request a slot, and cut what the slot lacks into pieces."""
        plans = []
        assigned = self._table.acquire([request.tokens for request in admitted])
        for request, (slot, hit) in zip(admitted, assigned, strict=True):
            request.slot = slot
            chunks = plan_chunks(hit, len(request.tokens), self._config.prefill_chunks)
            plans.append([Piece(*chunk, request) for chunk in chunks])
            self._stats.prefix_hit_tokens += hit
            self._stats.prefilled_tokens += len(request.tokens) - hit
        logger.debug("admitted (slot, tokens reused): %s", assigned)
        return plans

    def _prefill(self, plans: list[list[Piece]]) -> None:
        """Run the first pieces of all requests, then their second ones, alike pieces together."""
        calls = []
        for wave in range(max(map(len, plans))):
            pieces = [plan[wave] for plan in plans if len(plan) > wave]
            for chunk in sorted({piece.chunk for piece in pieces}):
                alike = [piece for piece in pieces if piece.chunk == chunk]
                rows = self._prefill_rows
                calls += [alike[i : i + rows] for i in range(0, len(alike), rows)]
        # Dispatched without waiting for results: a call needs only the cache of the one before.
        outputs = [
            self._run(Program("prefill", pieces[0].chunk), self._prefill_rows_of(pieces))
            for pieces in calls
        ]
        for pieces, output in zip(calls, outputs, strict=True):
            tokens, logprobs = map(np.asarray, output)
            for row, (_, start, end, request) in enumerate(pieces):
                self._table.append(request.slot, request.tokens[start:end])
                if end == len(request.tokens):
                    self._extend(request, tokens[row : row + 1], logprobs[row : row + 1])

    def _prefill_rows_of(self, pieces: list[Piece]) -> sampling.PrefillRows:
        rows = _blank(sampling.prefill_shapes(self._prefill_rows, pieces[0].chunk))
        rows.positions[:] = -1
        taken = [piece.request.slot for piece in pieces]
        unused = [slot for slot in range(self._config.slots) if slot not in taken]
        rows.slots[:] = (taken + unused)[: self._prefill_rows]  # `forward` wants distinct slots
        for row, (_, start, end, request) in enumerate(pieces):
            rows.tokens[row, : end - start] = request.tokens[start:end]
            rows.positions[row, : end - start] = np.arange(start, end)
            rows.keys[row] = request.key
            rows.temperature[row] = request.params.temperature
        return rows

    def _decode(self, live: list[Request]) -> None:
        """Decode all live requests for one bounded run.

        The run ends early when enough of them have finished to fill a prefill call. Such a call
        costs several decode steps however few of its rows are used, so returning for each single
        slot would cost more than the slot can gain.
        """
        rows = _blank(sampling.decode_shapes(self._config.slots))
        rows.positions[:] = rows.stop_ids[:] = -1
        for request in live:
            slot, params = request.slot, request.params
            rows.tokens[slot] = request.sampled[-1]
            rows.positions[slot] = request.num_tokens - 1
            longest = min(self._config.context_tokens, len(request.tokens) + params.max_tokens)
            rows.last_positions[slot] = longest - 1
            rows.stop_ids[slot, : len(params.stop_ids)] = params.stop_ids
            rows.keys[slot] = request.key
            rows.temperature[slot] = params.temperature
        exit_after = np.int32(min(self._prefill_rows, len(live)))
        output = self._run(Program("decode"), rows, exit_after)
        tokens, logprobs, counts, num_steps = map(np.asarray, output)
        for request in live:
            slot, count = request.slot, int(counts[request.slot])
            written = [request.sampled[-1], *tokens[slot, : count - 1]]
            self._table.append(slot, np.array(written, np.int32))
            self._extend(request, tokens[slot, :count], logprobs[slot, :count])
        self._stats.decode_steps += int(num_steps)
        self._stats.occupied_slot_steps += int(counts.sum())

    def _extend(
        self,
        request: Request,
        tokens: Int[np.ndarray, " new"],
        logprobs: Float[np.ndarray, " new"],
    ) -> None:
        """Append sampled tokens, and settle by the device's own rule whether the request ended."""
        request.sampled.extend(tokens.tolist())
        request.logprobs.extend(logprobs.tolist())
        self._stats.sampled_tokens += len(tokens)
        if request.sampled[-1] in request.params.stop_ids:
            request.stop = Stop.STOP_ID
        elif len(request.sampled) == request.params.max_tokens:
            request.stop = Stop.MAX_TOKENS
        elif request.num_tokens == self._config.context_tokens:
            request.stop = Stop.CONTEXT


def _blank(shapes: Any) -> Any:
    """Zeros on the host, in the shapes of a program's input."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
