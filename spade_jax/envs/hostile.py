"""Runs a folder of hostile programs in confined workers and says what became of each, and of the
host.

The first line of a program says which outcome is right for it: `# What it does. RIGHT: timeout|
env_error (a remark)`. Beside the outcomes of `types.Outcome` there are `denied` (each of its
attempts reports `blocked`), `harmless` (it was played to the end and nothing happened) and `replay`
(its transcript differs between two workers). A program that reports PWNED was right about nothing.

The host checks see what the programs of this folder aim at: a canary file and a listening port that
are made for them, a sibling worker, the processes, descriptors and shared memory of this run. They
do not see the whole host. Never run such a program anywhere else.
"""

import asyncio
import contextlib
import errno
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from spade_jax.envs import api
from spade_jax.envs.limits import Limits
from spade_jax.envs.pool import Instance, Pool
from spade_jax.errors import SandboxError
from spade_jax.types import Fault, Outcome

CANARY = Path("/tmp/spade_canary")  # these two stand in the programs: one run at a time has them
PORT = 47123
_TURN_S = 1800.0  # to wait for another run to end
_TURN_TICK_S = 0.1
_WEIGHTS = b"\0weights\0" * 1000
_ACTIONS = ("look", "x" * api.MAX_ACTION_CHARS, "1", "", "north", "7 7")
_SEED = 1
_TRIES = 3
_MAX_BYTES = 1 << 20  # of a program; those above the pool's own limit show that it is kept
_REMARK = re.compile(r"\([^()]*\)")
_CAUGHT = "caught by the "  # "caught by the replay check" says the same as "replay"
_FOLDERS = (Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), Path("/"))
_PASSING_S = 5.0
_IPC = tuple(Path("/proc/sysvipc") / kind for kind in ("shm", "sem", "msg"))
_SIBLING = """
import os

class SiblingEnv:
    def reset(self, seed):
        self.total = seed
        return f"sibling {os.getpid()}", {}

    def step(self, action):
        self.total = self.total * 31 % 1009
        return f"{os.getpid()} {self.total}", 0.0, False, False, {}
"""


@dataclass(frozen=True)
class Result:
    """One row: a program and its outcome, or a check of the host, whose right word is
    "untouched"."""

    kind: Literal["program", "host"]
    name: str
    right: tuple[str, ...]
    got: str
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.got in self.right


def right_outcomes(program: str) -> tuple[str, ...]:
    """The outcomes that the first line of a program allows; none if it does not say."""
    first = program.partition("\n")[0]
    _, said, text = first.partition("RIGHT:")
    if not said:
        return ()
    words = (word.strip() for word in _REMARK.sub("", text).split("|"))
    return tuple(
        word.removeprefix(_CAUGHT).removesuffix(" check") if word.startswith(_CAUGHT) else word
        for word in words
        if word
    )


async def run_folder(
    folder: Path, limits: Limits, *, at_once: int = 4, weaken: str = ""
) -> list[Result]:
    """Play every program of `folder`, a few `at_once`; one row each, then the rows of the host.

    `weaken` is that of `Pool`.

    Raises:
        SandboxError: the pool cannot run, the folder has no program or one that does not say what
            is right, or the port of the programs does not get free.
    """
    programs = read_folder(folder)
    with _Host(programs, await _port(_TURN_S)) as host:
        async with Pool(limits, weaken=weaken) as pool:
            if pool.sandbox.tier == "C":  # even if the user has accepted it for other programs
                raise SandboxError(f"hostile programs are not run here: {pool.sandbox.refusal()}")
            await host.watch(pool)
            turns = asyncio.Semaphore(at_once)

            async def play(name: str, program: str) -> Result:
                async with turns:
                    for _ in range(_TRIES):  # a crowded host says nothing of the program
                        got, detail = await _outcome(pool, program)
                        if got != Outcome.INFRASTRUCTURE:
                            break
                    await host.look()
                shown = "".join(c if c.isprintable() else "?" for c in detail)
                return Result("program", name, right_outcomes(program), got, shown)

            results = await asyncio.gather(*(play(*item) for item in programs.items()))
            host.before_close()
        host.after_close()
        return [*results, *host.results()]


