"""What bounds the processes of ours, tried without the programs that would need it."""

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spade_jax.envs import limits, zygote

ROOT = Path(__file__).resolve().parents[3]


def test_sweep_gives_a_chain_of_forks_up(monkeypatch):
    """Every child that is killed has left another one."""
    pids = itertools.count(10**6)
    killed: list[int] = []
    monkeypatch.setattr(limits, "_children", lambda: [next(pids)])
    monkeypatch.setattr(limits.os, "kill", lambda pid, number: killed.append(pid))
    monkeypatch.setattr(limits.os, "waitpid", lambda pid, options: (pid, 9))
    assert not limits.sweep()
    assert 0 < len(killed) <= limits._SWEEP_ROUNDS


def test_sweep_gives_a_child_up_that_does_not_end(monkeypatch):
    monkeypatch.setattr(limits, "_SWEEP_S", 0.05)
    monkeypatch.setattr(limits, "_children", lambda: [1, 2])
    monkeypatch.setattr(limits.os, "kill", lambda pid, number: None)
    monkeypatch.setattr(limits.os, "waitpid", lambda pid, options: (0, 0))
    start = time.monotonic()
    assert not limits.sweep(keep=[1])
    assert time.monotonic() - start >= 0.05
    assert limits.sweep(keep=[1, 2])


def test_a_zygote_that_cannot_sweep_ends(monkeypatch):
    monkeypatch.setattr(limits, "sweep", lambda keep: False)
    for name in ("kill", "killpg"):
        monkeypatch.setattr(zygote.os, name, lambda pid, number: None)
    monkeypatch.setattr(zygote.os, "waitpid", lambda pid, options: (pid, 9))
    with pytest.raises(SystemExit, match="gives up"):
        zygote._reap(1, {1: 10**6})


def test_where_python_finds_its_libraries_is_passed_on(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    assert limits.environment()["LD_LIBRARY_PATH"] == "/opt/python/lib"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert "LD_LIBRARY_PATH" not in limits.environment()
    assert limits.environment()["PYTHONHASHSEED"] == "0"
    assert limits.environment(hash_seed=1)["PYTHONHASHSEED"] == "1"


def run(code: str, *arguments: str) -> str:
    """What `code` prints in a fresh process, which has no other thread when it forks."""
    command = [sys.executable, "-c", "from spade_jax.envs import limits\n" + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_a_host_is_asked_what_it_tells_of_a_worker(tmp_path: Path):
    assert run("print(limits.missing())") == "\n"
    hidden = (
        "import os, pathlib, sys\n"
        "limits._PROC = pathlib.Path(sys.argv[1])\n"
        "folder = limits._PROC / f'self/task/{os.getpid()}'\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'children').write_text('')\n"
        "print(limits.missing())"
    )
    assert "hidepid" in run(hidden, str(tmp_path))


def test_a_process_that_cannot_be_seen_is_not_called_dead():
    assert limits.state(2**22 + 1) == "?"
    assert not limits.exiting(2**22 + 1)
    assert limits.state(os.getpid()) in "RS"


# One page of each 2 MiB: a table of the kernel for every one of them, and no memory where it is
# only read.
FAR_PAGES = """
import mmap, os
before = limits.resident(os.getpid())
no_reserve = 0x4000
pages = mmap.mmap(-1, 4 << 30, flags=mmap.MAP_PRIVATE | no_reserve)
pages.madvise(15)  # no huge pages
read = [pages[start] for start in range(0, len(pages), 2 << 20)]
print(limits.resident(os.getpid()) - before >= 2048 * 4096)
"""


def test_the_kernels_tables_count_as_memory():
    assert run(FAR_PAGES) == "True\n"
    assert limits.resident(2**22 + 1) == 0


def test_few_files_sets_the_soft_limit_only_and_says_what_cannot_be():
    code = (
        "import resource as r\nhard = 200\nr.setrlimit(r.RLIMIT_NOFILE, (150, hard))\n"
        "for count in 100, 180, 201: print(limits.few_files(count), r.getrlimit(r.RLIMIT_NOFILE))"
    )
    lower, higher, refused = run(code).splitlines()
    assert (lower, higher) == (" (100, 200)", " (180, 200)")
    assert "201 open files, and 200 are allowed" in refused and "envs.max_workers" in refused
    assert refused.endswith(" (180, 200)")


def test_what_stands_beside_the_package_does_not_replace_the_standard_library(tmp_path):
    goal = (
        "def main():\n    import json, math\n    print(json.loads('[1]'), math.pi > 3, sys.path)\n"
    )
    (tmp_path / "goal.py").write_text(f"import dataclasses, sys\n\n{goal}")
    for name in ("json", "math", "dataclasses", "_json"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('not the {name} it wants')\n")
    command = [sys.executable, "-s", "-P", "-c", limits._BOOT.format("goal"), str(tmp_path)]
    environment = limits.environment()
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.startswith("[1] True ["), done.stderr
    assert str(tmp_path) not in done.stdout
