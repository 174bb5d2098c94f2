"""Where a control group is made, what it refuses, and that none is left: on this host's kernel, and
for version 2, which this host may not have, in folders that only look like one."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import as_user
import pytest

from spade_jax.envs import cgroup
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool
from spade_jax.types import Fault, Outcome, Reply

ROOT = Path(__file__).resolve().parents[3]
needs_groups = pytest.mark.skipif(bool(as_user.reason()), reason=as_user.reason())
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
39 31 0:36 / /sys/fs/cgroup/pids rw shared:3 - cgroup cgroup rw,pids,cpu
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
DOCKER = HYBRID.replace(" / /sys/fs/cgroup/", " /docker/abc /sys/fs/cgroup/")


def test_places_of_version_1():
    found = cgroup.places(HYBRID, "8:pids,cpu:/\n4:memory:/user/one\n0::/init\n")
    assert {name: str(place.folder) for name, place in found.items()} == {
        "memory": "/sys/fs/cgroup/memory/user/one",
        "pids": "/sys/fs/cgroup/pids",
    }
    assert not any(place.unified for place in found.values())
    found = cgroup.places(DOCKER, "8:pids,cpu:/docker/abc/in\n4:memory:/docker/abc\n")
    assert str(found["pids"].folder) == "/sys/fs/cgroup/pids/in"
    assert str(found["memory"].folder) == "/sys/fs/cgroup/memory"
    with pytest.raises(FileNotFoundError, match="no memory controller"):
        cgroup.places(DOCKER, "8:pids,cpu:/docker/abc\n4:memory:/other\n")
    with pytest.raises(FileNotFoundError, match="no pids controller"):
        cgroup.places(HYBRID, "4:memory:/\n0::/\n")


@pytest.fixture
def unified(tmp_path: Path) -> Callable[[str], dict[str, cgroup.Place]]:
    """A function: the places of a process in a group of version 2 that is this far down. The
    topmost has nothing to pass on, the others pass both controllers down but for the last, which
    has processes: its file cannot be written to."""
    top = tmp_path / "cgroup two"
    mounts = f"30 24 0:26 / {top} rw - cgroup2 cgroup2 rw,nsdelegate\n".replace("p t", "p\\040t")

    def make(path: str) -> dict[str, cgroup.Place]:
        folder = top
        for name in ["", *path.split("/")]:
            folder = folder / name
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.controllers").write_text("cpu memory pids")
            (folder / "cgroup.subtree_control").write_text("cpu memory pids" * (folder != top))
            for limit in ("memory.max", "pids.max") if folder != top else ():
                (folder / limit).write_text("max\n")
        (folder / "cgroup.subtree_control").unlink()
        (folder / "cgroup.subtree_control").mkdir()  # writing raises, as it does with processes
        return cgroup.places(mounts, f"0::/{path}\n")

    return make


def parent(found: dict[str, cgroup.Place]) -> str:
    assert found["memory"] == found["pids"] and found["pids"].unified
    place = found["memory"]
    return os.path.relpath(cgroup._parent(place, ["memory", "pids"]), place.top)


def test_a_group_of_version_2_is_made_beside_the_one_with_processes(unified):
    assert parent(unified("user/app/scope")) == "user/app"


def test_no_limit_that_somebody_set_is_left(unified):
    found = unified("user/app/scope")
    (found["memory"].folder / "memory.max").write_text("4294967296\n")
    with pytest.raises(IsADirectoryError):
        parent(found)
    (found["memory"].folder / "memory.max").write_text("max\n")
    app = found["memory"].folder.parent
    (app / "cgroup.subtree_control").write_text("cpu")
    assert parent(found) == "user"
    (app / "pids.max").write_text("100\n")
    with pytest.raises(IsADirectoryError):
        parent(found)


def test_the_topmost_group_passes_its_controllers_down_if_it_may(unified):
    place = unified("scope")["memory"]
    top = cgroup.Place(place.top, place.top, unified=True)
    assert cgroup._parent(top, ["memory", "pids"]) == place.top
    assert (place.top / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_limits_of_version_2(tmp_path: Path):
    group = cgroup.Group({"memory": tmp_path, "pids": tmp_path})
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (tmp_path / name).write_text("max")
    group.limit(1 << 20, 5)
    wrote = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert wrote == {"memory.max": "1048576", "memory.swap.max": "0", "pids.max": "5"}
    group.limit(None, None)
    assert (tmp_path / "memory.max").read_text() == (tmp_path / "pids.max").read_text() == "max"
    (tmp_path / "cgroup.procs").symlink_to("/dev/null")  # says yes and does nothing
    with pytest.raises(OSError, match="is not in it"):
        group.join(os.getpid())


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (errno.EACCES, "Permission denied (EACCES): /sys/x"),
        (errno.EROFS, "Read-only file system (EROFS): /sys/x"),
        (errno.EBUSY, "Device or resource busy (EBUSY): /sys/x"),
    ],
)
def test_why_there_is_no_group_is_told_with_a_remedy(number: int, part: str):
    layer = cgroup.missing(OSError(number, os.strerror(number), "/sys/x"))
    assert (layer.name, layer.present, layer.detail) == ("cgroup", False, part)
    assert layer.fix


@pytest.fixture
def group() -> Iterator[cgroup.Group]:
    made = cgroup.create(64 << 20, 50)
    yield made
    made.remove()
    assert not any(folder.exists() for folder in made.folders.values())


@needs_groups
def test_a_limit_holds_for_all_below_and_for_what_is_started_there(group: cgroup.Group):
    inner = group.below("inner")
    inner.limit(None, 4)
    code = (
        "import os, sys\nsys.stdin.read(1)\nstarted = []\n"
        "try:\n    while len(started) < 9: started.append(os.fork() or os._exit(0))\n"
        "except OSError as error: print(len(started), error.strerror)\n"
        "for pid in started: os.waitpid(pid, 0)\n"
        "sys.stdout.flush()\nwhole = bytearray(os.urandom(1 << 20)) * 100\nprint('all of it')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        inner.join(process.pid)
        said, _ = process.communicate("x")
    assert said == "3 Resource temporarily unavailable\n"
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(OSError):
        inner.join(process.pid)


@needs_groups
def test_a_sweep_takes_the_dead_and_leaves_the_living(group: cgroup.Group):
    dead = cgroup.create(64 << 20, 50)
    dead.below("1")
    for lock in dead.locks:
        os.close(lock)  # as the end of its process does
    dead.locks.clear()
    held = cgroup.create(64 << 20, 50)  # sweeps
    try:
        assert not any(folder.exists() for folder in dead.folders.values())
        assert all(folder.exists() for folder in group.folders.values())
    finally:
        held.remove()


@needs_groups
def test_a_group_that_is_swept_while_it_is_made_is_made_again(monkeypatch):
    made: list[dict[str, Path]] = []
    make = cgroup._make

    def swept(folders: dict[str, Path]) -> None:
        make(folders)
        made.append(folders)
        if len(made) == 1:
            for folder in set(folders.values()):
                folder.rmdir()

    monkeypatch.setattr(cgroup, "_make", swept)
    group = cgroup.create(64 << 20, 50)
    group.remove()
    assert len(made) == 2 and group.folders == made[1]


TRAINER = """
import asyncio
from pathlib import Path
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Pool