def read_folder(folder: Path) -> dict[str, str]:
    """The programs of a folder by name.

    Raises:
        SandboxError: there is none, or one that cannot be read or does not say what is right.
    """
    try:
        programs = {path.stem: _read(path) for path in sorted(folder.glob("*.py"))}
    except (OSError, UnicodeDecodeError) as error:
        raise SandboxError(f"a program of {folder} cannot be read: {error}") from error
    if not programs:
        raise SandboxError(f"{folder} holds no program: expected *.py files")
    for name, program in programs.items():
        if not right_outcomes(program):
            raise SandboxError(
                f"{folder / name}.py does not say what is right: expected a first line such as "
                "`# Spins for ever. RIGHT: timeout`"
            )
    return programs


def _read(path: Path) -> str:
    if not path.is_file():  # a pipe would keep its reader for ever
        raise OSError(f"{path} is not a file")
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise OSError(f"{path} has more than {_MAX_BYTES} bytes")
    return data.decode()


async def _port(patience_s: float) -> socket.socket:
    """The listener that programs look for; waits for those who have it, such as another run.

    Raises:
        SandboxError: they keep it.
    """
    give_up, told = time.monotonic() + patience_s, False
    while True:
        listener = socket.socket()
        try:
            # A connection of an earlier run may linger; a living listener is refused all the same.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", PORT))
            listener.listen()
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or time.monotonic() > give_up:
                raise SandboxError(
                    f"port {PORT} is taken ({error}): is another run of hostile programs going on?"
                ) from error
            if not told:
                print(f"waiting for port {PORT}, which another process has ...", file=sys.stderr)
                told = True
            await asyncio.sleep(_TURN_TICK_S)
        else:
            listener.setblocking(False)
            return listener


async def _outcome(pool: Pool, program: str) -> tuple[str, str]:
    """What became of a program, as a word and a text: played in one worker and, if it had no fault
    there, once more in a worker of the other zygote."""
    plays = []
    for replica in (0, 1):
        seen, fault = await _play(pool, program, replica)
        for text in seen:
            if "PWNED" in text:
                return "pwned", text
        if fault is not None:
            return fault.outcome.value, fault.detail
        plays.append(seen)
    attempts = [attempt for text in plays[0][1:] for attempt in text.split(" | ")]
    if all(attempt.startswith("blocked") for attempt in attempts):
        return "denied", plays[0][1]
    if plays[0] != plays[1]:
        return "replay", "its transcript differs between two workers"
    return "harmless", plays[0][1]


async def _play(pool: Pool, program: str, replica: int) -> tuple[list[str], Fault | None]:
    instance = await pool.open(program, _SEED, replica)
    if isinstance(instance, Fault):
        return [], instance
    seen = [instance.observation]
    try:
        for action in _ACTIONS:
            reply = await instance.step(action)
            if isinstance(reply, Fault):
                return seen, reply
            seen.append(reply.observation)
            if reply.terminated or reply.truncated:
                break
    finally:
        await instance.close()
    return seen, None


