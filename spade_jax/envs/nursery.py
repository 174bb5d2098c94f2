"""Births and deaths of worker processes: the supervisor's zygotes and the spare workers they keep
ready. Standard library only.

A worker is forked by a zygote, confines itself and says so before it is given anything. A few are
born ahead of need: a program that finds one waits for its own loading only. None ever serves a
second program. What workers do in between is the supervisor's business.
"""

import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spade_jax.envs import limits, tier, wire

REPLICAS = 2  # zygotes: replay in the other one shows what depends on addresses or on hashes
BIRTH_S = 60.0  # a fork or a reaping that takes longer means that the zygote is stuck
_REFILL_S = 0.02  # after a spare is taken or one retires: loading a program comes first
_CHUNK = 1 << 16  # the longest word of a zygote is what its probe found
_NEVER = float("inf")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(eq=False)
class Batch:
    """Requests that a worker got in one frame and answers in order."""

    number: int
    count: int
    limit_s: float  # of each request
    frame: bytes
    ordered: float  # when it came
    done: int = 0  # requests that have been answered


@dataclass(eq=False)
class Worker:
    """One process, from the request to fork it until nobody waits for it any more."""

    birth: int
    zygote: "Zygote"
    channel: socket.socket
    progress: mmap.mmap
    number: int = 0  # the trainer's, 0 while it is a spare
    pid: int = 0  # 0 until it is forked
    deadline: float = _NEVER  # when to look after the request it is at, the fork, or the reaping
    confined: bool = False  # it said so; it is sent nothing before
    dying: bool = False  # its channel closed; the zygote is asked how it ended
    ended_alone: bool = False  # it was on its way out before it was killed
    worn: bool = False  # it has used half the processor time of a worker's life
    at_cap: bool = False  # it had used all of it
    queue: deque[Batch] = field(default_factory=deque)
    decoder: wire.Decoder = field(default_factory=lambda: wire.Decoder(wire.MAX_REPLY_BYTES))
    outbox: bytearray = field(default_factory=bytearray)
    blocked: bool = False  # the channel is full
    breach: str = ""  # what was wrong with its bytes; they are no longer read
    index: int = 0  # in its batch, of the request it was last seen at
    started: float = 0.0  # when it began that
    clock: float = 0.0  # its processor time then
    born_bytes: int = 0  # memory it had when it was confined
    grown_bytes: int = 0  # memory it has added since
    touched: bool = False  # it worked since its memory was measured


@dataclass(eq=False)
class Zygote:
    """A warm interpreter that forks workers."""

    replica: int
    package: str  # that it has imported; "" for the plain ones
    process: subprocess.Popen[bytes]
    control: socket.socket
    sandbox: tier.Sandbox | None = None  # what its probe found; None until it is ready
    spares: list[Worker] = field(default_factory=list)  # oldest first


