"""Drives coroutines that ask a batched service, in rounds that do not depend on the clock.

While round k runs in a thread, the coroutines that round k-1 answered step their environments:

    round       k             k+1            k+2
    device      [A B C D]     [C D E F]      [A' B' ...]       A and B end in round k
    coroutines                 A, B step      (all that round k answered are waited for)

What round k answered asks again, or ends, before round k+2 begins, and is admitted there whenever
its reply came: the schedule is a function of what was sampled. A reply that takes longer than a
round delays round k+2. With `deterministic=False` each round admits what has arrived, and waits
only when there is nothing else to do.
"""

import asyncio
import contextvars
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from spade_jax.errors import SamplerError

Request = TypeVar("Request")

DELAY = 2
"""Rounds from the one that answers a coroutine to the one that admits what it asks next."""


@runtime_checkable
class Service(Protocol[Request]):
    """What serves the requests."""

    @property
    def busy(self) -> bool:
        """Whether it has requests."""
        ...

    @property
    def width(self) -> int:
        """Requests that one round can take up."""
        ...

    def add(self, request: Request, order: int) -> None:
        """Take a request over; the lower its order, the earlier it is served."""
        ...

    async def round(self) -> list[Request]:
        """Do one round; return the requests that are finished."""
        ...

    def drop(self) -> list[Request]:
        """Finish all requests as they are."""
        ...


@dataclass(eq=False)
class _Member:
    """A coroutine, and what it waits for."""

    index: int
    due: int  # round by which it is waited for, while it is elsewhere
    waiting: bool = False
    ended: bool = False


_membership: contextvars.ContextVar[tuple["Scheduler[Any]", _Member] | None]
_membership = contextvars.ContextVar("membership", default=None)


class Scheduler(Generic[Request]):
    """Serves the coroutines of `run`."""

    def __init__(self, service: Service[Request], *, deterministic: bool = True) -> None:
        self._service = service
        self._deterministic = deterministic
        self._running = False
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reset(0)

    def _reset(self, num_members: int) -> None:
        self._round = 0
        self._num_live = num_members
        self._failed = False
        self._elsewhere: Counter[int] = Counter()  # members that are not waiting, by the round due
        # Not yet with the service, by the round due: (index, arrival, request)
        self._arrived: dict[int, list[tuple[int, int, Request]]] = {}
        self._arrivals = count()
        self._futures: dict[int, tuple[asyncio.Future[None], _Member]] = {}  # by id of the request
        self._changed = asyncio.Event()

    @property
    def running(self) -> bool:
        """Whether `run` has coroutines that have not ended."""
        return self._running

    def stop(self) -> None:
        """Finish all requests after the round under way, and refuse those to come in this `run`.

        May be called from any thread.
        """
        if self._loop is None or not self._running:
            return
        self._stopped = True
        self._loop.call_soon_threadsafe(self._changed.set)

    async def run(self, coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run the coroutines to their ends and return their results in order.

        When some raise, no further round is served: once all others wait for the service, they are
        cancelled and awaited, and the exception of the first that failed, by index, is raised.
        """
        if self._running:
            for coroutine in coroutines:
                coroutine.close()
            raise SamplerError(
                f"gather was called with {len(coroutines)} coroutines while another gather runs "
                "on this engine; run one at a time: pass all coroutines to one gather"
            )
        self._reset(len(coroutines))
        self._running, self._stopped = True, False
        self._loop = asyncio.get_running_loop()
        width = max(1, self._service.width)
        # The first rounds can take up no more than the first coroutines: the rest may come later.
        members = [_Member(i, i // width) for i in range(len(coroutines))]
        self._elsewhere.update(member.due for member in members)
        tasks = [
            asyncio.create_task(self._live(member, coroutine))
            for member, coroutine in zip(members, coroutines, strict=True)
        ]
        try:
            while self._num_live and not self._failed:
                await self._serve()
            while self._failed and self._elsewhere:  # no step of an environment is broken off
                await self._change()
            failed = next((task for task in tasks if _has_failed(task)), None)
        finally:
            self._running = False  # a coroutine that outlives its cancellation can ask nothing more
            self._service.drop()  # before anything is awaited, which may be cancelled
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if failed is not None:
            failed.result()
        return [task.result() for task in tasks]

    async def submit(self, request: Request) -> None:
        """Wait until a round has finished `request`; each coroutine of `run` has one at a time."""
        scheduler, member = _membership.get() or (None, None)
        if scheduler is not self or member is None or member.ended or not self._running:
            raise SamplerError(
                "generate was called outside gather; pass the coroutine that calls it to gather"
            )
        if self._stopped:
            raise SamplerError("the engine was stopped; call gather again to go on sampling")
        if member.waiting:
            raise SamplerError(
                f"coroutine {member.index} called generate while its earlier call is still "
                "waiting; await one call before the next, or pass the calls to gather as coroutines"
            )
        answered = asyncio.get_running_loop().create_future()
        arrival = (member.index, next(self._arrivals), request)
        self._arrived.setdefault(member.due, []).append(arrival)
        self._futures[id(request)] = (answered, member)
        self._came(member)
        member.waiting = True
        try:
            await answered
        finally:
            if self._futures.pop(id(request), None) is not None:  # given up before it was answered
                self._left(member, self._round + DELAY)

    async def _live(self, member: _Member, coroutine: Coroutine[Any, Any, Any]) -> Any:
        _membership.set((self, member))
        try:
            return await coroutine
        except BaseException:
            self._failed = True
            raise
        finally:
            member.ended = True
            self._num_live -= 1
            self._came(member)

    def _came(self, member: _Member) -> None:
        """The member is waited for no more: it asks, or it has ended."""
        if not member.waiting:
            self._elsewhere[member.due] -= 1
            if not self._elsewhere[member.due]:
                del self._elsewhere[member.due]
        self._changed.set()

    def _left(self, member: _Member, due: int) -> None:
        """The member no longer waits for the service, and is itself waited for before `due`."""
        member.waiting, member.due = False, due
        if not member.ended:
            self._elsewhere[due] += 1

    async def _serve(self) -> None:
        """Wait for those that are due, take up what they ask, answer what a round finished."""
        await asyncio.sleep(0)  # the loop's other tasks get a turn even if no request finished
        await self._wait()
        if self._failed or not self._num_live:
            return
        if self._stopped:
            self._admit(math.inf)
            self._answer(self._service.drop())
        else:
            self._admit(self._round if self._deterministic else math.inf)
            if self._service.busy:
                self._answer(await self._service.round())
        self._round += 1

    async def _wait(self) -> None:
        """Wait until the next round may begin."""
        while not (self._stopped and self._futures):
            if self._deterministic:
                ready = not any(due <= self._round for due in self._elsewhere)
            else:
                ready = self._service.busy or bool(self._arrived)
            if ready or self._failed or not self._num_live:
                return
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _admit(self, by_round: float) -> None:
        """Hand over what has arrived of those due by a round."""
        due = [round_ for round_ in self._arrived if round_ <= by_round]
        for index, arrival, request in [item for key in due for item in self._arrived.pop(key)]:
            if id(request) in self._futures:  # not given up
                self._service.add(request, index if self._deterministic else arrival)

    def _answer(self, finished: Sequence[Request]) -> None:
        for request in finished:
            answered, member = self._futures.pop(id(request), (None, None))
            if answered is not None and member is not None:
                self._left(member, self._round + DELAY)
                if not answered.done():
                    answered.set_result(None)


def _has_failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
