"""One life of the supervisor process, seen from the trainer: requests out in batches, answers in.

It knows nothing of programs or instances. What is asked of one worker in one turn of the event loop
travels in one frame. When the process is gone every waiting request is answered as a fault of the
infrastructure; starting another one is for the pool.
"""

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from spade_jax.envs import limits, tier, wire
from spade_jax.envs.limits import Limits
from spade_jax.envs.verdicts import ALIVE, BLAMELESS, MAX_STRETCH, UNKNOWN
from spade_jax.errors import SandboxError, SandboxStartError

MAX_DETAIL = 300
_START_S = 120.0  # for the import of numpy on a crowded machine
_STOP_S = 5.0
_SILENCE_S = 120.0  # more than the supervisor lets pass before it answers for a worker
_TICK_S = 5.0
_BUFFER_BYTES = 1 << 18
_MAX_BATCH = 64  # requests; each may have its limit before the next one begins
_MAX_BATCH_CHARS = 1 << 16  # of the actions in one


class Answer(NamedTuple):
    """What became of a request: "ok" with its value, or an outcome (or "lost") with a text."""

    status: str
    value: Any
    cpu_s: float = 0.0  # processor time it took
    elapsed_s: float = 0.0  # from the supervisor's hearing of it to the answer


@runtime_checkable
class Listener(Protocol):
    """Who hears of what happens to workers: the pool."""

    def on_answers(self, worker: int, owner: Any) -> None:
        """A worker lives and has answered; the last answer was for `owner`."""

    def on_worn(self, worker: int) -> None:
        """A worker has used half the processor time of a worker's life."""

    def on_down(self, worker: int, status: str, detail: str, *, idle: bool) -> None:
        """A worker is gone, by the fault of a request or while idle."""

    def on_ambiguous(self, worker: int) -> None:
        """A worker is gone by the fault of one of several requests; there is no telling which."""

    def on_memory(self, num_bytes: int) -> None:
        """All workers together have added so much memory."""

    def on_lost(self, link: "Link") -> None:
        """The supervisor is gone."""


class _Waiting(NamedTuple):
    future: asyncio.Future[Answer] | None  # None: nobody waits
    owner: Any


@dataclass(eq=False)
class _Batch:
    worker: int
    limit_s: float
    asked: int  # tick
    requests: list[tuple[Any, ...]] = field(default_factory=list)
    waiting: list[_Waiting] = field(default_factory=list)
    num_chars: int = 0
    num_answered: int = 0

    @property
    def patience_s(self) -> float:
        return MAX_STRETCH * self.limit_s * len(self.waiting) + _SILENCE_S

    def fits(self, limit_s: float, num_chars: int) -> bool:
        """Whether a request with this limit may be added."""
        return (
            self.limit_s == limit_s
            and len(self.requests) < _MAX_BATCH
            and self.num_chars + num_chars <= _MAX_BATCH_CHARS
        )


