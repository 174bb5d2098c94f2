"""The sampler: a service for coroutines, with continuous batching over a paged cache.

`generate` takes token ids and gives token ids with the log-probability of each. A round admits what
waits, prefills what the cache does not hold and decodes for a bounded number of steps, in programs
of fixed shape that are compiled ahead; it runs in a thread, so that environments step meanwhile. A
request's tokens and log-probabilities have the same bits whatever its neighbours are, in whatever
order they come, and after a restart; only if a page of its own earlier turns was evicted, or the
shapes differ, do they agree just up to rounding. A deadline makes the clock decide what is sampled,
and is off unless a request sets one.

Where things are: `pages` knows which page holds what, `rounds` plans, `programs` runs on the
device, `requests` judges ends, `scheduler` drives the coroutines. Speculative decoding, penalties
and a server for other processes are not here.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Key, UInt32

from models import transformer
from models.config import TransformerConfig
from models.execution import PLAIN, Execution
from spade_jax.config import EngineConfig
from spade_jax.errors import SamplerError
from spade_jax.rollout import weights
from spade_jax.rollout.pages import copies_in_parts
from spade_jax.rollout.programs import MAX_STOP_IDS, Program, Programs, State, blank
from spade_jax.rollout.requests import Request
from spade_jax.rollout.rounds import Call, Lane, Plan, Results, Rounds
from spade_jax.rollout.sampling import check_params
from spade_jax.rollout.scheduler import Scheduler
from spade_jax.rollout.stats import EngineStats
from spade_jax.types import Completion, SamplingParams, Stop

logger = logging.getLogger(__name__)


@runtime_checkable
class Decoder(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, tokens: Sequence[int], /) -> str: ...


class Engine:
    """Samples from one policy version at a time, for the coroutines of `gather`."""

    def __init__(
        self,
        model: TransformerConfig,
        config: EngineConfig,
        mesh: Mesh,
        execution: Execution = PLAIN,
        *,
        tokenizer: Decoder | None = None,
        deterministic: bool = True,
    ) -> None:
        self._model = model
        self._execution = execution
        self._config = config
        self._mesh = mesh
        self._tokenizer = tokenizer
        self._programs = Programs(model, config, mesh, execution)
        self._leaves: tuple[Array, ...] | None = None
        self._state: State | None = None
        self._version = -1
        self._stats = EngineStats()
        self._rounds = Rounds(config, self._stats)
        self._scheduler: Scheduler[Request] = Scheduler(self, deterministic=deterministic)
        self._thread: ThreadPoolExecutor | None = None
        # Of the round on the device: when its first program was given to it, and the last so far.
        self._begun: float | None = None
        self._mark = 0.0

    # ---- weights

    def load(self, params: transformer.Params, version: int) -> None:
        """Sample from these weights from now on; the cache of other weights is dropped."""
        self.release()
        started = time.perf_counter()
        form = self._config.weights
        params = weights.to_sampler(self._model, self._mesh, self._execution, params, form)
        self._leaves = tuple(jax.block_until_ready(jax.tree.leaves(params)))
        self._stats.load_s += time.perf_counter() - started
        self._state = self._programs(Program("allocate"))
        self._version = version

    def release(self) -> None:
        """Let go of weights and cache, so that the learner may donate its arrays."""
        if self._scheduler.running:
            raise SamplerError(
                "load or release was called while gather runs, which would mix policy versions "
                "within a completion; call it after gather has returned"
            )
        self._leaves = None
        self._state = None
        self._rounds.clear()

    # ---- programs

    @property
    def num_compiles(self) -> int:
        """Device programs compiled so far."""
        return self._programs.num_compiles

    def programs(self) -> list[Program]:
        """Every program this configuration can need."""
        return self._programs.names()

    def compile(self) -> None:
        """Compile every program that is not compiled yet."""
        self._programs.compile()

    # ---- service

    async def gather(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines that call `generate`; return their results in order.

        They are served in rounds, while their environments step: see `scheduler`.
        """
        started = time.perf_counter()
        with ThreadPoolExecutor(1, "sampler") as self._thread:
            try:
                return await self._scheduler.run(coroutines)
            finally:
                self._stats.gather_s += time.perf_counter() - started

    def stop(self) -> None:
        """End the requests of the gather that runs, after the round under way, as cancelled; those
        it asks for later are refused. May be called from any thread.
        """
        self._scheduler.stop()

    async def generate(
        self,
        tokens: Int[np.ndarray, " seq"],
        params: SamplingParams,
        key: Key[Array, ""] | UInt32[np.ndarray, "2"],
    ) -> Completion:
        """Sample a continuation of `tokens`, the whole sequence so far.

        `key` belongs to the sequence: the token at absolute position p is drawn with
        fold_in(key, p). Cancelling the call gives its pages back.
        """
        self._validate(tokens, params)
        data = key if isinstance(key, np.ndarray) else np.asarray(jax.random.key_data(key))
        request = Request(
            tokens.tolist(),
            params,
            data,
            self._config.context_tokens,
            None if self._tokenizer is None else self._tokenizer.decode,
        )
        try:
            async with asyncio.timeout(params.deadline_s or None):
                await self._scheduler.submit(request)
        except TimeoutError:  # what is under way for it is dropped; its lane goes with a plan
            if not request.ended:
                request.stop = Stop.DEADLINE
        except BaseException:
            request.cancelled = True
            raise
        if request.error:
            raise SamplerError(request.error)
        return self._completion(request)

    def stats(self) -> EngineStats:
        """Return what was done since the last call."""
        self._stats.late_compiles, self._programs.num_late = self._programs.num_late, 0
        return self._stats.take()

    @property
    def num_held_pages(self) -> int:
        """Pages of the cache that requests use; those that only remember are not among them."""
        return self._rounds.num_held

    def _completion(self, request: Request) -> Completion:
        assert request.stop is not None
        return Completion(
            tokens=np.array(request.tokens[request.num_prompt :], np.int32),
            logprobs=np.array(request.logprobs, np.float32),
            untruncated_logprobs=np.array(request.untruncated, np.float32),
            stop=request.stop,
            policy_version=self._version,
            forced=np.array(request.forced, np.bool_) if any(request.forced) else None,
            routing=request.routing,
        )

    def _validate(self, tokens: Int[np.ndarray, " seq"], params: SamplingParams) -> None:
        vocab, context = self._model.vocab_size, self._config.context_tokens
        if self._leaves is None:
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
        check_params(params)
        self._validate_ends(params)
        most, size = min(context, len(tokens) + params.max_tokens), self._config.page_tokens
        if -(-most // size) > self._config.num_pages:
            raise SamplerError(
                f"{len(tokens)} tokens and max_tokens={params.max_tokens} may come to {most}, but "
                f"the cache holds {self._config.num_pages * size} in "
                f"{self._config.num_pages} pages of {size}; raise engine.kv_tokens to {most} or "
                "ask for less"
            )

    def _validate_ends(self, params: SamplingParams) -> None:
        if len(params.stop_ids) > MAX_STOP_IDS:
            raise SamplerError(
                f"{len(params.stop_ids)} stop ids were given; expected at most {MAX_STOP_IDS}"
            )
        if params.stop_strings and self._tokenizer is None:
            raise SamplerError(
                f"stop_strings={params.stop_strings!r} need text, and this engine has no "
                "tokenizer; make it with Engine(..., tokenizer=...) or use stop_ids"
            )
        if not all(params.stop_strings):
            raise SamplerError(
                f"stop_strings={params.stop_strings!r} holds an empty string, which is in every "
                "text; remove it"
            )
        if params.thinking_tokens < 0 or (params.thinking_tokens and params.thinking is None):
            raise SamplerError(
                f"thinking_tokens={params.thinking_tokens} with thinking={params.thinking}; "
                "expected 0 (no budget), or a budget and the ids of the chat template's block"
            )
        if not params.deadline_s >= 0:
            raise SamplerError(f"deadline_s={params.deadline_s}; expected 0 (none) or seconds")
        if params.routing and not self._config.routing:
            raise SamplerError(
                "routing=True, but the cache keeps no router choices; set engine.routing"
            )

    # ---- one round: what `scheduler` asks of a service

    @property
    def busy(self) -> bool:
        """Whether a request waits or is served."""
        return self._rounds.busy

    @property
    def width(self) -> int:
        """Requests that one round can take up."""
        return self._config.lanes

    def add(self, request: Request, order: int) -> None:
        """Let a request wait for its turn."""
        request.order = order
        self._rounds.add(request)

    def drop(self) -> list[Request]:
        """End all requests where they are; none holds a page any more."""
        return self._rounds.drop(Stop.CANCELLED)

    async def round(self) -> list[Request]:
        """Plan a round, run it in a thread and take in its results."""
        started = time.perf_counter()
        plan = self._rounds.plan()
        self._stats.host_s += time.perf_counter() - started
        self._stats.rounds += 1
        assert self._thread is not None
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._execute, plan)
        cancelled = None
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError as error:
                # The state is on its way through the programs, which write to pages that others
                # would find; so the round is taken in as any other, however often this is said.
                cancelled = error
        results = work.result()
        started = time.perf_counter()
        finished = self._rounds.absorb(plan, results)
        self._stats.host_s += time.perf_counter() - started
        if self._config.routing:
            for request in finished:
                self._read_routing(request)
        if cancelled is not None:
            raise cancelled
        return finished

    def _execute(self, plan: Plan) -> Results:
        """Run a plan on the device and fetch what it drew; nothing is waited for before the end."""
        self._begun, self._mark = None, time.perf_counter()
        self._place(plan.placed)
        self._copy(plan.copies)
        drawn = [self._prefill(call) for call in plan.calls]
        self._copy(plan.late_copies)
        decoded = self._decode(plan) if plan.decodes else None
        begun = self._begun or self._mark
        first = [tuple(map(np.asarray, call)) for call in drawn]
        between = time.perf_counter()
        rest = None if decoded is None else tuple(map(np.asarray, decoded))
        ended = time.perf_counter()
        self._stats.prefill_s += between - begun
        self._stats.decode_s += ended - between
        self._stats.device_s += ended - begun
        return Results([(each[0], each[1], each[2]) for each in first], rest)

    def _run(self, program: Program, *inputs: Any) -> Any:
        """Run a program on the state, which its result replaces."""
        if self._state is None:
            raise SamplerError("an earlier round failed on the device; load weights to begin anew")
        state, self._state = self._state, None  # donated
        ready, output = time.perf_counter(), None
        self._stats.host_s += ready - self._mark
        self._begun = self._begun or ready
        if program.kind in ("place", "copy"):
            self._state = self._programs(program, state, *inputs)
        else:
            self._state, output = self._programs(program, self._leaves, state, *inputs)
        self._mark = time.perf_counter()
        return output

    def _place(self, lanes: Sequence[Lane]) -> None:
        program = Program("place")
        for part in _parts(lanes, self._config.slots):
            rows = blank(self._programs.shapes(program))
            rows.lanes[:] = self._config.lanes
            rows.stop_ids[:] = -1
            for row, lane in enumerate(part):
                params = lane.request.params
                rows.lanes[row] = lane.index
                rows.pages[row, : len(lane.held.pages)] = lane.held.pages
                rows.stop_ids[row, : len(params.stop_ids)] = params.stop_ids
                rows.rule.keys[row] = lane.request.key
                rows.rule.temperature[row] = params.temperature
                rows.rule.top_p[row] = params.top_p
                rows.rule.min_p[row] = params.min_p
                rows.rule.top_k[row] = params.top_k
            self._run(program, rows)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        program = Program("copy")
        for part in copies_in_parts(copies, self._config.slots):
            pages = blank(self._programs.shapes(program))
            pages.target[:] = -1
            for row, (source, target) in enumerate(part):
                pages.source[row], pages.target[row] = source, target
            self._run(program, pages)

    def _prefill(self, call: Call) -> tuple[Array, Array, Array]:
        size = next(size for size in self._config.prefill_pieces if size >= len(call.pieces))
        program = Program("prefill", size)
        pieces = blank(self._programs.shapes(program))
        pieces.positions[:] = -1
        pieces.end_lanes[:] = self._config.lanes
        for row, (lane, start, end) in enumerate(call.pieces):
            pieces.tokens[row, : end - start] = lane.request.tokens[start:end]
            pieces.positions[row, : end - start] = np.arange(start, end)
            pieces.lanes[row] = lane.index
        for row, (piece, lane) in enumerate(call.ends):
            pieces.ends[row], pieces.end_lanes[row] = piece, lane.index
        drawn = self._run(program, pieces)
        return drawn.tokens, drawn.logprobs, drawn.untruncated

    def _decode(self, plan: Plan) -> Any:
        program = Program("decode")
        run = blank(self._programs.shapes(program))
        run.slots[:] = plan.slots
        run.line[:] = -1
        run.line[: len(plan.line)] = plan.line
        run.spare[:] = -1
        run.spare[: len(plan.spare)] = plan.spare
        for lane, limit in plan.limits.items():
            run.limits[lane] = limit
        exit_after = np.int32(max(1, self._config.slots // 8))
        return self._run(program, run._replace(exit_after=exit_after))

    def _read_routing(self, request: Request) -> None:
        """Take the experts of a finished request's tokens out of its pages, before others write
        there.
        """
        if request.error or self._state is None:
            return
        pages = np.zeros(self._config.pages_per_row, np.int32)
        pages[: len(request.pages)] = request.pages
        found = np.asarray(self._programs(Program("routing"), self._state.cache, pages))
        request.routing = found.reshape(-1, *found.shape[2:])[: request.num_known].copy()


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]
