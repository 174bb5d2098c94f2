"""Every hostile program gets an outcome that its first line allows, and the host stays as it was:
as root and as a normal user, in namespaces and a cgroup and in neither, with Landlock, with its
first version only, and without.
"""

import asyncio
import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import as_user
import pytest

from spade_jax.envs import hostile
from spade_jax.envs.hostile import right_outcomes
from spade_jax.envs.limits import Limits
from spade_jax.errors import SandboxError

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / "tests" / "hostile_envs"
NUM_HOST_CHECKS = 8
# A normal user may not be able to run the interpreter at all, such as one below /root: the right to
# read past modes makes that possible. Workers give it up like every other.
RUN = """
import asyncio, ctypes, dataclasses, json, os, sys
from pathlib import Path

folder, user, weaken = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if user != os.geteuid():
    libc = ctypes.CDLL(None, use_errno=True)
    read_past_modes = 1 << 2
    libc.prctl(8, 1, 0, 0, 0)  # keep capabilities
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capset(header, (ctypes.c_uint32 * 6)(*[read_past_modes] * 3, 0, 0, 0)) == 0
    assert libc.prctl(47, 2, 2, 0, 0) == 0  # for the processes below as well
    libc.prctl(4, 1, 0, 0, 0)  # dumps: a change of user had turned its own /proc off

from spade_jax.envs import hostile
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool

async def play():
    limits = Limits(load_s=0.5, reset_s=0.5, step_s=1.0, max_workers=8)
    async with Pool(limits, weaken=weaken) as pool:
        tier = pool.sandbox.tier
    rows = await hostile.run_folder(folder, limits, weaken=weaken)
    print(json.dumps([tier, [dataclasses.asdict(row) | {"ok": row.ok} for row in rows]]))

asyncio.run(play())
"""
USER = as_user.USER


def command(user: int, weaken: str) -> list[str]:
    return [sys.executable, "-c", RUN, str(PROGRAMS), str(user), weaken]


def contained(command: list[str], tiers: set[str]) -> None:
    names = {path.stem for path in PROGRAMS.glob("*.py")}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tier, found = json.loads(done.stdout)
    assert tier in tiers
    assert {row["name"] for row in found if row["kind"] == "program"} == names
    assert len(found) == len(names) + NUM_HOST_CHECKS
    wrong = [row for row in found if not row["ok"]]
    assert not wrong, "\n".join(map(str, wrong))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be root")


@needs_root
def test_as_root():
    contained(command(0, ""), as_user.best_tiers())


def test_as_a_normal_user():
    contained(command(USER if os.geteuid() == 0 else os.geteuid(), ""), {"S", "A"})


@pytest.mark.skipif(bool(as_user.reason()), reason=as_user.reason())
def test_as_a_normal_user_with_control_groups_of_his_own():
    with as_user.command(*command(USER, "")) as run:
        contained(run, {"S"})


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize(
    ("weaken", "tier"),
    [("landlock", "B"), ("landlock>1", "SA"), ("namespaces,cgroup", "A"), ("namespaces", "A")],
)
def test_as_root_with_less(weaken: str, tier: str):
    contained(command(0, weaken), set(tier))


@pytest.mark.slow
@pytest.mark.parametrize(("weaken", "tier"), [("landlock", "B"), ("landlock>1", "SA")])
def test_as_a_normal_user_with_less_landlock(weaken: str, tier: str):
    contained(command(USER if os.geteuid() == 0 else os.geteuid(), weaken), set(tier))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# Spins. RIGHT: timeout", ("timeout",)),
        ("# Grows. RIGHT: env_error (MemoryError)", ("env_error",)),
        ("# Says. RIGHT: harmless|timeout | env_error (host (disk) same)", ("harmless", "timeout")),
        ("# Draws. RIGHT: caught by the replay check", ("replay",)),
        ("import os", ()),
        ("# Spins. RIGHT:", ()),
        ("x = 1\n# RIGHT: timeout", ()),
    ],
)
def test_the_first_line_says_what_is_right(line: str, expected: tuple[str, ...]):
    assert right_outcomes(line + "\nRIGHT: denied")[: len(expected)] == expected
    if not expected:
        assert right_outcomes(line) == ()


