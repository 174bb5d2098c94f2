"""One life of the supervisor process, seen from the trainer: numbered requests out, answers in.

It knows nothing of programs or instances. When the process is gone every waiting request is
answered as a fault of the infrastructure; starting another one is for the pool.
"""

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

from spade_jax.envs import limits, wire
from spade_jax.envs.supervisor import READY
from spade_jax.errors import SandboxError

_START_S = 120.0  # for the import of numpy on a crowded machine
_STOP_S = 5.0
_NOBODY = 0  # request number of what no coroutine waits for


class Answer(NamedTuple):
    """What became of a request: "ok" with its value, or an outcome (or "lost") with a text."""

    status: str
    value: Any


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
        self._waiting: dict[int, tuple[asyncio.Future[Answer], Any]] = {}
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
        self._waiting[self._last_number] = (future, owner)
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

    def data_received(self, data: bytes) -> None:
        for number, worker, status, value in self._decoder.feed(data):
            if worker == READY:
                self.ready.set_result(None)
                continue
            answer = Answer(status, value)
            future, owner = self._waiting.pop(number, (None, number))
            self._on_answer(worker, owner, answer)
            if future is not None and not future.done():  # its requester may have been cancelled
                future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        self._on_lost(self)
        if not self.ready.done():
            self.ready.set_exception(
                SandboxError("the environment supervisor ended while starting; see above")
            )
        for future, _ in self._waiting.values():
            if not future.done():
                future.set_result(Answer("infrastructure", "the supervisor died"))
        self._waiting.clear()

    def _flush(self) -> None:
        if self.alive and self._transport is not None:
            self._transport.write(b"".join(self._outbox))
        self._outbox.clear()


async def launch(
    memory_bytes: int,
    on_answer: Callable[[int, Any, Answer], None],
    on_lost: Callable[[Link], None],
) -> Link:
    """Start a supervisor and wait until its zygotes are warm.

    Raises:
        SandboxError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = (theirs.fileno(), os.getpid(), memory_bytes)
        try:
            process = subprocess.Popen(
                limits.command("spade_jax.envs.supervisor", *arguments),
                pass_fds=[theirs.fileno()],
                env=limits.ENVIRONMENT,
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
