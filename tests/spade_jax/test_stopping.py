"""When a run saves and stops: by steps, by the clock, by SIGTERM; and work that is given up."""

import asyncio
import os
import signal

import pytest

from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.stopping import Stopped, Watch

COUNTER = """
class CounterEnv:
    def reset(self, seed):
        return str(seed), {}

    def step(self, action):
        return action, 0.5, False, False, {}
"""


def test_saves_by_steps_and_by_the_clock():
    now = 0.0
    watch = Watch(3, 10, clock=lambda: now)
    assert [step for step in range(7) if watch.must_save(step)] == [2, 5]
    now = 599.0
    assert not watch.must_save(0)
    now = 600.0
    assert watch.must_save(0)
    watch.saved()
    assert not watch.must_save(3) and watch.must_save(2)
    now = 1200.0
    assert watch.must_save(3)
    now = 1e9
    assert not Watch(3, 0, clock=lambda: now).must_save(0)


def test_a_signal_asks_to_stop_only_while_it_is_listened_to():
    watch = Watch(1, 0)
    before = signal.getsignal(signal.SIGTERM)
    with watch.listening():
        assert not watch.must_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.must_stop()
        os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
    assert signal.getsignal(signal.SIGTERM) is before


def test_while_nothing_is_to_be_saved_the_signal_itself_stops():
    watch = Watch(1, 0)
    with watch.listening():
        with pytest.raises(Stopped), watch.starting():
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it went on")
        with pytest.raises(Stopped), watch.starting():  # also if it came before
            pytest.fail("it went on")
        os.kill(os.getpid(), signal.SIGTERM)  # no longer


def run(watch: Watch, work):
    with asyncio.Runner() as runner:
        return runner.run(watch.guarded(work))


def test_work_that_is_guarded_gives_its_result_or_its_error():
    async def work(fails: bool):
        await asyncio.sleep(0)
        return 1 // (not fails)

    assert run(Watch(1, 0), work(False)) == 1
    with pytest.raises(ZeroDivisionError):
        run(Watch(1, 0), work(True))


def test_work_is_given_up_and_cleans_up_before_the_run_stops():
    seen = []

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            seen.append("cleaned up")

    watch = Watch(1, 0)
    with watch.listening(), pytest.raises(Stopped):
        run(watch, work())
    assert seen == ["cleaned up"]


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_signal_may_have_spoilt_is_dropped(fails: bool):
    """Its processes may have got it too, a moment before."""

    async def work():
        loop = asyncio.get_running_loop()
        delay = 0.05 if fails else 0.0
        loop.call_later(delay, os.kill, os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0 if fails else 0.01)
        return 1 // (not fails)

    watch = Watch(1, 0)
    with watch.listening(), pytest.raises(Stopped):
        run(watch, work())


def test_environments_outlive_a_signal_to_every_process(descendants):
    """A batch system sends it to all; when they end is the trainer's to say."""

    async def scenario() -> tuple[str, str]:
        async with Pool(Limits()) as pool:
            instance = await pool.open(COUNTER, 5)
            mine = descendants(os.getpid()) - {os.getpid()}
            assert len(mine) >= 2  # a supervisor, and what it started
            for pid in mine:
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(0.3)
            reply = await instance.step("a")
            other = await pool.open(COUNTER, 6)  # and new ones can be begun
            return reply.observation, other.observation

    assert asyncio.run(scenario()) == ("a", "6")
