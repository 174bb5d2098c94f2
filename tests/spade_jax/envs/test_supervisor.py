"""The verdict on a missed deadline, and what is left when processes of ours are killed."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spade_jax.envs import link as link_module
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Instance, Pool
from spade_jax.envs.verdicts import judge
from spade_jax.errors import SandboxError
from spade_jax.types import Fault, Outcome, Reply

ROOT = Path(__file__).resolve().parents[3]
COUNTER = """
class CounterEnv:
    def reset(self, seed):
        self.seed, self.count = seed, 0
        return f"start {seed}"

    def step(self, action):
        self.count += 1
        return f"{self.seed} {self.count} {action}", 0.0, False, False, {}
"""


@pytest.mark.parametrize(
    ("elapsed_s", "cpu_s", "state", "verdict"),
    [
        (1.0, 1.01, "R", "timeout"),  # it had its time
        (1.0, 0.99, "R", "wait"),  # the host kept it from running
        (5.0, 0.5, "R", "wait"),
        (9.0, 1.01, "R", "timeout"),
        (1.0, 0.0, "?", "wait"),  # not known to be at fault
        (40.0, 0.0, "?", "infrastructure"),
        (1.0, 0.0, "D", "wait"),
        (39.9, 0.1, "R", "wait"),
        (40.0, 0.1, "R", "infrastructure"),
        (1.0, 0.0, "S", "timeout"),  # sleeping is its own choice
        (1.0, 0.0, "T", "timeout"),  # so is stopping
        (1.0, 0.0, "Z", "timeout"),
        (1.0, 3.0, "S", "timeout"),
    ],
)
def test_missed_deadline(elapsed_s: float, cpu_s: float, state: str, verdict: str):
    assert judge(elapsed_s, cpu_s, state, 1.0) == verdict


async def opened(pool: Pool, program: str, seed: int) -> Instance:
    instance = await pool.open(program, seed)
    assert not isinstance(instance, Fault), instance
    return instance


def by_module(pids: set[int], module: str) -> list[int]:
    """Those of the processes whose command line starts `module`; a worker has its zygote's."""
    command = f"from spade_jax.envs.{module} import main".encode()
    return sorted(pid for pid in pids if command in Path(f"/proc/{pid}/cmdline").read_bytes())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victim", ["supervisor", "zygote", "worker"])
def test_pool_survives_the_loss_of_a_process(victim: str, descendants, all_gone):
    before = descendants(os.getpid())

    async def play() -> None:
        async with Pool(Limits(spare_workers=0)) as pool:
            instances = [await opened(pool, COUNTER, seed) for seed in range(3)]
            for instance in instances:
                assert isinstance(instance.observation, str)
                await instance.step("a")
            ours = descendants(os.getpid()) - before
            supervisor, *rest = by_module(ours, "supervisor")
            assert not rest
            zygotes = [p for p in by_module(ours, "zygote") if parent(p) == supervisor]
            workers = [p for p in ours if parent(p) in zygotes]
            assert len(zygotes) == 2
            assert len(workers) == 1
            targets = {"supervisor": [supervisor], "zygote": zygotes, "worker": workers}[victim]
            below = set().union(*map(descendants, targets)) | set(targets)
            for pid in targets:
                os.kill(pid, signal.SIGKILL)
            assert all_gone(below)
            link = pool._link
            assert link is not None
            replies = await asyncio.gather(*(instance.step("b") for instance in instances))
            for seed, reply in enumerate(replies):
                assert reply == Reply(f"{seed} 2 b", 0.0, False, False)
            stats = pool.stats()
            assert (stats.rebuilt, stats.faults) == (3, {})
            for replica in (0, 1):  # both zygotes are up again
                assert not isinstance(await pool.open(COUNTER + "#", 1, replica), Fault)
            assert isinstance(await instances[0].step("c"), Reply)
            assert (pool._link is link and link.alive) == (victim != "supervisor")

    asyncio.run(play())
    assert descendants(os.getpid()) <= before


def supervisor_of(below: set[int]) -> int:
    (found,) = by_module(below, "supervisor")
    return found


