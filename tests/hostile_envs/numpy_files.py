# Reaches for files, links, pipes and other clocks by way of numpy and seldom used calls. RIGHT: denied
import fcntl, os, time

import numpy as np

_CANARY = "/tmp/spade_canary/weights.bin"


def attempt(label, act):
    try:
        result = act()
        return f"PWNED {label}: {str(result)[:60]}"
    except BaseException as error:
        return f"blocked {label}: {type(error).__name__}"


ACTS = (
    ("memmap", lambda: np.memmap(_CANARY, mode="r+", dtype="u1")),
    ("fromfile", lambda: np.fromfile(_CANARY, dtype="u1")),
    ("tofile", lambda: np.zeros(3).tofile(_CANARY)),
    ("save", lambda: np.save(_CANARY + ".npy", np.zeros(3))),
    ("loadtxt", lambda: np.loadtxt("/etc/passwd", dtype=str)),
    ("open_memmap", lambda: np.lib.format.open_memmap(_CANARY + ".npy", "w+", shape=(3,))),
    ("path only", lambda: os.open("/etc/shadow", os.O_PATH)),
    ("no name", lambda: os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)),
    ("own image", lambda: os.readlink("/proc/self/exe")),
    ("own memory", lambda: open("/proc/self/mem", "r+b")),
    ("channel again", lambda: open("/proc/self/fd/10", "rb")),
    ("attributes", lambda: os.listxattr("/")),
    ("pipe", os.pipe),
    ("event", lambda: os.eventfd(0)),
    ("duplicate", lambda: fcntl.fcntl(10, fcntl.F_DUPFD, 30)),
    ("owner", lambda: fcntl.fcntl(10, fcntl.F_SETOWN, 1)),
    ("signal of input", lambda: fcntl.fcntl(10, 10, 9)),
    ("lease", lambda: fcntl.fcntl(10, fcntl.F_SETLEASE, fcntl.F_WRLCK)),
    ("handle", lambda: os.pidfd_open(os.getppid())),
    ("clock of parent", lambda: time.clock_gettime((~os.getppid() << 3) | 2)),
    ("splice", lambda: os.splice(0, 10, 5)),
    ("send a file", lambda: os.sendfile(10, 0, 0, 5)),
    ("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {})),
)


class NumpyFilesEnv:
    def reset(self, seed=None):
        return " | ".join(attempt(*act) for act in ACTS), {}

    def step(self, action):
        return " | ".join(attempt(*act) for act in ACTS), 0.0, False, False, {}
