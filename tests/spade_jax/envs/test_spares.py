"""Workers before their program and after it: the rehearsal of the spare ones, and their end."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from spade_jax.envs import worker
from spade_jax.envs.limits import Limits, state
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Reply

LOOKING = """
import os, re

class LookingEnv:
    def reset(self, seed):
        classes = {found.__name__ for found in object.__subclasses__()}
        return f"{'-?[0-9]+' in str(re._cache)} {'RehearsalEnv' in classes}"

    def step(self, action):
        return str(os.getpid()), 0.0, False, False, {}
"""


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def zygotes() -> list[int]:
    return children(children(os.getpid())[-1])  # of the pool that was started last


async def opened(pool: Pool, program: str, replica: int = 0) -> Instance:
    instance = await pool.open(program, 1, replica)
    assert not isinstance(instance, Fault), instance
    return instance


async def told_pid(instance: Instance) -> int:
    reply = await instance.step("")
    assert isinstance(reply, Reply), reply
    return int(reply.observation)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it has not come true in ten seconds")


def test_a_spare_worker_has_rehearsed_and_no_class_of_it_is_left():
    def at_rest() -> bool:
        spares = [pid for zygote in zygotes() for pid in children(zygote)]
        return len(spares) == 2 and all(state(pid) == "S" for pid in spares)

    async def play() -> str:
        async with Pool(Limits(spare_workers=1)) as pool:
            await until(at_rest)
            await asyncio.sleep(0.5)  # more than it waits before it rehearses
            await until(at_rest)
            return (await opened(pool, LOOKING)).observation

    assert asyncio.run(play()) == "True False"


def test_the_rehearsal_is_a_program_like_others(shared):
    async def play() -> Reply | Fault:
        instance = await opened(shared.pool, worker._REHEARSAL)
        assert instance.observation.startswith("Name numbers")
        actions = await instance.solution()
        assert isinstance(actions, list)
        return await instance.step(actions[0])

    reply = shared.run(play())
    assert isinstance(reply, Reply)
    assert (reply.reward, reply.terminated) == (1.0, True)


def test_a_worker_is_woken_once_a_step(shared, seen_pid):
    def times_slept(pid: int) -> int:
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

    async def play() -> float:
        instance = await opened(shared.pool, LOOKING)
        told = await told_pid(instance)
        pid = seen_pid(told)
        start = times_slept(pid)
        for _ in range(300):
            assert await told_pid(instance) == told
        slept = times_slept(pid) - start
        await instance.close()
        return slept / 300

    assert shared.run(play()) < 1.5


def test_a_worker_that_makes_room_ends_after_its_successor_has_loaded(seen_pid):
    async def play() -> None:
        async with Pool(Limits(max_workers=1, spare_workers=0)) as pool:
            instance = await opened(pool, LOOKING)
            pid = seen_pid(await told_pid(instance))
            await instance.close()
            await asyncio.sleep(0.2)  # that it is closed has been answered: nothing is asked of it
            instance = await opened(pool, LOOKING + "\n# another")
            successor = seen_pid(await told_pid(instance))
            await until(
                lambda: [p for zygote in zygotes() for p in children(zygote)] == [successor]
            )
            assert state(pid) == "?"
            assert seen_pid(await told_pid(instance)) == successor

    asyncio.run(play())


def test_zygotes_may_die_with_workers_that_were_making_room(seen_pid):
    async def play() -> None:
        async with Pool(Limits(max_workers=1, spare_workers=0)) as pool:
            old = zygotes()
            supervisors = children(os.getpid())
            for index in range(6):
                instance = await opened(pool, LOOKING + f"\n# {index}", index % 2)
                await instance.close()
                await asyncio.sleep(0.05)
            await opened(pool, LOOKING + "\n# last")  # the one before it is still there
            for zygote in old:
                os.kill(zygote, signal.SIGKILL)
            await until(lambda: len(zygotes()) == 2 and not set(zygotes()) & set(old))
            instance = await opened(pool, LOOKING)
            pid = seen_pid(await told_pid(instance))
            await until(lambda: [p for zygote in zygotes() for p in children(zygote)] == [pid])
            assert children(os.getpid()) == supervisors

    asyncio.run(play())
