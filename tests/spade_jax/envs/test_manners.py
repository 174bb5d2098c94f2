"""How the pool deals with programs over time: who is blamed, quarantine, budgets, spare workers."""

import asyncio
import os

import pytest

from spade_jax.envs.limits import Limits, Purse
from spade_jax.envs.pool import Instance, Pool
from spade_jax.types import Fault, Outcome, Reply

MIXED = """
import os, struct, sys, time

class MixedEnv:
    def reset(self, seed):
        self.count, self.kept = 0, []
        return f"pid {PID}", {}

    def step(self, action):
        word, _, number = action.partition(" ")
        if word == "hang":
            while True: pass
        if word == "die":
            os._exit(1)
        if word == "raise":
            raise ValueError("asked to")
        if word == "burn":
            end = time.process_time() + float(number)
            while time.process_time() < end: pass
        if word == "keep":
            self.kept.append(bytearray(os.urandom(1024)) * (1024 * int(number)))
        if word == "garbage":
            os.write(10, b"x" * 100)
        if word == "break":
            import builtins
            builtins.all = None
        if word == "lie":  # on the page of progress, for ever
            progress = sys._getframe(1).f_back.f_locals["progress"]
            while True:
                for index in range(int(number), 64):
                    for batch in range(64):
                        now, clock = time.monotonic(), time.process_time()
                        struct.pack_into("<ddII", progress, 0, now, clock, batch, index)
        if word == "forget":
            progress = sys._getframe(1).f_back.f_locals["progress"]
            progress[:64] = b"\\xff" * 64  # NaN among it
            while True: pass
        self.count += 1
        return f"{action} {self.count}", 0.0, False, False, {}
"""
PROGRAM = MIXED.replace("pid {PID}", "start")
TELLING = MIXED.replace("{PID}", "{os.getpid()}")


async def opened(pool: Pool, program: str, seed: int = 0, replica: int = 0) -> Instance:
    instance = await pool.open(program, seed, replica)
    assert not isinstance(instance, Fault), instance
    return instance


async def fault_of(instance: Instance, action: str) -> Fault:
    fault = await instance.step(action)
    assert isinstance(fault, Fault), fault
    return fault


def ok(action: str, count: int = 1) -> Reply:
    return Reply(f"{action} {count}", 0.0, False, False)


@pytest.mark.parametrize(
    ("deed", "outcome"),
    [
        ("hang", Outcome.TIMEOUT),
        ("die", Outcome.WORKER_DIED),
        ("garbage", Outcome.PROTOCOL),
        ("raise", Outcome.ENV_ERROR),
        ("forget", Outcome.TIMEOUT),
    ],
)
def test_the_guilty_one_of_a_batch_is_found(shared, deed: str, outcome: Outcome):
    """All step at once, so their requests share a frame; the guilty one is in the middle."""

    async def play() -> None:
        program = PROGRAM + f"\n# guilty {deed}"
        instances = [await opened(shared.pool, program, seed) for seed in range(6)]
        actions = ["a", "b", "c", deed, "e", "f"]
        pairs = zip(instances, actions, strict=True)
        replies = await asyncio.gather(*(instance.step(action) for instance, action in pairs))
        for index, (reply, action) in enumerate(zip(replies, actions, strict=True)):
            if index == 3:
                assert isinstance(reply, Fault)
                assert reply.outcome is outcome
            else:
                assert reply == ok(action)
                assert await instances[index].step("again") == ok("again", 2)
                await instances[index].close()

    shared.run(play())


def test_who_breaks_the_worker_under_a_batch_is_told_so(shared):
    """Nothing of the batch can be answered then; asked one by one, each answers for itself."""

    async def play() -> None:
        instances = [await opened(shared.pool, PROGRAM + "\n# breaks", seed) for seed in range(3)]
        actions = ["a", "b", "break"]
        pairs = zip(instances, actions, strict=True)
        *replies, fault = await asyncio.gather(
            *(instance.step(action) for instance, action in pairs)
        )
        assert replies == [ok("a"), ok("b")]
        assert isinstance(fault, Fault)
        assert (fault.outcome, fault.detail) == (Outcome.ENV_ERROR, "step: it broke its worker")

    shared.run(play())


