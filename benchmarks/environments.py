"""What the environment pool costs: starting, stepping, killing, and the memory of workers.

    python benchmarks/environments.py [--rounds 200] [--episodes 100000] [--oversubscribe 4]

Needs nothing beyond the package. Steps are counted by processor time of supervisor and worker; the
trainer's own is shown beside it. Starts are wall times, so run this on a quiet machine: the load
average is printed first. Fresh interpreters and in-process `exec` are measured in the same run.
`--episodes` plays that many, one in twenty of a hostile program, and looks for what is left.
`--oversubscribe N` counts false kills with N busy workers for each processor. The last line is
JSON.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from spade_jax.envs.limits import Limits, cpu_s, state
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Outcome, Reply

COUNTING = '''
import random, re

class CountingEnv:
    """Reach the target by naming numbers."""

    def reset(self, seed):
        self.target, self.total = random.Random(seed).randint(50, 99), 0
        return f"Name numbers that add up to {self.target}.", {}

    def step(self, action):
        found = re.search(r"-?\\d+", action)
        if action == "spin":
            while True: pass
        self.total += int(found.group()) if found else 0
        won = self.total == self.target
        return f"The sum is {self.total}.", float(won), won, False, {}

    def solution(self):
        return [str(self.target)]
'''
BUSY = """
import time

class BusyEnv:
    def reset(self, seed):
        return "start", {}

    def step(self, action):
        end = time.thread_time() + float(action)
        while time.thread_time() < end: pass
        return "done", 0.0, False, False, {}
"""
DEEDS = {
    "spin": "while True: pass",
    "end": "os._exit(0)",
    "fall": "os.abort()",
    "swell": "x = [0]\n        while True: x = x + x",
    "babble": "os.write(10, bytes(range(256)))",
    "raise": "raise KeyError(action)",
    "cheat": "return 'x', 7.0, True, False, {}",
}
HOSTILE = """
import os

class HostileEnv:
    def reset(self, seed):
        return "start", {{}}

    def step(self, action):
        {deed}
        return "x", 0.0, False, False, {{}}
"""


def children(pid: int) -> list[int]:
    """Processes whose parent this one is."""
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:  # it has ended meanwhile
        return []


def below(pid: int) -> list[int]:
    """All processes below one."""
    found = children(pid)
    return found + [p for child in found for p in below(child)]


def used_s(pid: int) -> float:
    """Processor seconds of a process, of those below it, and of those of them that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(used_s, children(pid)))


