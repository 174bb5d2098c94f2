"""A process in namespaces of its own: what it sees and may do there, and how it ends. Each is
started by a fresh process, which has one thread as the supervisor has."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import as_user
import pytest

from spade_jax.envs import namespaces

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(bool(as_user.reason()), reason=as_user.reason())
START = """
import json, os, socket, sys
from spade_jax.envs import namespaces
code, *needed = sys.argv[1:]
ours, theirs = socket.socketpair()
command = [sys.executable, "-c", code, str(theirs.fileno())]
try:
    process = namespaces.start(command, {"ONLY": "this"}, theirs.fileno(), needed)
except namespaces.ApartError as error:
    layer = error.layer
    print(json.dumps([layer.name, layer.present, layer.detail, layer.fix]))
    sys.exit()
theirs.close()
"""
LOOK = """
import ctypes, glob, json, os, socket, sys
def tried(act):
    try:
        act()
        return "done"
    except OSError as error:
        return error.strerror
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
told = {
    "pid": os.getpid(), "parent": os.getppid(), "uid": os.getuid(), "environment": dict(os.environ),
    "seen": glob.glob("/proc/[0-9]*"), "devices": [name for _, name in socket.if_nameindex()],
    "open": sorted(int(n) for n in os.listdir("/proc/self/fd")), "input": sys.stdin.read(),
    "capabilities": int(status["CapEff"], 16),
    "bounds": int(status["CapBnd"], 16),
    "tmp": tried(lambda: open("/tmp/spade_jax_planted", "w")),
    "kernel": tried(lambda: open("/proc/sys/kernel/core_pattern", "w")),
    "root": tried(lambda: os.mkdir("/spade_jax_planted")),
    "own": tried(lambda: open("/dev/shm/mine", "w").write("x")),
    "large": tried(lambda: open("/dev/shm/large", "wb").write(bytes(2 << 20))),
    "remount": ctypes.CDLL(None).mount(b"none", b"/", None, ctypes.c_ulong(32 | 4096), None),
    "network": tried(lambda: socket.create_connection(("127.0.0.1", 9), 1)),
    "null": tried(lambda: open("/dev/null", "w").write("x")),
}
pids = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pids.append(pid)
    os.waitpid(pid, 0)
told["children"] = pids
socket.socket(fileno=int(sys.argv[1])).sendall(json.dumps(told).encode())
"""


END = """
told = json.loads(ours.makefile().read())
told["code"], told["kind"] = process.wait(), process.kind
print(json.dumps(told))
"""


def ran(code: str, *arguments: str, user: bool = False, less: bool = False) -> str:
    """What a fresh process prints, of root, of root with less privilege, or of a normal user."""
    words = [sys.executable, "-c", code, *arguments]
    if less:
        words = ["setpriv", "--bounding-set", "-sys_admin", *words]
    with as_user.command(*words) if user else contextlib.nullcontext(words) as command:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("user", [False, True])
def test_what_a_process_there_sees_and_may(user: bool):
    told = json.loads(ran(START + END, LOOK, user=user))
    assert (told["pid"], told["parent"], told["code"]) == (1, 0, 0)
    assert told["uid"] == (as_user.USER if user else 0)
    assert told["kind"] == ("user " if user else "") + "ipc mount net pid"
    assert told["environment"].pop("LC_CTYPE", "") in ("", "C.UTF-8")  # of Python's own making
    assert told["environment"] == {"ONLY": "this", **namespaces._WRITABLE}
    assert told["seen"] == ["/proc/1"]
    assert told["devices"] == ["lo"] and told["network"] == "Network is unreachable"
    assert told["input"] == "" and len(told["open"]) == 5  # one is of this look
    assert told["tmp"] == told["root"] == told["kernel"] == "Read-only file system"
    assert told["own"] == told["null"] == "done"
    assert told["large"] == "No space left on device"
    assert told["remount"] == -1
    assert told["capabilities"] == (0 if user else 0b11100110)
    assert told["bounds"] == 0b11100110
    first, second = told["children"]
    assert second == first + 1 and first > namespaces._FIRST_PID
    assert not Path("/tmp/spade_jax_planted").exists()


def test_two_of_them_number_their_processes_differently():
    """A program that goes by its number must fail replay in the other zygote."""
    first, second = (json.loads(ran(START + END, LOOK))["children"] for _ in range(2))
    assert not set(first) & set(second)


TREE = """
import os, socket, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
socket.socket(fileno=int(sys.argv[1])).sendall(b"x")
time.sleep(600)
"""
KILLS = """
from pathlib import Path
assert ours.recv(1) == b"x"
below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
process.kill()
print(len(below), process.wait(), process.returncode)
print([pid for pid in below if Path("/proc", pid).exists()])
process.kill()
"""


def test_its_end_is_the_end_of_all_below_it():
    assert ran(START + KILLS, TREE) == "3 -9 -9\n[]\n"


def test_it_does_not_outlive_its_parent(all_gone: Callable[..., bool]):
    say = "assert ours.recv(1) == b'x'\nprint(process.pid, flush=True)\nos.kill(os.getpid(), 9)"
    words = [sys.executable, "-c", START + say, TREE]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == -9
    assert all_gone({int(done.stdout)}, 2)


@pytest.mark.parametrize(
    ("change", "detail", "fix"),
    [
        ("needed = ['/nowhere']", "read /nowhere: No such file or directory (ENOENT)", "Python"),
        (
            "command[0] = '/nowhere'",
            "exec /nowhere: No such file or directory (ENOENT)",
            "AppArmor",
        ),
        (
            "os.setresuid(1, 1, 1); namespaces._NEW_USER = 0",
            "clone: Operation not permitted (EPERM)",
            "run as root",
        ),
        (
            "namespaces._MOUNT_SETATTR = 9999",
            "read-only: Function not implemented (ENOSYS)",
            "5.12",
        ),
    ],
)
def test_what_cannot_be_done_is_told_with_its_errno(change: str, detail: str, fix: str):
    code = START.replace("try:", change + "\ntry:", 1)
    name, present, text, remedy = json.loads(ran(code, "pass"))
    assert (name, present, text) == ("namespaces", False, detail)
    assert fix in remedy


def test_root_without_the_privilege_takes_users_as_well():
    """As in a container: all of its users are there, so that workers get their own."""
    look = LOOK.replace('"pid": os', '"map": open("/proc/self/uid_map").read(), "pid": os')
    told = json.loads(ran(START + END, look, less=True))
    assert told["kind"] == "user ipc mount net pid"
    assert told["uid"] == 0 and told["remount"] == -1
    assert told["map"].split() == Path("/proc/self/uid_map").read_text().split()


def test_numbers_are_translated_and_those_of_the_dead_are_nobodys():
    code = """
import os, signal, subprocess
from spade_jax.envs import limits, namespaces
child = subprocess.Popen(["sleep", "60"])
process = os.pidfd_open(child.pid)
assert namespaces.outer_pid(process) == child.pid
child.kill()
assert namespaces.outer_pid(process) == child.pid  # a zombie has its number
child.wait()
gone = namespaces.outer_pid(process)
print(gone > 1 << 22, limits.state(gone), limits.cpu_s(gone), limits.resident(gone))
"""
    assert ran(code) == "True ? 0.0 0\n"