SCORING = """
import builtins

class ScoringEnv:
    def reset(self, seed):
        return "start", {}

    def step(self, action):
        if action == "cheat":
            builtins.max = lambda *_: 1.0
        if action == "delete":
            for name in list(vars(builtins)):
                if not name.startswith("__") and name not in ("list", "vars"):
                    delattr(builtins, name)
        return "scored", max(float(action == "win"), 0.25), False, False, {}
"""


@pytest.mark.parametrize("deed", ["cheat", "delete"])
@pytest.mark.parametrize("together", [True, False])
def test_changed_builtins_change_no_other_instance(shared, deed: str, together: bool):
    """Whoever changes them answers for it; the others are rewarded as ever."""

    async def play() -> None:
        program = SCORING + f"\n# {deed} {together}"
        guilty, *others = [await opened(shared.pool, program, seed) for seed in range(3)]
        steps = [guilty.step(deed), *(other.step("play") for other in others)]
        if together:
            fault, *replies = await asyncio.gather(*steps)
        else:
            fault, *replies = [await step for step in steps]
        assert isinstance(fault, Fault)
        assert fault.outcome is Outcome.ENV_ERROR and fault.outcome.program_fault
        assert replies == [Reply("scored", 0.25, False, False)] * 2
        for other in others:
            assert await other.step("win") == Reply("scored", 1.0, False, False)
            await other.close()

    shared.run(play())


def test_lies_about_progress_gain_a_bounded_time(shared):
    """The worker shows itself always busy with a later request; each may be believed once."""

    async def play() -> None:
        instances = [await opened(shared.pool, PROGRAM + "\n# lies", seed) for seed in range(4)]
        replies = await asyncio.gather(*(instance.step("lie 0") for instance in instances))
        assert all(isinstance(reply, Fault) for reply in replies)

    shared.run(asyncio.wait_for(play(), 240))


def test_slow_answers_of_a_batch_do_not_wait_for_one_another(shared):
    """Together they take longer than one may: the limit is of each."""

    async def play() -> None:
        instances = [await opened(shared.pool, PROGRAM + "\n# slow", seed) for seed in range(4)]
        replies = await asyncio.gather(*(instance.step("burn 0.2") for instance in instances))
        assert replies == [ok("burn 0.2")] * 4
        for instance in instances:
            await instance.close()

    shared.run(play())


def test_two_offences_and_a_program_is_refused():
    async def play() -> None:
        async with Pool(Limits(step_s=0.2)) as pool:
            for _ in range(4):  # an error that it raises is none
                assert (await fault_of(await opened(pool, PROGRAM), "raise")).outcome == "env_error"
            first = await fault_of(await opened(pool, PROGRAM), "hang")
            assert pool.stats().quarantined == 0
            second, bystander = await opened(pool, PROGRAM), await opened(pool, PROGRAM, replica=1)
            assert (await fault_of(second, "die")).outcome is Outcome.WORKER_DIED
            # Those that were open with it play to their end, and one of them may even begin.
            assert await bystander.step("x") == ok("x")
            late = await opened(pool, PROGRAM)
            await late.close()
            await bystander.close()
            pool.stats()
            text = f"in quarantine; the first offence: {first.detail}"
            for replica in (0, 1):
                refusal = await pool.open(PROGRAM, 3, replica)
                assert refusal == Fault(Outcome.TIMEOUT, text)
            assert await pool.load(PROGRAM) == Fault(Outcome.TIMEOUT, text)
            stats = pool.stats()
            assert (stats.refused, stats.quarantined, stats.requests) == (3, 1, 0)
            assert (stats.faults, stats.spawned) == ({}, 0)
            await (await opened(pool, PROGRAM + "\n# another")).close()
            state = pool.state()
        async with Pool(Limits()) as other:
            other.restore(state)
            assert await other.open(PROGRAM, 1) == Fault(Outcome.TIMEOUT, text)
            assert other.stats().quarantined == 1
            assert other.state() == state

    asyncio.run(play())


def test_the_first_of_two_offences_outlives_the_pool_as_well():
    async def play() -> None:
        async with Pool(Limits()) as pool:
            await fault_of(await opened(pool, PROGRAM), "die")
            state = pool.state()
        async with Pool(Limits()) as other:
            other.restore(state)
            await fault_of(await opened(other, PROGRAM), "die")
            assert isinstance(await other.open(PROGRAM, 1), Fault)

    asyncio.run(play())