STEP = "class PlantedEnv:\n    def reset(self, seed): return 'start'\n    def step(self, action):\n"
PLANTED = {  # what it does, what it must not be taken for
    "reports_success": ("return 'blocked a | PWNED b', 0.0, False, False, {}", "denied", "pwned"),
    "half_blocked": ("return 'blocked a | fine', 0.0, False, False, {}", "denied", "harmless"),
    "says_nothing": ("return 'fine', 0.0, False, False, {}", "denied", "harmless"),
    "raises": ("raise ValueError", "timeout", "env_error"),
    "pwns_then_spins": ("return 'PWNED x' if action == 'look' else 1, 0.0, 0, 0, {}", "schema", ""),
}


def test_a_wrong_outcome_is_seen(tmp_path: Path):
    for name, (step, right, _) in PLANTED.items():
        text = f"# Planted. RIGHT: {right}\n{STEP}        {step}\n"
        (tmp_path / f"{name}.py").write_text(text)
    found = {r.name: r for r in asyncio.run(hostile.run_folder(tmp_path, Limits()))}
    for name, (_, right, got) in PLANTED.items():
        if got:
            assert found[name].got == got
            assert not found[name].ok
        else:
            assert found[name].got == right
    assert [row for row in found.values() if row.kind == "host" and not row.ok] == []


def test_a_folder_that_says_nothing_is_refused(tmp_path: Path):
    with pytest.raises(SandboxError, match="holds no program"):
        asyncio.run(hostile.run_folder(tmp_path, Limits()))
    (tmp_path / "mute.py").write_text("pass\n")
    with pytest.raises(SandboxError, match=r"mute\.py does not say what is right"):
        asyncio.run(hostile.run_folder(tmp_path, Limits()))


def test_programs_are_not_run_where_they_are_not_contained(tmp_path: Path):
    (tmp_path / "any.py").write_text("# Anything. RIGHT: harmless\n" + STEP + "        pass\n")
    limits = Limits(unsafe_sandbox="I-accept")
    with pytest.raises(SandboxError, match="not run here"):
        asyncio.run(hostile.run_folder(tmp_path, limits, weaken="seccomp"))


def test_changes_of_the_host_are_seen():
    """The checks, on changes that the test makes itself."""
    port = asyncio.run(hostile._port(0))
    with hostile._Host({"a": "open('/tmp/hostile_planted')"}, port) as host:
        (hostile.CANARY / "weights.bin").chmod(0o600)
        planted = Path("/tmp/hostile_planted")
        planted.touch()
        descriptor = os.open("/dev/null", os.O_RDONLY)
        child = subprocess.Popen(["/bin/sleep", "60"])
        try:
            import socket

            with socket.create_connection(("127.0.0.1", hostile.PORT)):
                host.after_close()
        finally:
            planted.unlink()
            os.close(descriptor)
            child.kill()
            child.wait()
        assert host.found.keys() >= {"canary", "files", "descriptors", "processes", "port"}
        wrong = {row.name for row in host.results() if not row.ok}
        assert wrong == host.found.keys()
        with pytest.raises(SandboxError, match="47123 is taken"):
            asyncio.run(hostile._port(0))
    assert not hostile.CANARY.exists()


@pytest.mark.skipif(not Path("/proc/sysvipc/shm").exists(), reason="a kernel without System V IPC")
@pytest.mark.parametrize("stays", [True, False])
def test_shared_memory_that_stays_is_seen(monkeypatch, stays: bool):
    """Other runs on the machine make some for a moment, when they try their walls."""
    monkeypatch.setattr(hostile, "_PASSING_S", 0.3 if stays else 60.0)
    libc = ctypes.CDLL(None, use_errno=True)
    port = asyncio.run(hostile._port(0))
    with hostile._Host({}, port) as host:
        segment = libc.shmget(0, 4096, 0o1600)
        assert segment >= 0

        def remove() -> None:
            assert libc.shmctl(segment, 0, None) == 0

        timer = threading.Timer(0.1, remove)
        try:
            if not stays:
                timer.start()
            host.after_close()
        finally:
            if stays:
                remove()
            else:
                timer.join()
    shown = f"new: shm {segment}"
    assert host.found.get("shared memory") == (shown if stays else None)


def test_runs_take_turns(tmp_path: Path):
    """The programs name the port and the canary: a run waits until the one before it is done."""
    (tmp_path / "any.py").write_text(
        "# Anything. RIGHT: harmless\n" + STEP + "        return 'fine', 0.0, False, False, {}\n"
    )

    async def play() -> list[hostile.Result]:
        first = await hostile._port(0)
        waiting = asyncio.ensure_future(hostile.run_folder(tmp_path, Limits()))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        assert not hostile.CANARY.exists()
        first.close()
        return await waiting

    assert all(row.ok for row in asyncio.run(play()))
