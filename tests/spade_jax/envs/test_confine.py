"""What a worker has given up, seen from outside it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from spade_jax.envs import confine
from spade_jax.types import Fault

ROOT = Path(__file__).resolve().parents[3]
TELLING = """
import os

class TellingEnv:
    def reset(self, seed):
        return str(os.getpid())

    def step(self, action):
        return "ok", 0.0, False, False, {}
"""


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_the_kernel_says_what_a_worker_is(shared, seen_pid):
    async def play() -> list[dict[str, str]]:
        instances = [await shared.pool.open(f"{TELLING}# {n}", 1) for n in range(2)]
        assert not any(isinstance(instance, Fault) for instance in instances)
        found = [status(seen_pid(int(instance.observation))) for instance in instances]
        for instance in instances:
            await instance.close()
        return found

    found = shared.run(play())
    for about in found:
        assert about["NoNewPrivs"] == "1"
        assert about["Seccomp"] == "2"
        assert about["Threads"] == "1"
        for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
            assert int(about[name], 16) == 0
        users = set(about["Uid"].split())
        assert len(users) == 1
        if os.geteuid() == 0:
            assert int(users.pop()) >= 1000
            assert int(about["Gid"].split()[0]) >= 1000
            assert about["Groups"] == ""
    if os.geteuid() == 0:
        assert found[0]["Uid"] != found[1]["Uid"]


@pytest.mark.parametrize(
    ("uid_map", "first", "count"),
    [
        ("         0          0 4294967295\n", 2_100_000_000, 1 << 22),
        ("0 100000 65536\n", 49_150, 16_384),
        ("0 1000 1\n1 100000 65536\n", 49_151, 16_384),
        ("0 1000 1\n", -1, 0),  # nobody but itself
    ],
)
def test_user_ids_of_workers_lie_in_the_map(uid_map: str, first: int, count: int):
    spare = confine.spare_uids(uid_map)
    assert len(spare) == count
    if count:
        assert spare[0] == first
        assert spare[0] >= 1000


KEEP = """
import fcntl, os, sys
from spade_jax.envs import confine
given, channel, rules = map(int, sys.argv[1:])
place = fcntl.fcntl(os.open("/", os.O_RDONLY), fcntl.F_DUPFD, 100)
given = fcntl.fcntl(given, fcntl.F_DUPFD, 100)
os.dup2(given, channel)
os.dup2(place, rules)
kept = confine._keep_only(channel, rules)
def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
nowhere = [os.path.samestat(os.fstat(n), os.stat("/dev/null")) for n in range(3)]
rest = [n for n in range(3, 1000) if is_open(n)] == [10, kept]
os.write(10, repr((nowhere, rest, os.path.samestat(os.fstat(kept), os.stat("/")))).encode())
"""


@pytest.mark.parametrize(("channel", "rules"), [(20, 21), (10, 20), (20, 10), (11, 10), (10, 11)])
def test_channel_and_rules_do_not_get_into_each_others_way(channel: int, rules: int):
    """Whatever numbers they come with."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        number = theirs.fileno()
        command = [sys.executable, "-c", KEEP, *map(str, (number, channel, rules))]
        subprocess.run(command, cwd=ROOT, pass_fds=[number], check=True)
        assert ours.recv(1000) == b"([True, True, True], True, True)"
