"""The schedule of coroutines: who is served in which round, whatever the clock says."""

import asyncio
import random
import time

import pytest

from spade_jax.errors import SamplerError
from spade_jax.rollout.scheduler import Scheduler


class Counting:
    """A service that finishes its first `per_round` requests in each round and keeps the rounds."""

    def __init__(self, per_round: int = 100, width: int = 100, round_s: float = 0.0) -> None:
        self.rounds: list[list[str]] = []
        self.dropped: list[str] = []
        self.requests: list[tuple[int, str]] = []
        self.per_round, self.width, self.round_s = per_round, width, round_s

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    def add(self, request: str, order: int) -> None:
        self.requests.append((order, request))
        self.requests.sort()

    async def round(self) -> list[str]:
        await asyncio.sleep(self.round_s)
        names = [name for _, name in self.requests]
        self.rounds.append(names)
        self.requests = self.requests[self.per_round :]
        return names[: self.per_round]

    def drop(self) -> list[str]:
        dropped = [name for _, name in self.requests]
        self.dropped += dropped
        self.requests = []
        return dropped


async def ask(
    scheduler: Scheduler, name: str, times: int, rng: random.Random | None = None, delay: float = 0
) -> str:
    for turn in range(times):
        await scheduler.submit(f"{name}{turn}")
        if rng is not None or delay:
            await asyncio.sleep(delay or rng.random() * 0.01)  # type: ignore[union-attr]
    return name


def test_what_a_round_answered_asks_again_two_rounds_later():
    service = Counting()
    scheduler = Scheduler(service)

    async def main() -> list[str]:
        return await scheduler.run([ask(scheduler, "a", 2), ask(scheduler, "b", 1)])

    assert asyncio.run(main()) == ["a", "b"]
    assert service.rounds == [["a0", "b0"], ["a1"]]  # nothing to do in the round between


def test_environments_step_while_a_round_runs():
    service = Counting(per_round=1, round_s=0.02)
    scheduler = Scheduler(service)
    stepping: set[str] = set()

    async def play(name: str) -> None:
        for turn in range(4):
            await scheduler.submit(f"{name}{turn}")
            stepping.add(name)
            await asyncio.sleep(0.01)
            stepping.discard(name)

    done, whole = [], service.round

    async def watched() -> list[str]:
        before = set(stepping)
        answered = await whole()
        done.append(before - stepping)  # who stepped to the end while this round ran
        return answered

    service.round = watched  # type: ignore[method-assign]
    asyncio.run(scheduler.run([play(name) for name in "abc"]))
    assert len(service.rounds) == 12
    assert sum(map(bool, done)) >= 8


@pytest.mark.parametrize("seed", range(4))
def test_schedule_does_not_depend_on_when_replies_arrive(seed):
    def rounds(rng: random.Random | None) -> list[list[str]]:
        service = Counting(per_round=3)
        scheduler = Scheduler(service)
        members = [ask(scheduler, "abcdef"[i], 1 + i % 3, rng) for i in range(6)]
        asyncio.run(scheduler.run(members))
        return service.rounds

    assert rounds(random.Random(seed)) == rounds(None)


def test_arrival_order_lets_the_fast_go_ahead():
    def rounds(deterministic: bool) -> list[list[str]]:
        service = Counting(per_round=1)
        scheduler = Scheduler(service, deterministic=deterministic)

        async def slow() -> None:
            await asyncio.sleep(0.1)
            await scheduler.submit("slow")

        asyncio.run(scheduler.run([slow(), ask(scheduler, "b", 3)]))
        return service.rounds

    assert rounds(True)[0] == ["slow", "b0"]
    assert rounds(False) == [["b0"], ["b1"], ["b2"], ["slow"]]


def test_no_more_come_at_once_than_a_round_can_take_up():
    service = Counting(width=4)
    scheduler = Scheduler(service)
    asyncio.run(scheduler.run([ask(scheduler, f"{i:02d}-", 1) for i in range(10)]))
    assert [len(names) for names in service.rounds] == [4, 4, 2]


def test_coroutines_that_never_ask():
    service = Counting()
    scheduler = Scheduler(service)

    async def number() -> int:
        return 3

    assert asyncio.run(scheduler.run([number()])) == [3]
    assert asyncio.run(scheduler.run([])) == []
    assert service.rounds == []


