"""One life of the supervisor process, seen from the trainer: numbered requests out, answers in.

It knows nothing of programs or instances. When the process is gone every waiting request is
answered as a fault of the infrastructure; starting another one is for the pool.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from spade_jax.envs import limits, wire
from spade_jax.envs.supervisor import MAX_STRETCH, READY
from spade_jax.errors import SandboxError

_START_S = 120.0  # for the import of numpy on a crowded machine
_STOP_S = 5.0
_SILENCE_S = 120.0  # more than the supervisor lets pass before it answers for a worker
_TICK_S = 5.0
_NOBODY = 0  # request number of what no coroutine waits for


class Answer(NamedTuple):
    """What became of a request: "ok" with its value, or an outcome (or "lost") with a text."""

    status: str
    value: Any


class _Waiting(NamedTuple):
    future: asyncio.Future[Answer]
    owner: Any
    worker: int
    patience_s: float
    asked: int  # tick


class Link(asyncio.Protocol):
    """A running supervisor.

    `on_answer(worker, owner, answer)` sees every answer before its requester does; the owner is
    `IDLE` in the notice that an idle worker went down.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        on_answer: Callable[[int, Any, Answer], None],
        on_lost: Callable[["Link"], None],
    ) -> None:
        self.process = process
        self.alive = True
        self.ready = asyncio.get_running_loop().create_future()
        self._on_answer = on_answer
        self._on_lost = on_lost
        self._decoder = wire.Decoder()
        self._waiting: dict[int, _Waiting] = {}
        self._heard: dict[int, int] = {}  # tick at which a worker last answered
        self._ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._last_number = _NOBODY
        self._outbox: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def send(self, *message: Any) -> None:
        """Queue one message; all that is queued in one turn of the loop leaves in one write."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(wire.encode(message))

    def ask(self, worker: int, owner: Any, limit_s: float, *body: Any) -> asyncio.Future[Answer]:
        """Send a request to a worker on behalf of `owner`; the future never raises."""
        future = asyncio.get_running_loop().create_future()
        if not self.alive:
            future.set_result(Answer("infrastructure", "the supervisor died"))
            return future
        self._last_number += 1
        self.send("ask", self._last_number, worker, limit_s, body)
        patience_s = MAX_STRETCH * limit_s + _SILENCE_S
        self._waiting[self._last_number] = _Waiting(future, owner, worker, patience_s, self._ticks)
        return future

    def tell(self, worker: int, limit_s: float, *body: Any) -> None:
        """Send a request whose answer nobody waits for."""
        self.send("ask", _NOBODY, worker, limit_s, body)

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

    def data_received(self, data: bytes) -> None:
        for number, worker, status, value in self._decoder.feed(data):
            if worker == READY:
                if status == "ok":
                    self.ready.set_result(None)
                else:
                    self.ready.set_exception(
                        SandboxError(f"environments cannot run on this host: {value}")
                    )
                continue
            answer = Answer(status, value)
            self._heard[worker] = self._ticks
            waiting = self._waiting.pop(number, None)
            self._on_answer(worker, number if waiting is None else waiting.owner, answer)
            if waiting is not None and not waiting.future.done():  # else it was cancelled
                waiting.future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost(self)
        if not self.ready.done():
            self.ready.set_exception(
                SandboxError("the environment supervisor ended while starting; see above")
            )
        for waiting in self._waiting.values():
            if not waiting.future.done():
                waiting.future.set_result(Answer("infrastructure", "the supervisor died"))
        self._waiting.clear()

    def _tick(self) -> None:
        """Give a supervisor up that keeps a request beyond all bounds of its own.

        Time is counted in ticks, because a trainer that was busy with something else has answers
        lying unread.
        """
        assert self._transport is not None
        self._ticks += 1
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        busy = {waiting.worker for waiting in self._waiting.values()}
        self._heard = {worker: self._heard.get(worker, 0) for worker in busy}
        for waiting in self._waiting.values():
            heard = max(waiting.asked, self._heard[waiting.worker])
            if (self._ticks - heard) * _TICK_S > waiting.patience_s:
                self._transport.abort()
                return

    def _flush(self) -> None:
        if self.alive and self._transport is not None:
            self._transport.write(b"".join(self._outbox))
        self._outbox.clear()


async def launch(
    memory_bytes: int,
    package_path: Sequence[str],
    on_answer: Callable[[int, Any, Answer], None],
    on_lost: Callable[[Link], None],
) -> Link:
    """Start a supervisor and wait until its zygotes are warm.

    Raises:
        SandboxError: it cannot be started.
    """
    if sys.platform != "linux":
        raise SandboxError(f"environments run on Linux only; this is {sys.platform}")
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = (theirs.fileno(), os.getpid(), memory_bytes, json.dumps(list(package_path)))
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
            raise SandboxError(f"the environment supervisor cannot be started: {error}") from error
    link = Link(process, on_answer, on_lost)
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
    try:
        await asyncio.wait_for(link.ready, _START_S)
    except TimeoutError as error:
        await link.stop()
        raise SandboxError(
            f"the environment supervisor was not ready after {_START_S:g} s"
        ) from error
    except BaseException:
        await link.stop()
        raise
    return link
