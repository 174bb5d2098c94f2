"""The verdict on a missed deadline, and what is left when processes of ours are killed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.envs.supervisor import judge
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
        (1.0, 1.0, "R", "timeout"),  # it had its time
        (1.0, 0.5, "R", "timeout"),
        (1.0, 0.49, "R", "wait"),  # the host kept it from running
        (1.0, 0.0, "D", "wait"),
        (9.9, 0.1, "R", "wait"),
        (10.0, 0.1, "R", "infrastructure"),
        (1.0, 0.0, "S", "timeout"),  # sleeping is its own choice
        (1.0, 0.0, "T", "timeout"),  # so is stopping
        (1.0, 0.0, "Z", "timeout"),
        (1.0, 3.0, "S", "timeout"),
    ],
)
def test_missed_deadline(elapsed_s: float, cpu_s: float, state: str, verdict: str):
    assert judge(elapsed_s, cpu_s, state, 1.0) == verdict


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
        async with Pool(Limits()) as pool:
            instances = [await pool.open(COUNTER, seed) for seed in range(3)]
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
            replies = await asyncio.gather(*(instance.step("b") for instance in instances))
            if victim == "worker":  # while idle: the last one that it answered takes the blame
                assert isinstance(replies[2], Fault)
                assert replies[2].outcome is Outcome.WORKER_DIED
                assert "SIGKILL" in replies[2].detail
                del replies[2]
            for seed, reply in enumerate(replies):
                assert reply == Reply(f"{seed} 2 b", 0.0, False, False)
            assert pool.stats().rebuilt == len(replies)

    asyncio.run(play())
    assert descendants(os.getpid()) <= before


TRAINER = """
import asyncio
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool

async def main():
    pool = Pool(Limits(step_s=60))
    await pool.start()
    instance = await pool.open({program!r}, 1)
    asyncio.ensure_future(instance.step("hang"))
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("victim", ["trainer", "supervisor"])
def test_no_process_outlives_a_killed_parent(victim: str, descendants, all_gone):
    program = COUNTER.replace("self.count += 1", "while True: pass")
    command = [sys.executable, "-c", TRAINER.format(program=program)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "ready\n"
            below = descendants(trainer.pid)
            assert len(below) == 4  # supervisor, two zygotes, worker
            if victim == "supervisor":
                os.kill(by_module(below, "supervisor")[0], signal.SIGKILL)
                # The trainer is idle and may start another; only the old ones must be gone.
                assert all_gone(below)
        finally:
            trainer.kill()
    assert all_gone(below)


def test_a_fault_of_ours_that_repeats_is_told():
    """Until system calls are filtered, a program can kill its zygote."""
    deed = "os.kill(os.getppid(), 9); time.sleep(9)"
    program = "import os, time\n" + COUNTER.replace("self.count += 1", deed)

    async def play() -> None:
        async with Pool(Limits()) as pool:
            instance = await pool.open(program, 1)
            assert not isinstance(instance, Fault)
            fault = await instance.step("x")
            assert isinstance(fault, Fault)
            assert fault.outcome is Outcome.INFRASTRUCTURE
            other = await pool.open(COUNTER, 1)
            assert not isinstance(other, Fault)
            assert await other.step("x") == Reply("1 1 x", 0.0, False, False)

    asyncio.run(play())
