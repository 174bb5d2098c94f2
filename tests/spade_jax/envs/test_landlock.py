"""Landlock in a fresh process, which it binds for good."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from spade_jax.envs import landlock

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import ctypes, errno, json, os, socket, sys
from spade_jax.envs import landlock
inside, outside, abi = sys.argv[1], sys.argv[2], int(sys.argv[3])
def said(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
acts = {
    "read inside": lambda: open(inside + "/file").close(),
    "list inside": lambda: os.listdir(inside),
    "read outside": lambda: open(outside + "/file").close(),
    "list outside": lambda: os.listdir(outside),
    "write inside": lambda: open(inside + "/file", "a").close(),
    "make inside": lambda: open(inside + "/new", "w").close(),
    "remove inside": lambda: os.unlink(inside + "/file"),
    "run": lambda: os.execv("/bin/true", ["true"]),
    "cut outside": lambda: os.truncate(outside + "/file", 0),
    "connect": lambda: socket.socket().connect(("127.0.0.1", 9)),
    "signal": lambda: os.kill(os.getppid(), 0),
}
rules = landlock.ruleset([inside, "/nonexistent/place"], abi)
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
landlock.restrict(rules)
print(json.dumps({name: said(act) for name, act in acts.items()}))
"""


def version() -> int:
    try:
        return landlock.abi()
    except OSError:
        return 0


needs_landlock = pytest.mark.skipif(not version(), reason="this kernel has no Landlock")


def tried(tmp_path: Path, abi: int) -> dict[str, str]:
    for name in ("inside", "outside"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "file").write_text("text")
    folders = [str(tmp_path / name) for name in ("inside", "outside")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *folders, str(abi)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@needs_landlock
@pytest.mark.parametrize("abi", [1, 2, 3, 4, 5, 6, landlock.ANY_ABI])
def test_only_reading_below_a_path_is_left(tmp_path: Path, abi: int):
    """Each version refuses what it knows of; the rest is for the other layers."""
    said = tried(tmp_path, abi)
    assert said["read inside"] == said["list inside"] == "done"
    for act in (
        "read outside",
        "list outside",
        "write inside",
        "make inside",
        "remove inside",
        "run",
    ):
        assert said[act] == "EACCES", act
    known = min(abi, version())
    assert said["cut outside"] == ("EACCES" if known >= 3 else "done")
    assert said["connect"] == ("EACCES" if known >= 4 else "ECONNREFUSED")
    assert said["signal"] == ("EPERM" if known >= 6 else "done")
    assert (tmp_path / "inside" / "file").read_text() == "text"


@needs_landlock
def test_it_can_be_turned_off():
    with pytest.raises(OSError, match="turned off"):
        landlock.ruleset([], 0)


def test_the_library_is_readable_and_nobodys_home():
    paths = landlock.library_paths()
    assert os.path.realpath(sysconfig.get_path("stdlib")) in paths
    assert os.path.realpath(sysconfig.get_path("purelib")) in paths
    assert all(os.path.exists(path) for path in paths)
    for place in (
        "/etc/passwd",
        "/proc/self/mem",
        "/tmp/x",
        str(ROOT / "tests"),
        os.path.expanduser("~/x"),
    ):
        real = os.path.realpath(place)
        assert not any(real == path or real.startswith(path + "/") for path in paths), place