def test_a_step_that_the_kernel_killed_is_tried_again(descendants):
    before = descendants(os.getpid())
    program = "import os, time\n" + COUNTER.replace("self.count += 1", "time.sleep(0.5)")

    async def play() -> None:
        async with Pool(Limits(step_s=20, spare_workers=0)) as pool:
            instance = await opened(pool, program, 1)
            step = asyncio.ensure_future(instance.step("x"))
            await asyncio.sleep(0.1)
            ours = descendants(os.getpid()) - before
            zygotes = by_module(ours, "zygote")
            (worker,) = [pid for pid in ours if parent(pid) in zygotes]
            os.kill(worker, signal.SIGKILL)
            assert await step == Reply("1 0 x", 0.0, False, False)
            assert pool.stats().faults == {}

    asyncio.run(play())


def test_who_goes_down_between_requests_is_to_blame():
    """A worker that no request waits for was the last one's that it answered."""
    deed = "self.count += 1; signal.setitimer(signal.ITIMER_REAL, 0.05)"
    program = "import signal\n" + COUNTER.replace("self.count += 1", deed)

    async def play() -> None:
        async with Pool(Limits()) as pool:
            guilty, other = await opened(pool, program, 1), await opened(pool, program, 2)
            assert isinstance(await guilty.step("x"), Reply)
            while not pool.stats().faults:
                await asyncio.sleep(0.01)
            text = "the process ended with signal SIGALRM"
            assert await guilty.step("y") == Fault(Outcome.WORKER_DIED, text)
            assert isinstance(await other.step("x"), Reply)

    asyncio.run(play())


def test_processor_time_decides_about_replies_that_come_late(descendants):
    """A stopped supervisor stands for a crowded host: it reads the replies when all is done."""
    before = descendants(os.getpid())
    burn = (
        "end = time.process_time() + float(action)\n        while time.process_time() < end: pass"
    )
    program = "import time\n" + COUNTER.replace("self.count += 1", burn)

    async def play() -> None:
        async with Pool(Limits(step_s=0.4)) as pool:
            instances = [await opened(pool, program, seed) for seed in range(4)]
            supervisor = supervisor_of(descendants(os.getpid()) - before)

            async def steps(*actions: str) -> list[Reply | Fault]:
                playing = asyncio.gather(
                    *(i.step(a) for i, a in zip(instances, actions, strict=False))
                )
                await asyncio.sleep(0.1)
                os.kill(supervisor, signal.SIGSTOP)
                await asyncio.sleep(1.2)
                os.kill(supervisor, signal.SIGCONT)
                return await playing

            replies = await steps("0.25", "0.25", "0.25")  # together more than the limit
            assert replies == [Reply(f"{i} 0 0.25", 0.0, False, False) for i in range(3)]
            replies = await steps("0.25", "0.6", "0.25")
            assert replies[0] == Reply("0 0 0.25", 0.0, False, False)
            assert replies[1] == Fault(Outcome.TIMEOUT, "no reply within the limit of 0.4 s")
            assert replies[2] == Reply("2 0 0.25", 0.0, False, False)

    asyncio.run(play())


def test_a_worker_that_cannot_be_written_to_is_ended():
    deed = "socket.socket(fileno=10).shutdown(socket.SHUT_RD); time.sleep(60)"
    program = "import socket, time\n" + COUNTER.replace("self.count += 1", deed)

    async def play() -> None:
        async with Pool(Limits(step_s=20)) as pool:
            first, second = await opened(pool, program, 1), await opened(pool, program, 2)
            step = asyncio.ensure_future(first.step("x"))
            await asyncio.sleep(0.2)
            closing = asyncio.ensure_future(second.step("y"))
            assert await step == Fault(Outcome.WORKER_DIED, "it closed its channel")
            closing.cancel()

    start = time.monotonic()
    asyncio.run(play())
    assert time.monotonic() - start < 15  # far from the limit of the step


def test_a_supervisor_that_no_longer_answers_is_replaced(descendants, monkeypatch):
    monkeypatch.setattr(link_module, "_SILENCE_S", 2.0)
    monkeypatch.setattr(link_module, "_TICK_S", 0.05)
    monkeypatch.setattr(link_module, "_STOP_S", 0.1)
    before = descendants(os.getpid())

    async def play() -> None:
        async with Pool(Limits(step_s=0.05)) as pool:
            instance = await pool.open(COUNTER, 1)
            assert not isinstance(instance, Fault)
            os.kill(supervisor_of(descendants(os.getpid()) - before), signal.SIGSTOP)
            assert await instance.step("x") == Reply("1 1 x", 0.0, False, False)

    asyncio.run(play())
    assert descendants(os.getpid()) <= before


