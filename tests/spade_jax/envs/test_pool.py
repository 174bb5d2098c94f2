import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spade_jax.envs import limits as limits_module
from spade_jax.envs.api import MAX_ACTION_CHARS
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.errors import SandboxError, SandboxStartError
from spade_jax.types import Fault, Outcome, Reply

ROOT = Path(__file__).resolve().parents[3]

WALK = """
import os, random, time

class WalkEnv:
    made = 0

    def __init__(self):
        WalkEnv.made += 1

    def reset(self, seed):
        self.rng, self.place, self.seed = random.Random(seed), 0, seed
        return f"seed {seed} pid {PID}", {}

    def step(self, action):
        if action == "hang":
            time.sleep(60)
        if action == "die":
            os._exit(1)
        if action == "raise":
            raise RuntimeError("asked to")
        if action == "length":
            return str(len(action)), 0.0, False, False, {}
        self.place += self.rng.randint(1, 9)
        return f"{action}: at {self.place}", self.place / 1000, False, False, {}

    def solution(self):
        return [f"walk {self.seed}"]
"""
QUIET = WALK.replace(" pid {PID}", "")  # the same transcript in every worker
TELLING = WALK.replace("{PID}", "{os.getpid()}")


async def opened(pool: Pool, program: str, seed: int, replica: int = 0):
    instance = await pool.open(program, seed, replica)
    assert not isinstance(instance, Fault), instance
    return instance


def pid(instance) -> str:
    return instance.observation.split()[-1]


def test_step_solution_and_error(shared):
    async def play() -> None:
        pool = shared.pool
        pool.stats()
        instance = await opened(pool, QUIET, 5)
        assert instance.observation == "seed 5"
        assert await instance.solution() == ["walk 5"]
        import random

        rng, place = random.Random(5), 0
        for action in ("a", "ü\ud800\n", ""):
            place += rng.randint(1, 9)
            reply = await instance.step(action)
            if action == "ü\ud800\n":  # an observation that repeats a lone surrogate is refused
                assert isinstance(reply, Fault)
                assert reply.outcome is Outcome.SCHEMA
                break
            assert reply == Reply(f"{action}: at {place}", place / 1000, False, False)
        other = await opened(pool, QUIET, 6)
        fault = await other.step("raise")
        assert fault == Fault(Outcome.ENV_ERROR, "step: RuntimeError: asked to")
        assert await other.solution() == fault
        stats = pool.stats()
        assert stats.faults == {Outcome.SCHEMA: 1, Outcome.ENV_ERROR: 1}
        assert stats.spawned == 1
        assert stats.requests == 7  # load, reset, solution, two steps, reset, step
        assert pool.stats().requests == 0

    shared.run(play())


def test_actions_are_cut(shared):
    async def play() -> None:
        echo = QUIET.replace('if action == "length"', "if True")
        instance = await opened(shared.pool, echo, 1)
        reply = await instance.step("☃" * (MAX_ACTION_CHARS + 5))
        assert isinstance(reply, Reply)
        assert reply.observation == str(MAX_ACTION_CHARS)
        await instance.close()

    shared.run(play())


def test_instances_share_a_worker_up_to_the_limit_and_are_separate_objects(shared):
    async def play() -> None:
        instances = await asyncio.gather(*(opened(shared.pool, TELLING, 3) for _ in range(9)))
        pids = [pid(instance) for instance in instances]
        assert sorted(map(pids.count, set(pids))) == [1, 8]
        replies = await asyncio.gather(*(instance.step("x") for instance in instances))
        assert len(set(replies)) == 1
        for instance in instances:
            await instance.close()
            await instance.close()

    shared.run(play())