def test_one_failed_load_is_one_offence_however_many_wait_for_it():
    async def play() -> None:
        program = "import os\nos._exit(1)"
        async with Pool(Limits()) as pool:
            faults = await asyncio.gather(*(pool.open(program, seed) for seed in range(5)))
            assert {fault.outcome for fault in faults} == {Outcome.WORKER_DIED}
            assert pool.stats().quarantined == 0
            await pool.load(program)
            assert pool.stats().quarantined == 1

    asyncio.run(play())


def test_episodes_with_one_purse_share_their_processor_time():
    async def play() -> None:
        async with Pool(Limits(step_s=5, trial_s=0.5)) as pool:
            purse = Purse(0.5)
            first = await pool.open(PROGRAM, 0, purse=purse)
            second = await pool.open(PROGRAM, 1, 1, purse)
            assert not isinstance(first, Fault) and not isinstance(second, Fault)
            assert await first.step("burn 0.3") == ok("burn 0.3")
            text = "all plays of its trial together took more than their 0.5 s of processor time"
            assert await second.step("burn 0.3") == Fault(Outcome.TIMEOUT, text)
            assert await pool.open(PROGRAM, 2, purse=purse) == Fault(Outcome.TIMEOUT, text)
            other = await opened(pool, PROGRAM + "\n# other")  # it pays for itself
            assert await other.step("burn 0.3") == ok("burn 0.3")

    asyncio.run(play())


def test_episodes_with_one_purse_share_the_memory_of_what_they_show():
    async def play() -> None:
        async with Pool(Limits()) as pool:
            purse = Purse(left_bytes=2000)
            first = await pool.open(PROGRAM, 0, purse=purse)
            second = await pool.open(PROGRAM, 1, 1, purse)
            assert not isinstance(first, Fault) and not isinstance(second, Fault)
            assert await first.step("x" * 900) == ok("x" * 900)
            wide = "☃" * 700  # two bytes each in memory
            fault = await second.step(wide)
            assert isinstance(fault, Fault) and fault.outcome is Outcome.SCHEMA
            assert "all plays of its trial together showed more than" in fault.detail
            assert purse.empty and pool.stats().quarantined == 0
            other = await opened(pool, PROGRAM)
            assert await other.step(wide) == ok(wide)

    asyncio.run(play())


def test_an_episode_has_so_much_processor_time_and_a_rebuild_takes_none_of_it():
    async def play() -> None:
        async with Pool(Limits(step_s=5, episode_s=0.5)) as pool:
            program = PROGRAM
            steady, guilty = await opened(pool, program), await opened(pool, program)
            assert await steady.step("burn 0.2") == ok("burn 0.2")
            await fault_of(guilty, "die")
            assert await steady.step("burn 0.2") == ok("burn 0.2", 2)  # replays the first
            assert pool.stats().rebuilt == 1
            text = "the episode took more than its 0.5 s of processor time"
            assert await steady.step("burn 0.2") == Fault(Outcome.TIMEOUT, text)
            assert pool.stats().quarantined == 1
            other = await opened(pool, program + "\n# other")  # its worker was not its own alone
            assert await other.step("burn 0.3") == ok("burn 0.3")

    asyncio.run(play())


def test_the_largest_worker_is_ended_when_all_take_too_much():
    limits = Limits(step_s=30, pool_memory_bytes=96 * 2**20)

    async def play() -> None:
        async with Pool(limits) as pool:
            small = await opened(pool, PROGRAM + "\n# small")
            assert await small.step("keep 20") == ok("keep 20")
            large = await opened(pool, PROGRAM + "\n# large")
            neighbour = await opened(pool, PROGRAM + "\n# large")
            assert await neighbour.step("x") == ok("x")
            assert await large.step("keep 40") == ok("keep 40")
            # The memory is looked at while a request is worked on.
            fault, reply = await asyncio.gather(large.step("keep 50"), large_free(neighbour))
            if not isinstance(fault, Fault):
                fault = await fault_of(large, "burn 20")
            assert fault.outcome is Outcome.WORKER_DIED
            assert fault.detail.startswith("all workers together passed their 100663296 bytes")
            assert reply == ok("y", 2)
            assert await small.step("x") == ok("x", 2)
            stats = pool.stats()
            assert stats.faults == {Outcome.WORKER_DIED: 1}
            assert stats.retries >= 1
            assert 60 * 2**20 < stats.peak_bytes < 200 * 2**20

    async def large_free(neighbour: Instance) -> Reply | Fault:
        return await neighbour.step("y")

    asyncio.run(play())