@pytest.mark.parametrize("deterministic", [True, False])
def test_first_exception_by_index_is_raised_and_the_rest_are_cancelled(deterministic):
    service, cancelled = Counting(per_round=0), []
    scheduler = Scheduler(service, deterministic=deterministic)

    async def fail(delay: float, error: Exception) -> None:
        await asyncio.sleep(delay)
        raise error

    async def blocked() -> None:
        try:
            await ask(scheduler, "x", 9)
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
        asyncio.run(scheduler.run(coroutines))
    assert cancelled == ["x"]
    assert not service.busy
    service.per_round = 1
    assert asyncio.run(scheduler.run([ask(scheduler, "a", 1)])) == ["a"]


def test_coroutine_cannot_go_on_after_cancellation():
    service, refused = Counting(), []
    scheduler = Scheduler(service)

    async def stubborn() -> None:
        try:
            await scheduler.submit("s0")
        except asyncio.CancelledError:
            try:
                await scheduler.submit("s1")
            except SamplerError as error:
                refused.append(str(error))

    async def fail() -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        asyncio.run(scheduler.run([stubborn(), fail()]))
    assert len(refused) == 1


def test_error_of_the_service_ends_the_run_and_leaves_it_usable():
    service = Counting()
    scheduler = Scheduler(service)

    async def broken() -> list[str]:
        raise RuntimeError("device lost")

    whole, service.round = service.round, broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="device lost"):
        asyncio.run(scheduler.run([ask(scheduler, "a", 1)]))
    assert not scheduler.running and not service.busy
    service.round = whole  # type: ignore[method-assign]
    assert asyncio.run(scheduler.run([ask(scheduler, "a", 1)])) == ["a"]


def test_request_given_up_is_not_answered_and_its_coroutine_goes_on():
    service = Counting(per_round=0)
    scheduler = Scheduler(service)

    async def gives_up() -> str:
        task = asyncio.create_task(scheduler.submit("a0"))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        service.requests = [item for item in service.requests if item[1] != "a0"]
        service.per_round = 1
        await scheduler.submit("a1")
        return "gave up"

    assert asyncio.run(scheduler.run([gives_up(), ask(scheduler, "b", 1)])) == ["gave up", "b"]
    assert any("a1" in names for names in service.rounds)


def test_stopping_ends_all_requests_and_refuses_the_next_ones():
    service, refused = Counting(per_round=0), []
    scheduler = Scheduler(service)

    async def member(name: str) -> str:
        await scheduler.submit(name)
        try:
            await scheduler.submit(f"{name} again")
        except SamplerError as error:
            refused.append(str(error))
        return name

    async def main() -> list[str]:
        asyncio.get_running_loop().call_later(0.02, scheduler.stop)
        return await scheduler.run([member("a"), member("b")])

    assert asyncio.run(main()) == ["a", "b"]
    assert service.dropped == ["a", "b"] and len(refused) == 2
    assert all("stopped" in text for text in refused)
    service.per_round = 1
    assert asyncio.run(scheduler.run([ask(scheduler, "c", 1)])) == ["c"]


def test_cancelling_the_run_cancels_the_coroutines():
    service = Counting(per_round=0)
    scheduler = Scheduler(service)

    async def main() -> None:
        run = asyncio.create_task(scheduler.run([ask(scheduler, "a", 1)]))
        await asyncio.sleep(0.01)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        early = asyncio.create_task(scheduler.run([ask(scheduler, "b", 1)]))
        await asyncio.sleep(0)
        early.cancel()  # before the first round
        with pytest.raises(asyncio.CancelledError):
            await early
        assert not scheduler.running and not service.busy

    asyncio.run(main())


def test_misuse_is_refused():
    service = Counting()
    scheduler = Scheduler(service)

    async def nested() -> None:
        await scheduler.run([ask(scheduler, "inner", 1)])

    async def twice() -> None:
        await asyncio.gather(ask(scheduler, "p", 1), ask(scheduler, "q", 1))

    with pytest.raises(SamplerError, match="outside gather"):
        asyncio.run(scheduler.submit("a"))
    with pytest.raises(SamplerError, match="while another gather runs"):
        asyncio.run(scheduler.run([nested()]))
    with pytest.raises(SamplerError, match="coroutine 1 called generate while"):
        asyncio.run(scheduler.run([ask(scheduler, "a", 1), twice()]))


def test_ten_thousand_coroutines_cost_little_each():
    service = Counting(per_round=64, width=64)
    scheduler = Scheduler(service)
    started = time.process_time()
    asyncio.run(scheduler.run([ask(scheduler, f"{i:05d}-", 2) for i in range(10_000)]))
    per_request = (time.process_time() - started) / 20_000
    assert sum(len(names[:64]) for names in service.rounds) == 20_000
    assert per_request < 1e-3