def test_supervisor_and_zygotes_may_open_few_files(descendants):
    before = descendants(os.getpid())

    async def play() -> None:
        async with Pool(Limits(spare_workers=0)):
            ours = descendants(os.getpid()) - before
            assert len(ours) == 3
            for pid in ours:
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE)[0] <= 1024

    asyncio.run(play())


def test_hundreds_of_workers_are_born_and_ended_at_once():
    """More words than a zygote's control holds, and more descriptors than usual."""
    number = 320

    async def play() -> None:
        limits = Limits(max_workers=number, spare_workers=0, load_s=60, reset_s=60)
        async with Pool(limits) as pool:
            for turn in range(2):  # the second lot takes the places of the first
                programs = [f"{COUNTER}# {turn} {index}\n" for index in range(number)]
                opened = await asyncio.gather(*(pool.open(text, 1) for text in programs))
                instances = [each for each in opened if not isinstance(each, Fault)]
                assert len(instances) == number, opened
                await asyncio.gather(*(each.close() for each in instances))
            assert pool.stats().retries == 0

    asyncio.run(play())


def test_more_workers_than_there_may_be_files_are_refused():
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    async def start() -> None:
        async with Pool(Limits(max_workers=hard)):
            pass

    with pytest.raises(SandboxError, match=f"and {hard} are allowed"):
        asyncio.run(start())


TRAINER = """
import asyncio, os
from pathlib import Path
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool

def num_processes(pid=os.getpid()):
    children = Path(f"/proc/{{pid}}/task/{{pid}}/children").read_text().split()
    return 1 + sum(map(num_processes, map(int, children)))

async def main():
    pool = Pool(Limits(step_s=60))
    await pool.start()
    instance = await pool.open({program!r}, 1)
    asyncio.ensure_future(instance.step("hang"))
    await asyncio.sleep(0.2)
    while num_processes() < 9:
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["trainer", "supervisor", "zygote"])
def test_no_process_outlives_a_killed_parent_by_two_seconds(victim: str, descendants, all_gone):
    program = COUNTER.replace("self.count += 1", "while True: pass")
    command = [sys.executable, "-c", TRAINER.format(program=program)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "ready\n"
            below = descendants(trainer.pid)
            (supervisor,) = by_module(below, "supervisor")
            zygotes = [pid for pid in by_module(below, "zygote") if parent(pid) == supervisor]
            workers = {pid for pid in below if parent(pid) in zygotes}
            assert (len(below), len(zygotes), len(workers)) == (8, 2, 5)  # four are spares
            if victim == "supervisor":
                os.kill(supervisor, signal.SIGKILL)
                # The trainer may start another; only the old ones must be gone.
                assert all_gone(below, 2)
            elif victim == "zygote":
                for pid in zygotes:
                    os.kill(pid, signal.SIGKILL)
                assert all_gone(workers | set(zygotes), 2)
        finally:
            trainer.kill()
    assert all_gone(below, 2)


def test_a_fault_of_ours_that_repeats_is_told(descendants, all_gone):
    before = descendants(os.getpid())
    program = "import time\n" + COUNTER.replace("self.count += 1", "time.sleep(60)")

    async def play() -> None:
        async with Pool(Limits(step_s=100, spare_workers=0)) as pool:
            instance = await opened(pool, program, 1)
            supervisor = supervisor_of(descendants(os.getpid()) - before)
            step = asyncio.ensure_future(instance.step("x"))
            for _ in range(2):  # as often as it is tried
                while (worker := instance._worker) is None or not worker.loaded.done():
                    await asyncio.sleep(0.02)
                await asyncio.sleep(0.2)
                below = descendants(supervisor)
                for zygote in [pid for pid in below if parent(pid) == supervisor]:
                    os.kill(zygote, signal.SIGKILL)
                assert all_gone(below)
                while instance._worker is worker:
                    await asyncio.sleep(0.02)
            fault = await step
            assert isinstance(fault, Fault)
            assert fault.outcome is Outcome.INFRASTRUCTURE
            other = await opened(pool, COUNTER, 1)
            assert await other.step("x") == Reply("1 1 x", 0.0, False, False)

    asyncio.run(play())