def supervisor() -> int:
    """The pool's supervisor, the only child of this process while one pool is open."""
    (pid,) = [
        pid
        for pid in children(os.getpid())
        if b"envs.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return pid


def memory_bytes(pid: int, name: str) -> int:
    """A field of smaps_rollup, or the resident size where that may not be read."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except PermissionError:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return 1024 * sum(map(int, re.findall(rf"^{name}\w*:\s+(\d+)", text, re.MULTILINE)))


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of the values lies."""
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def show(name: str, seconds: Sequence[float]) -> None:
    """Print the spread of some times."""
    parts = (f"{word} {1e3 * quantile(seconds, q):8.3f}" for word, q in SPREAD)
    print(f"  {name:34} {'  '.join(parts)}  ms  (n={len(seconds)})")


SPREAD = (("min", 0.0), ("p50", 0.5), ("p95", 0.95), ("max", 1.0))


async def opened(pool: Pool, program: str, seed: int = 0) -> Instance:
    """A new instance, which there must be."""
    instance = await pool.open(program, seed)
    assert not isinstance(instance, Fault), instance
    return instance


async def contained() -> str:
    """What contains the workers here."""
    async with Pool(Limits(spare_workers=0)) as pool:
        return pool.sandbox.line()


async def starts(rounds: int) -> dict[str, float]:
    """Spawn without spare workers, opening on a spare one, reset in a loaded worker."""
    async with Pool(Limits(max_workers=1, spare_workers=0)) as pool:
        start = used_s(supervisor())
        for index in range(rounds):
            await (await opened(pool, COUNTING + f"\n# {index}")).close()
        life_s = (used_s(supervisor()) - start) / rounds
        spawn_s = pool.stats().spawn_s
    show("fork + confine + load", spawn_s)
    print(f"  processor time from fork to reaping, reset included: {1e3 * life_s:.2f} ms")
    spare_s: list[float] = []
    reset_s: list[float] = []
    async with Pool(Limits(max_workers=1, spare_workers=3)) as pool:
        for index in range(rounds):
            while sum(len(children(zygote)) for zygote in children(supervisor())) < 6:
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.005)
            start = time.perf_counter()
            instance = await opened(pool, COUNTING + f"\n# {index}")
            spare_s.append(time.perf_counter() - start)
            await instance.close()
            start = time.perf_counter()
            instance = await opened(pool, COUNTING + f"\n# {index}")
            reset_s.append(time.perf_counter() - start)
            await instance.close()
    show("open on a spare: load + reset", spare_s)
    show("reset in a loaded worker", reset_s)
    return {
        "spawn_p50_ms": 1e3 * quantile(spawn_s, 0.5),
        "spawn_p95_ms": 1e3 * quantile(spawn_s, 0.95),
        "spare_p50_ms": 1e3 * quantile(spare_s, 0.5),
    }


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Have this process, and what it starts meanwhile, on one core.

    A step in flight wakes supervisor and worker once each. On cores that are idle otherwise, that
    is mostly the time to get one out of its sleep, which a virtual machine charges to the woken.
    """
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


async def steps(num_instances: int, num_steps: int) -> float:
    """Steps per second of processor time of supervisor and worker, best of three."""
    best = 0.0
    async with Pool(Limits(spare_workers=0)) as pool:
        instances = [await opened(pool, COUNTING, seed) for seed in range(num_instances)]
        sandbox = [supervisor(), *below(supervisor())]

        async def play(instance: Instance, count: int) -> None:
            for _ in range(count):
                assert isinstance(await instance.step("0"), Reply)

        await asyncio.gather(*(play(instance, 20) for instance in instances))
        for _ in range(3):
            start, trainer = sum(map(cpu_s, sandbox)), time.process_time()
            wall = time.perf_counter()
            await asyncio.gather(*(play(instance, num_steps) for instance in instances))
            total = num_steps * num_instances
            used_s = (sum(map(cpu_s, sandbox)) - start) / total
            trainer_s = (time.process_time() - trainer) / total
            wall_s = (time.perf_counter() - wall) / total
            print(
                f"  step, {num_instances:2} in flight: {1e6 * used_s:6.1f} us of sandbox = "
                f"{1 / used_s:8.0f} a second and core; trainer {1e6 * trainer_s:6.1f} us; "
                f"wall {1e6 * wall_s:6.1f} us"
            )
            best = max(best, 1 / used_s)
    return best


async def kills(rounds: int) -> float:
    """How long after a limit of 100 ms a spinning program's fault is there, 95th percentile."""
    late_s: list[float] = []
    async with Pool(Limits(step_s=0.1)) as pool:
        for index in range(rounds):
            instance = await opened(pool, COUNTING + f"\n# {index}")
            start = time.perf_counter()
            fault = await instance.step("spin")
            late_s.append(time.perf_counter() - start - 0.1)
            assert isinstance(fault, Fault), fault
            assert fault.outcome is Outcome.TIMEOUT, fault
    show("killed after a limit of 100 ms", late_s)
    return 1e3 * quantile(late_s, 0.95)