FAR = """
import ctypes, time

class FarEnv:
    def reset(self, seed):
        return "start"

    def step(self, action):
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        read, private_anonymous_fixed = 1, 0x32
        for index in range(int(action)):
            place = ctypes.c_void_p((index + 2) << 30)
            libc.mmap(place, 4096, read, private_anonymous_fixed, -1, ctypes.c_long(0))
            ctypes.string_at(place.value, 1)
        end = time.process_time() + 0.5
        while time.process_time() < end: pass
        return "read", 0.0, False, False, {}
"""


def test_tables_of_the_kernel_count_as_memory_of_the_worker():
    """Pages that are only read take none, however far apart: their tables take 8 KiB each."""

    async def play() -> None:
        async with Pool(Limits(step_s=30, pool_memory_bytes=64 * 2**20)) as pool:
            fault = await fault_of(await opened(pool, FAR), "12000")
            assert fault.outcome is Outcome.WORKER_DIED
            assert fault.detail.startswith("all workers together passed their 67108864 bytes")
            few = await opened(pool, FAR + "# few")
            assert await few.step("100") == Reply("read", 0.0, False, False)

    asyncio.run(play())


def test_a_spare_worker_is_taken_and_replaced(descendants, all_gone, seen_pid):
    before = descendants(os.getpid())

    def worker(instance: Instance) -> int:
        return seen_pid(int(instance.observation.split()[1]))

    async def settled(number: int) -> set[int]:
        for _ in range(600):
            ours = descendants(os.getpid()) - before
            if len(ours) == number:
                return ours
            await asyncio.sleep(0.05)
        raise AssertionError(f"{len(ours)} processes, expected {number}")

    async def play() -> None:
        async with Pool(Limits(spare_workers=2)) as pool:
            spares = await settled(3 + 4)  # supervisor, two zygotes, two spares of each
            first = await opened(pool, TELLING)
            assert (taken := worker(first)) in spares
            again = await settled(3 + 4 + 1)
            assert spares < again
            second = await opened(pool, TELLING + "\n# second", replica=1)
            assert worker(second) in spares
            await settled(3 + 4 + 2)
            await fault_of(first, "die")
            await settled(3 + 4 + 1)  # one that served a program serves no other
            third = await opened(pool, TELLING + "\n# third")
            assert worker(third) in again - {taken}
            assert pool.stats().workers == 2

    asyncio.run(play())
    assert all_gone(descendants(os.getpid()) - before)


def test_a_spare_that_is_killed_is_nobodys_loss(descendants):
    before = descendants(os.getpid())

    async def play() -> None:
        async with Pool(Limits(spare_workers=1)) as pool:
            while len(ours := descendants(os.getpid()) - before) < 5:
                await asyncio.sleep(0.02)
            newest = max(ours)
            os.kill(newest, 9)
            for replica in (0, 1):
                instance = await opened(pool, PROGRAM, replica=replica)
                assert await instance.step("x") == ok("x")
            stats = pool.stats()
            assert (stats.faults, stats.spawned - stats.retries) == ({}, 2)

    asyncio.run(play())


def test_what_is_counted(shared):
    async def play() -> None:
        shared.pool.stats()
        program = PROGRAM + "\n# counted"
        instances = [await opened(shared.pool, program, seed) for seed in range(3)]
        for action in ("a", "burn 0.05"):
            await asyncio.gather(*(instance.step(action) for instance in instances))
        await fault_of(instances[0], "die")
        await instances[1].step("x")
        stats = shared.pool.stats()
        assert (len(stats.programs), stats.instances, stats.steps) == (1, 3, 7)
        assert sorted(stats.step_s)[4:] == pytest.approx([0.05] * 3, abs=0.03)
        assert len(stats.spawn_s) == stats.spawned == 2
        assert all(0 < spawn_s < 60 for spawn_s in stats.spawn_s)
        assert stats.busy_s > 0.15
        assert stats.rebuilt == 1
        assert stats.faults == {Outcome.WORKER_DIED: 1}
        for instance in instances:
            await instance.close()
        assert (await asyncio.sleep(0), shared.pool.stats().steps)[1] == 0

    shared.run(play())