@pytest.mark.parametrize(("cause", "outcome"), [("hang", "timeout"), ("die", "worker_died")])
def test_innocent_instances_are_rebuilt_where_they_were(shared, cause: str, outcome: str):
    async def play() -> None:
        pool = shared.pool
        quiet = QUIET + f"\n# {cause}"
        instances = [await opened(pool, quiet, seed) for seed in range(4)]
        twins = [await opened(pool, quiet, seed, replica=1) for seed in range(4)]
        for action in "ab":
            for instance in (*instances, *twins):
                await instance.step(action)
        pool.stats()
        guilty, *innocent = instances
        # One request is in the guilty one's queue when the worker goes down, two come later.
        fault, reply = await asyncio.gather(guilty.step(cause), innocent[0].step("c"))
        assert isinstance(fault, Fault)
        assert fault.outcome == outcome
        replies = [reply, await innocent[1].step("c"), await innocent[2].step("c")]
        assert replies == [await twin.step("c") for twin in twins[1:]]
        assert await innocent[0].solution() == ["walk 1"]
        stats = pool.stats()
        assert (stats.rebuilt, stats.spawned) == (3, 1)
        assert stats.faults == {Outcome(outcome): 1}
        for instance in (*innocent, *twins):
            await instance.close()

    shared.run(play())


def test_all_guilty_ones_are_found_in_turn(shared):
    async def play() -> None:
        instances = [await opened(shared.pool, QUIET + "# die", seed) for seed in range(6)]
        actions = ["die", "x", "die", "die", "x", "die"]
        replies = await asyncio.gather(
            *(i.step(action) for i, action in zip(instances, actions, strict=True))
        )
        for action, reply in zip(actions, replies, strict=True):
            assert isinstance(reply, Fault) == (action == "die"), reply
        for instance in instances:
            await instance.close()

    shared.run(play())


def test_a_rebuild_that_goes_otherwise_is_a_fault(shared):
    async def play() -> None:
        guilty = await opened(shared.pool, TELLING, 1)
        innocent = await opened(shared.pool, TELLING, 2)
        assert isinstance(await guilty.step("die"), Fault)
        fault = await innocent.step("x")
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.ENV_ERROR
        assert "not deterministic: reset" in fault.detail

    shared.run(play())


def test_replicas_are_children_of_different_zygotes(shared, seen_pid):
    def parent(instance) -> int:
        about = Path(f"/proc/{seen_pid(int(pid(instance)))}/stat").read_text()
        return int(about.rpartition(")")[2].split()[1])

    async def play() -> None:
        here = await opened(shared.pool, TELLING, 1)
        there = await opened(shared.pool, TELLING, 1, replica=1)
        assert pid(here) != pid(there)  # a program that goes by it fails replay
        assert parent(here) != parent(there)
        await here.close()
        await there.close()

    shared.run(play())


