"""Lockstep: coroutines that ask a batched service, answered in rounds that ignore the clock.

A round starts only when every unfinished coroutine is waiting for the service. Replies awaited from
elsewhere (an environment) are thus all in before the round, whatever order they came in, and
requests are served in the order of the coroutines. A slow environment delays the round; admitting
in arrival order is deliberately not here.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from spade_jax.errors import SamplerError

Request = TypeVar("Request")

_membership: contextvars.ContextVar[tuple["Lockstep[Any]", int] | None]
_membership = contextvars.ContextVar("membership", default=None)


class Lockstep(Generic[Request]):
    """Serve coroutines in rounds.

    `serve` gets all waiting requests, in coroutine order, and returns those it has finished.
    """

    def __init__(self, serve: Callable[[list[Request]], list[Request]]) -> None:
        self._serve = serve
        self._live: set[int] = set()  # coroutines that have not ended
        self._waiting: dict[int, tuple[Request, asyncio.Future[None]]] = {}
        self._blocked = asyncio.Event()  # every live coroutine is waiting

    @property
    def running(self) -> bool:
        """Whether `run` has coroutines that have not ended."""
        return bool(self._live)

    async def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run the coroutines to their ends and return their results in order.

        When some raise, no further round is served: once all others wait for the service, they are
        cancelled and awaited, and the exception of the first that failed, by index, is raised.
        """
        if self.running:
            for coroutine in coroutines:
                coroutine.close()
            raise SamplerError(
                f"gather was called with {len(coroutines)} coroutines while another gather runs "
                "on this engine; run one at a time: pass all coroutines to one gather"
            )
        self._live = set(range(len(coroutines)))
        self._blocked = asyncio.Event()
        tasks = [asyncio.create_task(self._member(i, each)) for i, each in enumerate(coroutines)]
        failed: asyncio.Task[Any] | None = None
        try:
            while self._live:
                await self._barrier()
                failed = next((task for task in tasks if _has_failed(task)), None)
                if failed is not None:
                    break
                self._round()
        finally:
            self._live.clear()  # a coroutine that outlives its cancellation can ask nothing more
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failed is not None:
            failed.result()
        return [task.result() for task in tasks]

    async def submit(self, request: Request) -> None:
        """Wait until a round has finished `request`; each coroutine of `run` has one at a time."""
        member, index = _membership.get() or (None, -1)
        if member is not self or index not in self._live:
            raise SamplerError(
                "generate was called outside gather; pass the coroutine that calls it to gather"
            )
        if index in self._waiting:
            raise SamplerError(
                f"coroutine {index} called generate while its earlier call is still waiting; "
                "await one call before the next, or pass the calls to gather as coroutines"
            )
        finished = asyncio.get_running_loop().create_future()
        self._waiting[index] = (request, finished)
        self._check_blocked()
        try:
            await finished
        finally:
            self._waiting.pop(index, None)

    async def _member(self, index: int, coroutine: Coroutine[Any, Any, Any]) -> Any:
        _membership.set((self, index))
        try:
            return await coroutine
        finally:
            self._live.discard(index)
            self._check_blocked()

    def _all_blocked(self) -> bool:
        # A future that is done belongs to a coroutine that has been cancelled and is about to run.
        waiting = sum(not finished.done() for _, finished in self._waiting.values())
        return waiting == len(self._live)

    def _check_blocked(self) -> None:
        if self._all_blocked():
            self._blocked.set()

    async def _barrier(self) -> None:
        """Wait until every live coroutine waits for the service."""
        await asyncio.sleep(0)  # the loop's other tasks get a turn even if no request finished
        while not self._all_blocked():  # a waiter may withdraw after the event was set
            self._blocked.clear()
            await self._blocked.wait()

    def _round(self) -> None:
        requests = [self._waiting[index][0] for index in sorted(self._waiting)]
        if not requests:
            return
        finished = {id(request) for request in self._serve(requests)}
        for index in sorted(self._waiting):
            request, future = self._waiting[index]
            if id(request) in finished:
                del self._waiting[index]
                future.set_result(None)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