class Link(asyncio.BufferedProtocol):
    """A running supervisor."""

    def __init__(self, process: subprocess.Popen[bytes], listener: Listener) -> None:
        self.process = process
        self.alive = True
        self.ready: asyncio.Future[tier.Sandbox] = asyncio.get_running_loop().create_future()
        self.busy_s = 0.0  # time in which a request was waiting
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._decoder = wire.Decoder()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))  # one, not a new one for each read
        self._sent: dict[int, _Batch] = {}  # waiting for answers, by number
        self._queued: dict[int, _Batch] = {}  # by worker: batches that may still grow
        self._heard: dict[int, int] = {}  # tick at which a worker last answered
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_number = 0
        self._outbox: list[bytes | _Batch] = []
        self._busy_since = 0.0
        self._transport: asyncio.Transport | None = None

    def spawn(self, worker: int, replica: int, package: str) -> None:
        """Have a worker made that has imported `package`, or a spare one taken."""
        head = wire.ORDER.pack(wire.SPAWN, worker, 0, 0.0, replica)
        self._order(wire.frame(head, package.encode()))

    def kill(self, worker: int) -> None:
        """Have a worker ended."""
        self._queued.pop(worker, None)
        self._order(wire.frame(wire.ORDER.pack(wire.KILL, worker, 0, 0.0, 0)))

    def ask(
        self, worker: int, owner: Any, limit_s: float, *request: Any, alone: bool = False
    ) -> asyncio.Future[Answer]:
        """Send a request to a worker on behalf of `owner`; the future never raises.

        `alone` keeps it out of batches: what it does is then its own doing.
        """
        future = self._loop.create_future()
        if self.alive:
            self._add(worker, limit_s, request, _Waiting(future, owner), alone=alone)
        else:
            future.set_result(Answer("infrastructure", "the supervisor died"))
        return future

    def tell(self, worker: int, limit_s: float, *request: Any) -> None:
        """Send a request whose answer nobody waits for."""
        if self.alive:
            self._add(worker, limit_s, request, _Waiting(None, None), alone=False)

    def take_busy_s(self) -> float:
        """Seconds in which a request was waiting, since the last look."""
        if self._sent:
            now = time.perf_counter()
            self.busy_s += now - self._busy_since
            self._busy_since = now
        taken, self.busy_s = self.busy_s, 0.0
        return taken

    async def stop(self) -> None:
        """Close the connection, which ends the supervisor and all below it, and reap it."""
        if self._transport is not None:
            self._transport.close()
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _STOP_S
        while self.process.poll() is None and loop.time() < give_up:
            await asyncio.sleep(0.002)
        self.process.kill()
        self.process.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # pyright: ignore[reportAttributeAccessIssue]
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        for notice in self._decoder.feed(bytes(self._buffer[:nbytes])):
            kind, number, worker, index, value = wire.NOTICE.unpack_from(notice)
            body = notice[wire.NOTICE.size :]
            if kind == wire.ANSWERS:
                self._answered(number, worker, index, value, body)
            elif kind == wire.FAULT:
                self._faulted(number, worker, index, *wire.loads(body))
            elif kind == wire.IDLE:
                self._listener.on_down(worker, *wire.loads(body), idle=True)
            elif kind == wire.WORN:
                self._listener.on_worn(worker)
            elif kind == wire.MEMORY:
                self._listener.on_memory(int(value))
            elif not self.ready.done():
                status, detail = wire.loads(body)
                if status == "ok":
                    self.ready.set_result(tier.loads(detail))
                else:
                    self.ready.set_exception(
                        SandboxError(f"environments cannot run on this host: {detail}")
                    )

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        self._listener.on_lost(self)
        if not self.ready.done():
            self.ready.set_exception(
                SandboxStartError("the environment supervisor ended while starting; see above")
            )
        queued = [batch for batch in self._outbox if isinstance(batch, _Batch)]
        self._outbox.clear()
        for batch in (*self._sent.values(), *queued):
            for waiting in batch.waiting[batch.num_answered :]:
                _resolve(waiting, Answer("infrastructure", "the supervisor died"))
        self._sent.clear()

    def _answered(
        self, number: int, worker: int, count: int, elapsed_s: float, body: bytes
    ) -> None:
        """Hand out answers of a worker, if they are what answers may be."""
        batch = self._sent.get(number)
        if batch is None:  # it was given up
            return
        self._heard[worker] = self._ticks
        seconds = struct.unpack_from(f"<{count}d", body)
        try:
            answers = _checked(wire.loads(body[8 * count :]), count)
        except wire.WireError as error:
            self.kill(worker)
            self._faulted(number, worker, UNKNOWN, "protocol", str(error)[:MAX_DETAIL])
            for other, later in list(self._sent.items()):
                if later.worker == worker:
                    self._faulted(other, worker, 0, "lost", "the worker is gone")
            return
        first = batch.num_answered
        batch.num_answered += count
        self._listener.on_answers(worker, batch.waiting[batch.num_answered - 1].owner)
        for waiting, (status, value), cpu_s in zip(
            batch.waiting[first : batch.num_answered], answers, seconds, strict=True
        ):
            _resolve(waiting, Answer(status, value, cpu_s, elapsed_s))
        if batch.num_answered == len(batch.waiting):
            self._forget(number)

    def _faulted(self, number: int, worker: int, index: int, status: str, detail: str) -> None:
        """A worker is gone: one request of the batch is why, or none, and the others are lost.

        If it is not known which one, all are lost, and the program's are sent one by one from now
        on; each then answers for itself.
        """
        batch = self._forget(number)
        if batch is None:
            return
        self._heard[worker] = self._ticks
        if index == UNKNOWN:
            index = batch.num_answered
            if status not in BLAMELESS and len(batch.waiting) - index > 1:
                self._listener.on_ambiguous(worker)
                status, detail = "lost", "the worker is gone"
        self._listener.on_down(worker, status, detail, idle=False)
        lost = Answer("lost", "the worker is gone")
        for at in range(batch.num_answered, len(batch.waiting)):
            _resolve(batch.waiting[at], Answer(status, detail) if at == index else lost)

    def _forget(self, number: int) -> _Batch | None:
        batch = self._sent.pop(number, None)
        if batch is not None and not self._sent:
            self.busy_s += time.perf_counter() - self._busy_since
        return batch

    def _add(
        self,
        worker: int,
        limit_s: float,
        request: tuple[Any, ...],
        waiting: _Waiting,
        *,
        alone: bool,
    ) -> None:
        num_chars = len(request[-1]) if isinstance(request[-1], str) else 0
        batch = self._queued.get(worker)
        if batch is None or alone or not batch.fits(limit_s, num_chars):
            batch = _Batch(worker, limit_s, self._ticks)
            self._order(batch)
            if not alone:
                self._queued[worker] = batch
            else:
                self._queued.pop(worker, None)
        batch.requests.append(request)
        batch.waiting.append(waiting)
        batch.num_chars += num_chars

    def _order(self, order: bytes | _Batch) -> None:
        """Queue one order; all that is queued in one turn of the loop leaves in one write."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(order)

    def _flush(self) -> None:
        if not self.alive or self._transport is None:
            return  # answered when the connection was lost
        orders = []
        for order in self._outbox:
            if isinstance(order, bytes):
                orders.append(order)
                continue
            self._last_number = self._last_number % 0xFFFFFFFF + 1
            if not self._sent:
                self._busy_since = time.perf_counter()
            self._sent[self._last_number] = order
            head = wire.ORDER.pack(
                wire.ASK, order.worker, len(order.requests), order.limit_s, self._last_number
            )
            orders.append(wire.frame(head, wire.dumps_shallow(order.requests)))
        self._outbox.clear()
        self._queued.clear()
        self._transport.write(b"".join(orders))

    def _tick(self) -> None:
        """Give a supervisor up that keeps a request beyond all bounds of its own.

        Time is counted in ticks, because a trainer that was busy with something else has answers
        lying unread.
        """
        assert self._transport is not None
        self._ticks += 1
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        busy = {batch.worker for batch in self._sent.values()}
        self._heard = {worker: self._heard.get(worker, 0) for worker in busy}
        for batch in self._sent.values():
            heard = max(batch.asked, self._heard[batch.worker])
            if (self._ticks - heard) * _TICK_S > batch.patience_s:
                self._transport.abort()
                return


def _resolve(waiting: _Waiting, answer: Answer) -> None:
    if waiting.future is not None and not waiting.future.done():  # else it was cancelled
        waiting.future.set_result(answer)


def _checked(answers: Any, count: int) -> list[list[Any]]:
    """Answers `[status, value]` as a worker may write them; values are for the pool to judge."""
    if type(answers) is not list or len(answers) != count:
        raise wire.WireError("a reply that is not as many answers as it says")
    for answer in answers:
        if type(answer) is not list or len(answer) != 2:
            raise wire.WireError("an answer that is not [status, value]")
        status, value = answer
        if status != "ok":
            if type(status) is not str or status not in ALIVE:
                raise wire.WireError("an answer with an unknown status")
            if type(value) is not str:
                raise wire.WireError("a fault without a text")
            shown = (c if c.isprintable() else "?" for c in value[:MAX_DETAIL])  # for terminals
            answer[1] = "".join(shown)
    return answers


async def launch(
    settings: Limits, package_path: Sequence[str], weaken: str, listener: Listener
) -> tuple[Link, tier.Sandbox]:
    """Start a supervisor and wait until its zygotes are warm and have tried their walls.

    Raises:
        SandboxError: it cannot be started, or this host does not contain workers and the user has
            not accepted that.
    """
    if sys.platform != "linux":
        raise SandboxError(f"environments run on Linux only; this is {sys.platform}")
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = (
            theirs.fileno(),
            os.getpid(),
            settings.memory_bytes,
            settings.spare_workers,
            settings.pool_memory_bytes,
            settings.max_workers,
            weaken,
            json.dumps(list(package_path)),
        )
        try:
            process = subprocess.Popen(
                limits.command("spade_jax.envs.supervisor", *arguments),
                pass_fds=[theirs.fileno()],
                env=limits.environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C is for the trainer
            )
        except OSError as error:
            ours.close()
            raise SandboxStartError(
                f"the environment supervisor cannot be started: {error}"
            ) from error
    link = Link(process, listener)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    try:
        sandbox = await asyncio.wait_for(link.ready, _START_S)
        if settings.unsafe_sandbox != tier.ACCEPT and (problem := sandbox.refusal()):
            raise SandboxError(problem)
    except TimeoutError as error:
        await link.stop()
        raise SandboxStartError(
            f"the environment supervisor was not ready after {_START_S:g} s"
        ) from error
    except BaseException:
        await link.stop()
        raise
    return link, sandbox
