import asyncio
import random

import pytest

from spade_jax.errors import SamplerError
from spade_jax.rollout.scheduler import Lockstep


class Counting:
    """A service that finishes the first `width` requests of a round, and logs every round."""

    def __init__(self, width: int = 2) -> None:
        self.rounds: list[list[str]] = []
        self.lockstep: Lockstep[str] = Lockstep(self.serve)
        self.width = width

    def serve(self, requests: list[str]) -> list[str]:
        self.rounds.append(list(requests))
        return requests[: self.width]


async def ask(service: Counting, name: str, times: int, rng: random.Random | None = None) -> str:
    for turn in range(times):
        await service.lockstep.submit(f"{name}{turn}")
        if rng is not None:
            await asyncio.sleep(rng.random() * 0.01)
    return name


def test_rounds_are_in_coroutine_order():
    service = Counting()
    result = asyncio.run(
        service.lockstep.run([ask(service, "a", 2), ask(service, "b", 1), ask(service, "c", 1)])
    )
    assert result == ["a", "b", "c"]
    assert service.rounds == [["a0", "b0", "c0"], ["a1", "c0"]]


@pytest.mark.parametrize("seed", range(4))
def test_schedule_does_not_depend_on_when_replies_arrive(seed):
    def rounds(rng: random.Random | None) -> list[list[str]]:
        service = Counting(width=3)
        asyncio.run(
            service.lockstep.run([ask(service, "abcdef"[i], 1 + i % 3, rng) for i in range(6)])
        )
        return service.rounds

    assert rounds(random.Random(seed)) == rounds(None)


def test_round_waits_for_a_coroutine_that_is_elsewhere():
    service = Counting()

    async def late() -> None:
        await asyncio.sleep(0.02)
        await service.lockstep.submit("late")

    asyncio.run(service.lockstep.run([late(), ask(service, "a", 1)]))
    assert service.rounds == [["late", "a0"]]


def test_coroutines_that_never_ask():
    service = Counting()

    async def number() -> int:
        return 3

    assert asyncio.run(service.lockstep.run([number()])) == [3]
    assert asyncio.run(service.lockstep.run([])) == []
    assert service.rounds == []


def test_first_exception_by_index_is_raised_and_the_rest_are_cancelled():
    service, cancelled = Counting(), []

    async def fail(delay: float, error: Exception) -> None:
        await asyncio.sleep(delay)
        raise error

    async def blocked() -> None:
        try:
            await ask(service, "x", 9)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # cleaning up may take a while and is awaited
            cancelled.append("x")
            raise

    coroutines = [
        blocked(),
        fail(0.01, ValueError("slow, first")),
        fail(0.0, KeyError("fast, second")),
    ]
    with pytest.raises(ValueError, match="slow, first"):
        asyncio.run(service.lockstep.run(coroutines))
    assert cancelled == ["x"]
    assert service.rounds == []
    assert asyncio.run(service.lockstep.run([ask(service, "a", 1)])) == ["a"]


def test_coroutine_cannot_go_on_after_cancellation():
    service, refused = Counting(), []

    async def stubborn() -> None:
        try:
            await service.lockstep.submit("s0")
        except asyncio.CancelledError:
            try:
                await service.lockstep.submit("s1")
            except SamplerError as error:
                refused.append(str(error))

    async def fail() -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        asyncio.run(service.lockstep.run([stubborn(), fail()]))
    assert len(refused) == 1


def test_error_of_the_service_ends_the_run_and_leaves_it_usable():
    service = Counting()

    def broken(requests: list[str]) -> list[str]:
        raise RuntimeError("device lost")

    lockstep: Lockstep[str] = Lockstep(broken)
    service.lockstep = lockstep
    with pytest.raises(RuntimeError, match="device lost"):
        asyncio.run(lockstep.run([ask(service, "a", 1)]))
    assert not lockstep.running


def test_request_given_up_is_not_served():
    service = Counting(width=0)

    def serve(requests: list[str]) -> list[str]:
        service.rounds.append(list(requests))
        if len(service.rounds) == 3:
            task.cancel()  # no round may serve it before the coroutine's next step
        return [r for r in requests if r == "b0" and len(service.rounds) > 4]

    service.lockstep = Lockstep(serve)
    task: asyncio.Task[None]

    async def gives_up() -> str:
        nonlocal task
        task = asyncio.create_task(service.lockstep.submit("a0"))
        try:
            await task
        except asyncio.CancelledError:
            return "gave up"
        return "served"

    assert asyncio.run(service.lockstep.run([gives_up(), ask(service, "b", 1)])) == ["gave up", "b"]
    assert service.rounds == [["a0", "b0"]] * 3 + [["b0"]] * 2


def test_cancelling_the_run_cancels_the_coroutines():
    service = Counting(width=0)

    async def main() -> None:
        run = asyncio.create_task(service.lockstep.run([ask(service, "a", 1)]))
        await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        early = asyncio.create_task(service.lockstep.run([ask(service, "b", 1)]))
        await asyncio.sleep(0)
        early.cancel()  # before the first round
        with pytest.raises(asyncio.CancelledError):
            await early
        assert not service.lockstep.running

    asyncio.run(main())


def test_misuse_is_refused():
    service = Counting()

    async def nested() -> None:
        await service.lockstep.run([ask(service, "inner", 1)])

    async def twice() -> None:
        await asyncio.gather(ask(service, "p", 1), ask(service, "q", 1))

    with pytest.raises(SamplerError, match="outside gather"):
        asyncio.run(service.lockstep.submit("a"))
    with pytest.raises(SamplerError, match="while another gather runs"):
        asyncio.run(service.lockstep.run([nested()]))
    with pytest.raises(SamplerError, match="coroutine 1 called generate while"):
        asyncio.run(service.lockstep.run([ask(service, "a", 1), twice()]))