class Nursery:
    """The zygotes, the spares, and the workers that are being born.

    Args:
        spares: workers kept ready by each zygote.
        weaken: layers of the sandbox to do without: see `confine.prepare`.
        package_path: folders, as JSON, where packages are looked for first.
        watch: call a function whenever a connection can be read; `unwatch` ends that.
        on_ready: all zygotes are up, for the first time; this is the least of what contains their
            workers.
        on_unfit: a zygote cannot confine workers.
        on_born: a worker has a process; what it sends can be read.
        on_failed: a worker could not be forked.
        on_reaped: a worker that was asked for has ended with this code.
        on_lost: a zygote ended, and the workers below it with it.
    """

    def __init__(
        self,
        memory_bytes: int,
        spares: int,
        weaken: str,
        package_path: str,
        *,
        watch: Callable[[socket.socket, Callable[[], None]], None],
        unwatch: Callable[[socket.socket], None],
        on_ready: Callable[[tier.Sandbox], None],
        on_unfit: Callable[[str], None],
        on_born: Callable[[Worker], None],
        on_failed: Callable[[Worker, str], None],
        on_reaped: Callable[[int, int], None],
        on_lost: Callable[[Zygote], None],
    ) -> None:
        self.refill_at = _NEVER
        self._memory_bytes = memory_bytes
        self._num_spares = spares
        self._weaken = weaken
        self._package_path = package_path
        self._watch = watch
        self._unwatch = unwatch
        self._on_ready = on_ready
        self._on_unfit = on_unfit
        self._on_born = on_born
        self._on_failed = on_failed
        self._on_reaped = on_reaped
        self._on_lost = on_lost
        self._last_birth = 0
        self._retired: list[Worker] = []  # to be ended with the next refill
        self._unborn: dict[int, Worker] = {}  # asked for and not yet forked, by birth
        self._told_ready = False
        self.zygotes = [self._start(replica, "") for replica in range(REPLICAS)]

    def stop(self) -> None:
        """End every process below this one."""
        for zygote in self.zygotes:
            zygote.process.kill()
            zygote.process.wait()
        limits.sweep()

    def claim(self, replica: int, package: str) -> Worker:
        """A worker for a program: the oldest spare, or one that is yet to be forked."""
        zygote = self._zygote(replica, package)
        if self._num_spares:
            self.refill_at = min(self.refill_at, time.monotonic() + _REFILL_S)
        return zygote.spares.pop(0) if zygote.spares else self._fork(zygote)

    def refill(self) -> None:
        """End those that retired; have each zygote that lacks a spare fork one, and the next when
        that is born."""
        self.refill_at = _NEVER
        for worker in self._retired:
            self.drop(worker)
        self._retired.clear()
        for zygote in self.zygotes:
            born = all(spare.confined for spare in zygote.spares)
            if zygote.sandbox and born and len(zygote.spares) < self._num_spares:
                zygote.spares.append(self._fork(zygote))

    def confined(self, worker: Worker) -> None:
        """A worker is ready for its program; if it stays a spare, the next may be born."""
        if worker.number == 0:
            self.refill_at = time.monotonic()

    def retire(self, worker: Worker) -> None:
        """End a worker that has nothing to do, a little later: as a rule it makes room for another,
        and ending it now would take processors from that one's loading."""
        self._unwatch(worker.channel)
        self._retired.append(worker)
        self.refill_at = min(self.refill_at, time.monotonic() + _REFILL_S)

    def drop(self, worker: Worker) -> None:
        """Forget a worker that is done with; end it, unless that was asked for already."""
        self._unwatch(worker.channel)
        worker.channel.close()
        worker.progress.close()
        spares = worker.zygote.spares
        if worker in spares:  # not replaced at once: what ends one may end the next
            spares.remove(worker)
        if worker.pid and not worker.dying:
            self.reap(worker)

    def reap(self, worker: Worker) -> None:
        """End a worker and have its zygote say how it ended."""
        with contextlib.suppress(ProcessLookupError):  # its zygote is gone, and it with it
            os.kill(worker.pid, signal.SIGKILL)
        self._tell(worker.zygote, ["reap", worker.pid])

    def replace(self, zygote: Zygote) -> None:
        """Start another zygote for one that ended; that of a package when it is asked for."""
        self.zygotes.remove(zygote)
        # What it may leave is tried again the next time.
        limits.sweep(keep=[other.process.pid for other in self.zygotes])
        if not zygote.package:
            self.zygotes.append(self._start(zygote.replica, ""))

    def _zygote(self, replica: int, package: str) -> Zygote:
        """The zygote asked for. Those of packages start when first asked for; what they are told
        meanwhile waits in their control."""
        for zygote in self.zygotes:
            if (zygote.replica, zygote.package) == (replica, package):
                return zygote
        self.zygotes.append(self._start(replica, package))
        return self.zygotes[-1]

    def _start(self, replica: int, package: str) -> Zygote:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            arguments = (theirs.fileno(), os.getpid(), self._memory_bytes, self._weaken)
            # A few datasets of packages depend on the order of hashes, and fail replay by it.
            hash_seed = 0 if package else replica
            process = subprocess.Popen(
                limits.command("spade_jax.envs.zygote", *arguments, package, self._package_path),
                pass_fds=[theirs.fileno()],
                env=limits.environment(hash_seed=hash_seed),
                stdin=subprocess.DEVNULL,
            )
        zygote = Zygote(replica, package, process, ours)
        self._watch(ours, lambda: self._read(zygote))
        return zygote

    def _fork(self, zygote: Zygote) -> Worker:
        self._last_birth += 1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        page = os.memfd_create("progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(page, mmap.PAGESIZE)
        fcntl.fcntl(page, fcntl.F_ADD_SEALS, _SEALS)  # cut short, it would end its readers
        worker = Worker(self._last_birth, zygote, ours, mmap.mmap(page, mmap.PAGESIZE))
        worker.deadline = time.monotonic() + BIRTH_S
        self._unborn[worker.birth] = worker
        with theirs:
            self._tell(zygote, ["fork", worker.birth], [theirs.fileno(), page])
        os.close(page)
        return worker

    def _tell(
        self, zygote: Zygote, message: list[Any], descriptors: list[int] | None = None
    ) -> None:
        try:
            socket.send_fds(zygote.control, [json.dumps(message).encode()], descriptors or [])
        except BlockingIOError:  # it has stopped listening
            zygote.process.kill()
        except ConnectionError:
            pass  # its end is handled when its control closes

    def _read(self, zygote: Zygote) -> None:
        try:
            data = zygote.control.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._lost(zygote)
            return
        operation, *arguments = json.loads(data)
        if operation == "ready":
            zygote.sandbox = tier.loads(*arguments)
            found = [other.sandbox for other in self.zygotes if other.sandbox]
            if not self._told_ready and len(found) == REPLICAS:
                self._told_ready = True  # once: the trainer waits for it only at the start
                self._on_ready(tier.worst(found))
            self.refill_at = time.monotonic()
        elif operation == "unfit":
            self._on_unfit(*arguments)
        elif operation == "forked":
            self._forked(zygote, *arguments)
        elif operation == "failed":
            birth, detail = arguments
            worker = self._unborn.pop(birth)
            if worker.number:
                self._on_failed(worker, f"fork: {detail}")
            else:
                self.drop(worker)
        else:
            self._on_reaped(*arguments)

    def _forked(self, zygote: Zygote, birth: int, pid: int) -> None:
        worker = self._unborn.pop(birth)
        worker.pid = pid
        if worker.channel.fileno() < 0:  # killed while it was being born
            self._tell(zygote, ["reap", pid])
            return
        self._on_born(worker)

    def _lost(self, zygote: Zygote) -> None:
        self._unwatch(zygote.control)
        zygote.control.close()
        zygote.process.kill()
        zygote.process.wait()
        if zygote.sandbox is None and not zygote.package:
            raise RuntimeError(
                f"a zygote ended with code {zygote.process.returncode} while starting"
            )
        self._unborn = {b: w for b, w in self._unborn.items() if w.zygote is not zygote}
        retired = [worker for worker in self._retired if worker.zygote is zygote]
        self._retired = [worker for worker in self._retired if worker.zygote is not zygote]
        for worker in [*zygote.spares, *retired]:
            worker.dying = True  # nobody is left to ask
            self.drop(worker)
        self._on_lost(zygote)