async def memory(num_workers: int) -> float:
    """Private bytes of an idle worker with a loaded program, the median."""
    async with Pool(Limits(max_workers=num_workers, spare_workers=0)) as pool:
        for index in range(num_workers):
            await opened(pool, COUNTING + f"\n# {index}")
        workers = [p for zygote in children(supervisor()) for p in children(zygote)]
        private = statistics.median(memory_bytes(pid, "Private_") for pid in workers)
        size = memory_bytes(supervisor(), "Rss")
    print(
        f"  private memory of an idle worker {private / 2**20:.2f} MB; supervisor {size >> 20} MB"
    )
    return private / 2**20


def others(rounds: int) -> None:
    """Print what the usual ways cost."""
    command = [sys.executable, "-c", COUNTING + "\nCountingEnv().reset(1)"]
    context = multiprocessing.get_context("spawn")
    fresh_s, spawn_s, exec_s, step_s = [], [], [], []
    for _ in range(max(5, rounds // 20)):
        start = time.perf_counter()
        subprocess.run(command, check=True)
        fresh_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        process = context.Process(target=int)
        process.start()
        process.join()
        spawn_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        module: dict[str, Any] = {}
        exec(COUNTING, module)
        environment = module["CountingEnv"]()
        environment.reset(1)
        exec_s.append(time.perf_counter() - start)
        start = time.process_time()
        for _ in range(1000):
            environment.step("0")
        step_s.append((time.process_time() - start) / 1000)
    show("fresh python -c", fresh_s)
    show("multiprocessing spawn", spawn_s)
    show("exec in this process (no walls)", exec_s)
    show("step in this process (no walls)", step_s)


async def soak(num_episodes: int) -> dict[str, float]:
    """Play many episodes, one in twenty hostile, two of each bad program; count what is left."""
    names = sorted(DEEDS)
    files = set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))

    async def episode(pool: Pool, index: int) -> bool:
        if index % 20 == 19:
            deed = DEEDS[names[index // 40 % len(names)]]
            instance = await opened(pool, HOSTILE.format(deed=deed) + f"\n# {index // 40}", index)
            bad = not isinstance(await instance.step("x"), Fault)
        else:
            instance = await opened(pool, COUNTING + f"\n# {index // 640}", index)
            replies = [await instance.step(action) for action in ("1", "2", "3")]
            bad = any(isinstance(reply, Fault) for reply in replies)
        await instance.close()
        return bad

    limits = Limits(step_s=0.25, memory_bytes=64 * 2**20)
    wrong, size, start = 0, 0, time.perf_counter()
    async with Pool(limits) as pool:
        for first in range(0, num_episodes, 64):
            last = min(first + 64, num_episodes)
            wrong += sum(await asyncio.gather(*(episode(pool, i) for i in range(first, last))))
            if first < 6400:  # warm
                size = memory_bytes(supervisor(), "Rss")
        await asyncio.sleep(0.5)  # workers that made room end a little later
        grown = memory_bytes(supervisor(), "Rss") - size
        num_processes = len(below(supervisor())) - 2 - 16 - 4
        ours = [supervisor(), *below(supervisor())]
        faults = {str(outcome): count for outcome, count in pool.stats().faults.items()}
    await asyncio.sleep(0.5)
    left = sum(Path(f"/proc/{pid}").exists() for pid in ours)
    new = set(os.listdir("/dev/shm")) - files[0]
    descriptors = len(os.listdir("/proc/self/fd")) - files[1]
    print(
        f"  {num_episodes} episodes in {time.perf_counter() - start:.0f} s: {wrong} went wrong, "
        f"faults {faults}; supervisor grew {grown / 2**20:.1f} MB, {max(0, num_processes)} "
        f"processes too many, {left} left, {len(new)} files, {descriptors} descriptors"
    )
    leaked = max(0, num_processes) + left + len(new) + max(0, descriptors)
    return {"soak_wrong": wrong, "soak_leaked": leaked, "soak_grown_mb": grown / 2**20}


async def oversubscribed(factor: int, num_steps: int) -> dict[str, float]:
    """Keep `factor` workers for each processor busy with honest steps, and count those killed.

    One step in a hundred takes two fifths of its limit in processor time, which is more than the
    limit in wall time here; the others take a hundredth of it.
    """
    limit_s = 0.05
    num_workers = factor * len(os.sched_getaffinity(0))
    length = -(-num_steps // (num_workers * 32))
    runnable: list[int] = []

    async def play(pool: Pool, index: int, seed: int) -> Fault | None:
        instance = await pool.open(BUSY + f"\n# {index}", seed)
        if isinstance(instance, Fault):
            return instance
        for count in range(length):
            share = 0.4 if (count + seed) % 100 == 0 else 0.01
            reply = await instance.step(str(share * limit_s))
            if isinstance(reply, Fault):
                return reply
        await instance.close()
        return None

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.1)
            workers = [p for zygote in children(supervisor()) for p in children(zygote)]
            runnable.append(sum(state(pid) == "R" for pid in workers))

    async with Pool(Limits(step_s=limit_s, max_workers=num_workers)) as pool:
        watcher, start = asyncio.create_task(watch()), time.perf_counter()
        plays = (play(pool, i, seed) for i in range(num_workers) for seed in range(32))
        faults = [fault for fault in await asyncio.gather(*plays) if fault is not None]
        watcher.cancel()
        stats = pool.stats()
    total = num_workers * 32 * length
    print(
        f"  {num_workers} workers, {statistics.mean(runnable):.1f} of them runnable on average: "
        f"{len(faults)} faults in {total} honest steps, {len(faults) * length} steps void, "
        f"{stats.retries} requests made again, {stats.rebuilt} instances rebuilt, "
        f"{time.perf_counter() - start:.0f} s"
    )
    for fault in faults[:5]:
        print(f"    {fault}")
    return {"false_kills_per_100k": 1e5 * len(faults) / total}


def main() -> None:
    """Measure, and print the goals."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1000, help="of each instance")
    parser.add_argument("--episodes", type=int, default=0)
    parser.add_argument("--oversubscribe", type=int, default=0)
    parser.add_argument("--oversubscribed-steps", type=int, default=100_000)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} processors, load average {os.getloadavg()[0]:.1f}")
    print(asyncio.run(contained()))
    values = asyncio.run(starts(arguments.rounds))
    asyncio.run(steps(1, arguments.steps))
    print("  the same with all processes on one core, which is what the goal is about:")
    with one_core():
        values["single_steps_per_s"] = asyncio.run(steps(1, arguments.steps))
    values["batched_steps_per_s"] = asyncio.run(steps(32, arguments.steps // 4))
    values["kill_late_p95_ms"] = asyncio.run(kills(max(10, arguments.rounds // 4)))
    values["worker_private_mb"] = asyncio.run(memory(16))
    others(arguments.rounds)
    if arguments.episodes:
        values |= asyncio.run(soak(arguments.episodes))
    if arguments.oversubscribe:
        values |= asyncio.run(
            oversubscribed(arguments.oversubscribe, arguments.oversubscribed_steps)
        )
    at_least: dict[str, float] = {"single_steps_per_s": 10_000, "batched_steps_per_s": 100_000}
    at_most: dict[str, float] = {
        "spawn_p50_ms": 5.0,
        "spawn_p95_ms": 8.0,
        "spare_p50_ms": 2.0,
        "kill_late_p95_ms": 50.0,
        "worker_private_mb": 4.0,
        "soak_wrong": 0,
        "soak_leaked": 0,
        "soak_grown_mb": 50.0,
        "false_kills_per_100k": 0.99,  # fewer than one
    }
    goals = []
    for name, value in values.items():
        goal = at_least[name] if name in at_least else at_most[name]
        holds = value >= goal if name in at_least else value <= goal
        goals.append({"name": name, "value": round(value, 4), "goal": goal, "holds": holds})
    print(json.dumps({"goals": goals}))


if __name__ == "__main__":
    main()