async def main():
    async with Pool(Limits()) as pool:
        instance = await pool.open({program!r}, 1)
        asyncio.ensure_future(instance.step("hang"))
        await asyncio.sleep(0.2)
        print(pool.sandbox.tier, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""
HOG = """
import os
class HogEnv:
    def reset(self, seed):
        self.kept = []
        return "start"

    def step(self, action):
        if action == "hang":
            while True: pass
        for _ in range(int(action)):
            self.kept.append(bytearray(os.urandom(1 << 20)))
        return "kept", 0.0, False, False, {}
"""


def folders_of(pids: set[int]) -> set[Path]:
    """The folders of the pools that these processes are the supervisors of, and those below."""
    found = cgroup.places(
        Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    )
    return {
        path
        for place in found.values()
        for pid in pids
        for pool in place.folder.glob(f"{cgroup._PREFIX}{pid}-*")
        for path in (pool, *pool.glob("*/"))
        if path.is_dir()
    }


@needs_groups
def test_a_killed_trainer_leaves_no_process_and_the_next_pool_no_folder(descendants, all_gone):
    command = [sys.executable, "-c", TRAINER.format(program=HOG)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "S\n"
        below = descendants(trainer.pid)
        new = folders_of(below)
        assert any(folder.name == "1" for folder in new)
        listed = {
            int(pid) for folder in new for pid in (folder / "cgroup.procs").read_text().split()
        }
        assert len(below - listed) == 1  # the supervisor
        assert len(listed) >= 3
        trainer.kill()
    assert all_gone(below, 2)

    async def next_run() -> None:
        async with Pool(Limits(spare_workers=0)):
            assert folders_of(below) == set()
            mine = descendants(os.getpid())
            assert folders_of(mine)
        assert folders_of(mine) == set()

    asyncio.run(next_run())


@needs_groups
def test_the_kernel_ends_who_takes_more_than_all_may(monkeypatch):
    """The watch over the memory of all is put to sleep; it may always come too late."""
    from spade_jax.envs import limits as limits_module

    boot = limits_module._BOOT.replace(
        "from", "from spade_jax.envs import supervisor; supervisor._MEMORY_S = 1e9; from", 1
    )
    monkeypatch.setattr(limits_module, "_BOOT", boot)
    limits = Limits(step_s=30, pool_memory_bytes=32 << 20, spare_workers=0, max_workers=2)

    async def play() -> None:
        async with Pool(limits) as pool:
            assert pool.sandbox.tier == "S"
            small = await pool.open(HOG, 1)
            large = await pool.open(HOG + "# large", 1)
            assert not isinstance(small, Fault) and not isinstance(large, Fault)
            assert await small.step("20") == Reply("kept", 0.0, False, False)
            fault = await large.step("200")
            text = "the process ended with signal SIGKILL"
            assert fault == Fault(Outcome.WORKER_DIED, text)
            assert await small.step("1") == Reply("kept", 0.0, False, False)
            assert pool.stats().rebuilt <= 1

    asyncio.run(play())
