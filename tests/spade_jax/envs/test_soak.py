"""Many episodes, some of them hostile: nothing is left behind, and no honest one suffers."""

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Outcome, Reply

HONEST = """
import random

class SumEnv:
    def reset(self, seed):
        self.rng, self.total = random.Random(seed), 0
        return f"seed {seed}", {}

    def step(self, action):
        self.total += self.rng.randint(1, 9) * len(action)
        work = sum(i * i for i in range(200))
        return f"{self.total} {work}", 0.0, False, False, {}
"""
HOSTILE = {
    "spin": ("while True: pass", Outcome.TIMEOUT),
    "end": ("os._exit(0)", Outcome.WORKER_DIED),
    "fall": ("os.abort()", Outcome.WORKER_DIED),
    "swell": ("x = [0]\n        while True: x = x + x", Outcome.ENV_ERROR),
    "babble": ("os.write(10, bytes(range(256)))", Outcome.PROTOCOL),
    "raise": ("raise KeyError(action)", Outcome.ENV_ERROR),
    "lie": ("return 'x', 7.0, True, False, {}", Outcome.SCHEMA),
}


def hostile(name: str, index: int) -> str:
    return f"""
import os

class HostileEnv{index}Env:
    def reset(self, seed):
        return "start", {{}}

    def step(self, action):
        {HOSTILE[name][0]}
        return "x", 0.0, False, False, {{}}
"""


def expected(seed: int, actions: list[str]) -> list[Reply]:
    rng, total, replies = random.Random(seed), 0, []
    for action in actions:
        total += rng.randint(1, 9) * len(action)
        work = sum(i * i for i in range(200))
        replies.append(Reply(f"{total} {work}", 0.0, False, False))
    return replies


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def supervisor_of(pids: set[int]) -> int:
    command = b"from spade_jax.envs.supervisor import main"
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    ours = [pid for pid in map(int, children) if pid in pids]  # it ends only with its pool
    (found,) = [pid for pid in ours if command in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return found


@pytest.mark.slow
def test_two_thousand_episodes_leave_nothing_behind(descendants, all_gone):
    """One in twenty is hostile, each program in two episodes; all run in waves of fifty."""
    before, num_open = descendants(os.getpid()), num_descriptors(os.getpid())
    shared_memory, temporary = os.listdir("/dev/shm"), os.listdir("/tmp")
    actions = ["a", "bb", "ccc"]
    names = sorted(HOSTILE)

    async def episode(pool: Pool, index: int) -> None:
        name = names[index // 40 % len(names)]
        bad = index % 20 == 19
        program = hostile(name, index // 40) if bad else HONEST + f"\n# {index % 8}"
        instance = await pool.open(program, index)
        assert not isinstance(instance, Fault), instance
        if bad:
            fault = await instance.step("x")
            assert isinstance(fault, Fault)
            assert fault.outcome is HOSTILE[name][1], fault
        else:
            replies = [await instance.step(action) for action in actions]
            assert replies == expected(index, actions)
        await instance.close()

    async def play() -> None:
        limits = Limits(
            step_s=0.25, memory_bytes=64 * 2**20, max_workers=8, instances_per_worker=16
        )
        async with Pool(limits) as pool:
            await asyncio.gather(*(episode(pool, index) for index in range(200)))
            supervisor = supervisor_of(descendants(os.getpid()) - before)
            size, num_files = resident(supervisor), num_descriptors(supervisor)
            for start in range(200, 2000, 50):
                await asyncio.gather(*(episode(pool, i) for i in range(start, start + 50)))
            stats = pool.stats()
            assert stats.instances == 2000
            assert sum(stats.faults.values()) == 100
            assert Outcome.INFRASTRUCTURE not in stats.faults
            give_up = time.monotonic() + 10.0  # workers that made room end a little later
            while len(descendants(os.getpid()) - before) > 3 + 8 + 4 + 4:
                assert time.monotonic() < give_up
                await asyncio.sleep(0.02)
            assert resident(supervisor) - size < 10 * 2**20
            # Each worker has three descriptors; the spares may be at another number than before.
            assert num_descriptors(supervisor) <= num_files + 3 * (8 + 4)
            ours = descendants(os.getpid()) - before
        assert all_gone(ours)

    asyncio.run(play())
    assert descendants(os.getpid()) <= before
    assert num_descriptors(os.getpid()) == num_open
    assert os.listdir("/dev/shm") == shared_memory
    assert {name for name in set(os.listdir("/tmp")) - set(temporary) if "spade" in name} == set()


def test_a_crowded_host_kills_no_honest_step(descendants):
    """Four times as many busy workers as processors, each step with a limit that the wait for a
    processor passes many times over."""
    num_workers = 4 * len(os.sched_getaffinity(0))
    program = HONEST.replace("range(200)", "range(60_000)")

    async def play(pool: Pool, index: int) -> None:
        for seed in range(4):
            instance = await pool.open(program + f"\n# {index}", seed)
            assert not isinstance(instance, Fault), instance
            for _ in range(5):
                assert isinstance(await instance.step("x"), Reply)
            await instance.close()

    async def crowd() -> None:
        limits = Limits(load_s=5, reset_s=5, step_s=0.05, max_workers=num_workers)
        async with Pool(limits) as pool:
            await asyncio.gather(*(play(pool, index) for index in range(num_workers)))
            stats = pool.stats()
            assert (stats.faults, stats.rebuilt, stats.retries) == ({}, 0, 0)
            assert stats.steps == 20 * num_workers

    asyncio.run(crowd())


def test_a_worker_that_is_killed_costs_one_retry_and_changes_no_result(descendants):
    before = descendants(os.getpid())
    actions = ["a", "bb", "ccc", "dddd"]
    program = "import time\n" + HONEST.replace("work =", "time.sleep(0.3)\n        work =")

    async def play() -> None:
        async with Pool(Limits(step_s=30, spare_workers=0)) as pool:
            instance = await pool.open(program, 5)
            assert not isinstance(instance, Fault)
            replies = [await instance.step(action) for action in actions[:2]]
            step = asyncio.ensure_future(instance.step(actions[2]))
            await asyncio.sleep(0.1)
            ours = descendants(os.getpid()) - before
            supervisor = supervisor_of(ours)
            zygotes = descendants(supervisor) - set().union(
                *map(descendants, descendants(supervisor))
            )
            (worker,) = set().union(*map(descendants, zygotes))
            os.kill(worker, signal.SIGKILL)
            replies += [await step, await instance.step(actions[3])]
            assert replies == expected(5, actions)
            stats = pool.stats()
            assert (stats.retries, stats.rebuilt, stats.faults) == (1, 1, {})
            assert pool.state() == {"offences": {}}

    asyncio.run(play())