def test_idle_workers_are_evicted_oldest_first_and_busy_ones_waited_for(shared):
    """The shared pool holds four workers."""

    def variant(index: int) -> str:
        return TELLING + f"\n# eviction {index}"

    async def play() -> None:
        pool = shared.pool
        instances = [await opened(pool, variant(index), 1) for index in range(4)]
        waiting = asyncio.ensure_future(opened(pool, variant(4), 1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await instances[2].close()
        late = await waiting
        assert late.observation.startswith("seed 1")
        await instances[1].close()
        await instances[0].close()
        pool.stats()
        again = await opened(pool, variant(0), 1)  # still there: worker 1 was left earlier
        newcomer = await opened(pool, variant(5), 1)  # takes the place of worker 1
        assert pid(again) == pid(instances[0])
        assert pool.stats().spawned == 1
        for instance in (again, newcomer, late, instances[3]):
            await instance.close()

    shared.run(play())


def test_a_failed_load_is_told_to_all_who_wait_and_leaves_no_worker(shared):
    async def play() -> None:
        pool = shared.pool
        pool.stats()
        source = "import time\ntime.sleep(0.05)\nraise ValueError('no')"
        faults = await asyncio.gather(*(pool.open(source, seed) for seed in range(5)))
        assert {fault.outcome for fault in faults} == {Outcome.ENV_ERROR}
        assert pool.stats().spawned == 1
        assert await pool.load(source) == faults[0]
        assert pool.stats().spawned == 1
        assert await pool.load(QUIET) is None

    shared.run(play())


def test_a_cancelled_step_ends_its_instance_only(shared):
    async def play() -> None:
        instance = await opened(shared.pool, QUIET, 1)
        other = await opened(shared.pool, QUIET, 2)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(instance.step("hang"), 0.05)
        assert isinstance(await instance.step("x"), Fault)
        assert isinstance(await other.step("x"), Reply)
        await other.close()

    shared.run(play())


def test_different_workers_run_at_the_same_time():
    async def play() -> float:
        nap = QUIET.replace("time.sleep(60)", "time.sleep(1)")
        async with Pool(Limits(step_s=20)) as pool:
            instances = [await opened(pool, nap + f"# {index}", 1) for index in range(4)]
            start = time.perf_counter()
            replies = await asyncio.gather(*(instance.step("hang") for instance in instances))
            assert all(isinstance(reply, Reply) for reply in replies), replies
            return time.perf_counter() - start

    assert asyncio.run(play()) < 3.5  # one after the other they take 4 s


def test_an_answer_larger_than_a_socket_holds(shared):
    source = QUIET.replace('f"{action}: at {self.place}"', "'é' * 100_000")

    async def play() -> None:
        instances = [await opened(shared.pool, source, 1) for _ in range(8)]
        replies = await asyncio.gather(*(i.step("x" * MAX_ACTION_CHARS) for i in instances))
        for reply in replies:
            assert isinstance(reply, Reply)
            assert reply.observation == "é" * 100_000
        for instance in instances:
            await instance.close()

    shared.run(play())


def processor_s(descendants) -> float:
    """Of this process and all below it."""
    return time.process_time() + sum(map(limits_module.cpu_s, descendants(os.getpid())))


def test_a_step_costs_little(shared, descendants):
    """A third of the goals for processor time, type checks included: a step must not wait for a
    clock, nor cost a message of its own."""

    async def play(seed: int) -> None:
        instance = await opened(shared.pool, QUIET + f"# {seed % 4}", seed)
        for _ in range(50):
            assert isinstance(await instance.step("x"), Reply)
        await instance.close()

    async def gather() -> float:
        start = processor_s(descendants)
        await asyncio.gather(*map(play, range(32)))
        return 32 * 50 / (processor_s(descendants) - start)

    assert shared.run(gather()) > 1000


def test_a_pool_that_does_not_run_raises():
    async def use(pool: Pool) -> None:
        with pytest.raises(SandboxError, match="not running"):
            await pool.open(QUIET, 1)

    asyncio.run(use(Pool(Limits())))


def test_a_pool_that_cannot_start_says_so(monkeypatch, capfd):
    monkeypatch.setattr(limits_module, "_BOOT", "import sys; sys.exit(3)  # {}")

    async def start() -> None:
        with pytest.raises(SandboxStartError, match="supervisor ended while starting"):
            await Pool(Limits()).start()

    asyncio.run(start())
    monkeypatch.setattr(limits_module.sys, "executable", "/nonexistent/python")
    with pytest.raises(SandboxStartError, match="cannot be started"):
        asyncio.run(Pool(Limits()).start())


def patched(statement: str) -> str:
    """A boot line that runs `statement` on `limits`, in the supervisor and in what it starts."""
    before = f"from spade_jax.envs import limits; {statement}; "
    again = f"limits._BOOT = limits._BOOT.replace('from', {before + 'from'!r}, 1); "
    return limits_module._BOOT.replace("from", before + again + "from", 1)


def test_a_host_that_hides_its_processes_is_named(monkeypatch):
    boot = patched("limits._PROC = limits.Path('/nonexistent')")
    monkeypatch.setattr(limits_module, "_BOOT", boot)

    async def start() -> None:
        with pytest.raises(SandboxError, match=r"/nonexistent/self/task/\d+/children is missing"):
            await Pool(Limits()).start()

    asyncio.run(start())


def test_a_host_that_is_not_linux_is_named(monkeypatch):
    async def start() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "platform", "darwin")
            with pytest.raises(SandboxError, match="Linux only; this is darwin"):
                await Pool(Limits()).start()

    asyncio.run(start())


BURN = QUIET.replace('if action == "length"', 'if action.startswith("burn")').replace(
    "return str(len(action))",
    "end = time.process_time() + float(action[5:])\n"
    "            while time.process_time() < end: pass\n"
    "            return 'burnt'",
)


def test_a_worker_that_hits_the_cap_of_its_life_is_nobodys_fault(monkeypatch):
    monkeypatch.setattr(limits_module, "_BOOT", patched("limits.CPU_S = 1"))
    burnt = Reply("burnt", 0.0, False, False)

    async def play() -> None:
        async with Pool(Limits(step_s=5)) as pool:
            instances = [await opened(pool, BURN, seed) for seed in range(3)]
            # Together they pass the cap, in the middle of the last one's step.
            replies = await asyncio.gather(*(i.step("burn 0.4") for i in instances))
            assert replies == [burnt] * 3
            stats = pool.stats()
            assert (stats.faults, stats.spawned, stats.rebuilt) == ({}, 2, 1)

    asyncio.run(play())


def test_a_worker_past_half_of_its_life_gets_no_new_instance(monkeypatch, all_gone, seen_pid):
    monkeypatch.setattr(limits_module, "_BOOT", patched("limits.CPU_S = 1"))
    source = BURN.replace('f"seed {seed}"', "str(os.getpid())")

    async def play() -> None:
        async with Pool(Limits(step_s=5)) as pool:
            old, young = await opened(pool, source, 1), await opened(pool, source, 2)
            assert young.observation == old.observation
            worker = seen_pid(int(old.observation))
            assert isinstance(await old.step("burn 0.6"), Reply)
            assert isinstance(await young.step("x"), Reply)  # those in it stay
            new = await opened(pool, source, 3)
            assert new.observation != old.observation
            stats = pool.stats()
            assert (stats.spawned, stats.rebuilt) == (2, 0)
            await old.close()
            assert isinstance(await young.step("x"), Reply)
            await young.close()
            await new.step("x")
            assert all_gone({worker})

    asyncio.run(play())


def test_close_leaves_nothing_even_while_a_program_hangs(descendants):
    before = descendants(os.getpid())
    num_open = len(os.listdir("/proc/self/fd"))

    async def play() -> None:
        async with Pool(Limits()) as pool:
            instance = await opened(pool, QUIET, 1)
            hanging = asyncio.ensure_future(instance.step("hang"))
            await asyncio.sleep(0.05)
        with pytest.raises(SandboxError):
            await hanging

    asyncio.run(play())
    assert descendants(os.getpid()) <= before
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_import_loads_no_jax():
    code = (
        "import sys, spade_jax.envs, spade_jax.envs.admit; "
        "print(sorted({'jax', 'flax', 'optax'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_program_that_is_no_text_is_a_fault(shared):
    source = QUIET + "# \ud800"
    fault = shared.run(shared.pool.open(source, 1))
    assert isinstance(fault, Fault)
    assert fault.outcome is Outcome.SCHEMA
    assert "surrogate" in fault.detail
    assert shared.run(shared.pool.load(source)) == fault


def test_a_program_that_kills_its_worker_is_tried_twice(shared):
    """The kernel kills in the same way for want of memory, whoever used it."""
    source = QUIET.replace("os._exit(1)", "os.kill(os.getpid(), 9)")

    async def play() -> None:
        instance = await opened(shared.pool, source, 1)
        shared.pool.stats()
        fault = await instance.step("die")
        text = "the process ended with signal SIGKILL"
        assert fault == Fault(Outcome.WORKER_DIED, text)
        stats = shared.pool.stats()
        assert (stats.spawned, stats.rebuilt) == (1, 1)

    shared.run(play())


def test_a_program_whose_instances_all_kill_their_worker_is_the_programs_fault(shared):
    async def play(seed: int) -> None:
        instance = await opened(shared.pool, QUIET + "# all die", seed)
        fault = await instance.step("die")
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.WORKER_DIED

    async def gather() -> None:
        await asyncio.gather(*map(play, range(30)))

    shared.run(gather())