@dataclass
class _Host:
    """What is laid out for the programs, and what is looked at before, between and after."""

    programs: dict[str, str]
    listener: socket.socket  # it is closed here
    found: dict[str, str] = field(default_factory=dict)  # what is wrong, by check

    def __enter__(self) -> "_Host":
        shutil.rmtree(CANARY, ignore_errors=True)
        try:
            CANARY.mkdir()
            CANARY.chmod(0o777)  # only the sandbox keeps a program out
            weights = CANARY / "weights.bin"
            weights.write_bytes(_WEIGHTS)
            weights.chmod(0o666)
        except OSError as error:
            self.listener.close()
            raise SandboxError(
                f"the canary {CANARY} that hostile programs look for cannot be laid out: "
                f"{error.strerror}; remove what is there, or make the folder above writable"
            ) from error
        self._canary = _state(CANARY)
        self._files = self._named_files()
        self._ipc = _ipc()
        self._descriptors = _descriptors("self")
        self._before = _descendants(os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.close()
        shutil.rmtree(CANARY, ignore_errors=True)

    async def watch(self, pool: Pool) -> None:
        """Start the sibling, and note the processes of the pool that live as long as it does: the
        supervisor and its zygotes, below which come the workers."""
        self._sibling = await _opened(pool)
        self._pid = self._sibling.observation.split()[-1]
        self._total = _SEED
        self._turn = asyncio.Lock()
        self._num_spares = 2 * pool.limits.spare_workers  # those not yet born, at most
        self._ours = {
            pid: _descriptors(str(pid)) for pid in _descendants(os.getpid(), depth=2) - self._before
        }

    async def look(self) -> None:
        """Have the sibling make one step, which must come out as if it were alone."""
        async with self._turn:
            self._total = self._total * 31 % 1009
            reply = await self._sibling.step("x")
            if isinstance(reply, Fault):
                self.found.setdefault("sibling", reply.detail)
            elif reply.observation != f"{self._pid} {self._total}":
                self.found.setdefault("sibling", f"it answered {reply.observation[:80]!r}")

    def before_close(self) -> None:
        """Look at the processes of ours, which must be the same as at the start."""
        lost = self._ours.keys() - _descendants(os.getpid())
        if lost:
            self.found["supervisor"] = f"{len(lost)} of {len(self._ours)} processes of ours died"
        for pid, before in self._ours.items():
            # A live worker's channel and page of progress, twice while it is being forked.
            allowed = before + 4 * (len(self.programs) + self._num_spares)
            if pid not in lost and (now := _descriptors(str(pid))) > allowed:
                self.found["supervisor"] = f"{now} descriptors open in a process of ours"

    def after_close(self) -> None:
        """Look for what is left when the pool is gone."""
        if left := _descendants(os.getpid()) - self._before:
            self.found["processes"] = f"{len(left)} left: {sorted(left)[:5]}"
        if (now := _descriptors("self")) != self._descriptors:
            self.found["descriptors"] = f"{self._descriptors} before, {now} after"
        if (state := _state(CANARY)) != self._canary:
            names = sorted(
                name for name in self._canary | state if self._canary.get(name) != state.get(name)
            )
            self.found["canary"] = f"changed: {', '.join(names)}"
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()[0].close()
            self.found["port"] = "somebody connected to it"
        if new := self._named_files() - self._files:
            self.found["files"] = f"new: {', '.join(sorted(new)[:5])}"
        if left := self._shared_left():
            self.found["shared memory"] = f"new: {', '.join(sorted(left)[:5])}"

    def results(self) -> Iterator[Result]:
        """One row for each check."""
        checks = (
            "canary",
            "port",
            "files",
            "shared memory",
            "sibling",
            "supervisor",
            "processes",
            "descriptors",
        )
        for name in checks:
            yield Result("host", name, ("untouched",), self.found.get(name, "untouched"))

    def _shared_left(self) -> set[str]:
        """Shared memory that was not there before and stays: what other runs on this machine make,
        to try their walls, is gone in a moment."""
        give_up = time.monotonic() + _PASSING_S
        while (left := _ipc() - self._ipc) and time.monotonic() < give_up:
            time.sleep(0.05)
        return left

    def _named_files(self) -> set[str]:
        """Files in open folders whose names stand in a program; others come and go."""
        text = "\n".join(self.programs.values())
        return {
            str(path)
            for folder in _FOLDERS
            if folder.is_dir()
            for path in folder.iterdir()
            if path.name in text and path != CANARY
        }


async def _opened(pool: Pool) -> Instance:
    sibling = await pool.open(_SIBLING, _SEED)
    if isinstance(sibling, Fault):
        raise SandboxError(f"an ordinary program does not run: {sibling.detail}")
    return sibling


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Of a folder and all in it: owner, mode, size, times and content."""
    found = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        try:
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
        except OSError as error:
            found[str(path)] = (str(error),)
            continue
        about = (status.st_uid, status.st_gid, status.st_mode, status.st_nlink, status.st_mtime_ns)
        found[str(path)] = (*about, status.st_ctime_ns, content)
    return found


def _ipc() -> set[str]:
    """Name all System V objects: their kind and number."""
    found = set()
    for path in filter(Path.exists, _IPC):
        found |= {f"{path.name} {line.split()[1]}" for line in path.read_text().splitlines()[1:]}
    return found


def _descriptors(pid: str) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _descendants(pid: int, depth: int | None = None) -> set[int]:
    """All processes below one, or so many levels of them, zombies included."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    found: set[int] = set()
    waiting = {pid}
    while waiting and depth != 0:
        waiting = {child for child, parent in parents.items() if parent in waiting}
        found |= waiting
        depth = None if depth is None else depth - 1
    return found
