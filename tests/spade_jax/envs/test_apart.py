"""What tier S is decided by can succeed: where nothing refuses it, in namespaces with a hole, under
limits that do not hold. Where S cannot be had, A is, and nobody lives in less than the trainer was
told.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import as_user
import pytest

from spade_jax.envs import adapters, tier
from spade_jax.envs import limits as limits_module
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Outcome, Reply

ROOT = Path(__file__).resolve().parents[3]
needs_all = pytest.mark.skipif(bool(as_user.reason()), reason=as_user.reason())
PROGRAM = """
class HonestEnv:
    def reset(self, seed):
        return f"start {seed}"

    def step(self, action):
        return action, 0.0, False, False, {}
"""


def boot(statement: str) -> str:
    """A boot line that runs `statement` in the supervisor and in its zygotes."""
    before = f"from spade_jax.envs import apart, cgroup, namespaces, nursery, limits; {statement}; "
    again = f"limits._BOOT = limits._BOOT.replace('from', {before + 'from'!r}, 1); "
    return limits_module._BOOT.replace("from", before + again + "from", 1)


def found(weaken: str = "") -> tier.Sandbox:
    """What a pool says of its sandbox, in which a program runs."""

    async def play() -> tier.Sandbox:
        async with Pool(Limits(), weaken=weaken) as pool:
            for replica in (0, 1):
                instance = await pool.open(PROGRAM, 1, replica)
                assert not isinstance(instance, Fault), instance
                assert await instance.step("a") == Reply("a", 0.0, False, False)
            return pool.sandbox

    return asyncio.run(play())


def layer(sandbox: tier.Sandbox, name: str) -> tier.Layer:
    (layer,) = (layer for layer in sandbox.layers if layer.name == name)
    return layer


def test_every_act_succeeds_where_nothing_refuses_it():
    """Else a refusal would say nothing of the namespaces or the cgroup."""
    code = (
        "import json; from spade_jax.envs import apart, probe  # spade_jax.envs.supervisor\n"
        "import os\nbait = apart.Bait()\n"
        "def child(act):\n"
        "    reads, says = os.pipe()\n"
        "    if os.fork() == 0:\n"
        "        os.write(says, probe.answer(act).encode())\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    return os.read(reads, 100).decode()\n"
        "acts = apart._across(bait.told) | apart._beyond()\n"
        "print(json.dumps({name: child(act) for name, act in acts.items()}))\n"
        "bait.close()\n"
        "print(json.dumps({name: child(act) for name, act in apart._across(bait.told).items()}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""
    before, after = map(json.loads, done.stdout.splitlines())
    assert len(before) == 8 and set(before.values()) == {"done"}
    assert {name for name, answer in after.items() if answer == "done"} == {
        "see a process of the host",
        "signal a process of the host",
        "write to a file of the host",  # it makes another; the rest is gone
    }


@needs_all
def test_all_that_s_takes_is_proven_by_trying():
    sandbox = found()
    assert sandbox.tier == "S"
    answers = {attempt.name: attempt.answer for attempt in sandbox.apart}
    assert answers == {
        "see a process of the host": "ESRCH",
        "signal a process of the host": "ESRCH",
        "reach a port of the host": "ENETUNREACH",
        "reach a UNIX socket of the host": "ECONNREFUSED",
        "find shared memory of the host": "EINVAL",
        "write to a file of the host": "EROFS",
        "use more memory than all may": "SIGKILL",
        "start more processes than all may": "EAGAIN",
    }
    assert all(attempt.refused for attempt in sandbox.apart)
    assert layer(sandbox, "cgroup").detail == "2272 MiB and 120 processes in all"
    assert sandbox.line().startswith("sandbox=S: 49 of 49 forbidden acts refused")
    assert sandbox.probe_s < 0.5


@needs_all
@pytest.mark.parametrize("name", ["namespaces", "cgroup"])
def test_without_one_of_them_it_is_a(name: str):
    sandbox = found(name)
    assert sandbox.tier == "A" and sandbox.refusal() == ""
    assert not any(name in text for text in sandbox.warnings())  # A is what it was
    assert layer(sandbox, name) == tier.Layer(name, False, "turned off")
    (other,) = {"namespaces", "cgroup"} - {name}
    assert layer(sandbox, other).present
    assert len(sandbox.apart) == {"namespaces": 2, "cgroup": 6}[name]


@needs_all
@pytest.mark.parametrize(
    ("statement", "name", "could"),
    [
        (
            "namespaces._NEW.pop('net', None)",
            "namespaces",
            "reach a port of the host, reach a UNIX socket of the host",
        ),
        ("namespaces._NEW.pop('ipc', None)", "namespaces", "find shared memory of the host"),
        ("namespaces._READ_ONLY = 2", "namespaces", "write to a file of the host"),
        ("cgroup.Group.limit = lambda *_: None", "cgroup", "use more memory than all may"),
    ],
)
def test_a_hole_in_them_is_found(monkeypatch, statement: str, name: str, could: str):
    """All of it is configured, and the kernel says yes."""
    monkeypatch.setattr(limits_module, "_BOOT", boot(statement))
    sandbox = found()
    assert sandbox.tier == "A"
    assert not layer(sandbox, name).present
    assert f"but a child could {could}" in layer(sandbox, name).detail
    assert "\n" not in sandbox.line() and "sandbox=A" in sandbox.line()


@needs_all
@pytest.mark.parametrize(
    ("statement", "name", "detail"),
    [
        (
            "namespaces._map_users = namespaces._become = lambda *_: namespaces.os.write(_[-1], "
            "b'clone 28 clone')",
            "namespaces",
            "clone: No space left on device (ENOSPC)",
        ),
        (
            "namespaces._far_pids = lambda: namespaces.os._exit(3)",
            "namespaces",
            "a zygote ended with code 3 while starting in them",
        ),
        (
            "cgroup.Group.join = lambda *_: (_ for _ in ()).throw(OSError(13, 'not you', '/x'))",
            "cgroup",
            "not you (EACCES): /x",
        ),
    ],
)
def test_where_they_cannot_be_had_it_is_a_and_says_why(
    monkeypatch, statement: str, name: str, detail: str
):
    monkeypatch.setattr(limits_module, "_BOOT", boot(statement))
    sandbox = found()
    assert sandbox.tier == "A"
    assert not layer(sandbox, name).present
    assert layer(sandbox, name).detail == detail


# Only the first two zygotes of a supervisor get namespaces.
TWICE = (
    "calls = []; start = namespaces.start; namespaces.start = lambda *given: calls.append(1) or ("
    "start(*given) if len(calls) < 3 else (_ for _ in ()).throw("
    "namespaces.ApartError('clone', 28, 'clone')))"
)


@needs_all
def test_a_package_whose_zygote_is_less_apart_is_refused(monkeypatch):
    monkeypatch.setattr(limits_module, "_BOOT", boot(TWICE))
    fakes = str(Path(__file__).with_name("adapters") / "fakes")

    async def play() -> None:
        async with Pool(Limits(), packages=["gem"], package_path=[fakes]) as pool:
            assert pool.sandbox.tier == "S"
            plain = await pool.open(PROGRAM, 1)
            assert not isinstance(plain, Fault)
            fault = await pool.open(adapters.program("gem", "game:Flip-v0-easy"), 1)
            assert isinstance(fault, Fault) and fault.outcome is Outcome.INFRASTRUCTURE
            assert "workers are at tier A, less than the S of the pool: " in fault.detail
            assert "clone: No space left on device (ENOSPC)" in fault.detail
            assert await plain.step("x") == Reply("x", 0.0, False, False)

    asyncio.run(play())


@needs_all
def test_a_new_zygote_that_is_less_apart_ends_the_supervisor(
    monkeypatch, capfd, descendants, all_gone
):
    """Another one starts, and says what it has."""
    monkeypatch.setattr(limits_module, "_BOOT", boot(TWICE))
    before = descendants(os.getpid())

    async def play() -> None:
        async with Pool(Limits(spare_workers=0)) as pool:
            instance = await pool.open(PROGRAM, 1)
            assert not isinstance(instance, Fault)
            ours = descendants(os.getpid()) - before
            first = pool._link
            assert first is not None
            for pid in [pid for pid in ours if parent(pid) == first.process.pid]:
                os.kill(pid, signal.SIGKILL)
            while first.alive:
                await asyncio.sleep(0.01)
            assert all_gone(ours)
            assert await instance.step("x") == Reply("x", 0.0, False, False)
            assert pool._link is not first and pool.sandbox.tier == "S"

    asyncio.run(play())
    assert "workers are at tier A, less than the S of the pool" in capfd.readouterr().err
    assert descendants(os.getpid()) <= before


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
