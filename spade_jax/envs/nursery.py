"""Births and deaths of worker processes: the supervisor's zygotes and the spare workers they keep
ready. Standard library only.

A zygote lives in namespaces of its own and in the pool's cgroup where this host has them. A worker
is forked by a zygote, confines itself and says so before it is given anything. A few are born ahead
of need: a program that finds one waits for its own loading only. None ever serves a second program.
What workers do in between is the supervisor's business.

A worker's number in its zygote's namespace is not the one it has here. The zygote, which has not
reaped it, opens a descriptor of it: who is signalled by that is never a stranger.
"""

import contextlib
import dataclasses
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spade_jax.envs import apart, cgroup, limits, namespaces, tier, wire

REPLICAS = 2  # zygotes: replay in the other one shows what depends on addresses or on hashes
BIRTH_S = 60.0  # a fork or a reaping that takes longer means that the zygote is stuck
_REFILL_S = 0.02  # after a spare is taken or one retires: loading a program comes first
_CHUNK = 1 << 16  # the longest word of a zygote is what its probe found
_NEVER = float("inf")
_MAX_ASKED = 32  # of a zygote at once: its control holds no more than some hundred words
_FILES = 5  # of a worker, here: a channel, a page and a process; while it is born, two more
_OTHER_FILES = 64
_MAX_RETIRED = 16  # workers that are to be ended a little later
_MAX_ZYGOTES = 12  # of this package and of others, and
_WORKER_BYTES = 4 << 20  # of one that has done nothing: bounds of what the cgroup allows for
_BASE_BYTES = 64 << 20
_BASE_PROCESSES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def num_files(max_workers: int, spares: int) -> int:
    """Descriptors that a supervisor may have open at once."""
    return _FILES * (max_workers + _MAX_RETIRED + spares * _MAX_ZYGOTES) + _OTHER_FILES


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
    pid: int = 0  # as seen from here; 0 until it is forked
    process: int = -1  # a descriptor of it; -1 where the kernel has none: its number will do then
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

    def kill(self) -> None:
        """End it; whoever has its number by now, no other is hit."""
        with contextlib.suppress(ProcessLookupError):  # its zygote is gone, and it with it
            if self.process >= 0:
                signal.pidfd_send_signal(self.process, signal.SIGKILL)
            else:
                os.kill(self.pid, signal.SIGKILL)


@dataclass(eq=False)
class Zygote:
    """A warm interpreter that forks workers."""

    replica: int
    package: str  # that it has imported; "" for the plain ones
    process: subprocess.Popen[bytes] | namespaces.Process
    control: socket.socket
    group: cgroup.Group | None = None  # of itself and its workers, in that of the pool
    bait: apart.Bait | None = None  # while it tries to reach it
    sandbox: tier.Sandbox | None = None  # what its probe found; None until it is ready
    spares: list[Worker] = field(default_factory=list)  # oldest first
    num_asked: int = 0  # words that it has not answered
    untold: deque[tuple[list[Any], list[int]]] = field(default_factory=deque)  # with descriptors


class Nursery:
    """The zygotes, the spares, and the workers that are being born.

    Args:
        spares: workers kept ready by each zygote.
        weaken: layers of the sandbox to do without: "namespaces", "cgroup", and those of
            `confine.prepare`.
        package_path: folders, as JSON, where packages are looked for first.
        pool_memory_bytes: memory that all workers together may add, and
        max_workers: how many the trainer wants at once: the cgroup allows a little more.
        watch: call a function whenever a connection can be read; `unwatch` ends that.
        on_ready: all zygotes are up, for the first time; this is the least of what contains their
            workers.
        on_unfit: a zygote cannot confine workers.
        on_born: a worker has a process; what it sends can be read.
        on_failed: a worker could not be forked.
        on_reaped: the worker of this birth, which was asked for, has ended with this code.
        on_lost: a zygote ended, and the workers below it with it.
    """

    def __init__(
        self,
        memory_bytes: int,
        spares: int,
        weaken: str,
        package_path: str,
        *,
        pool_memory_bytes: int,
        max_workers: int,
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
        self._told: tier.Sandbox | None = None  # what the trainer knows; nobody lives in less
        self._num_started = 0
        self._no_namespaces: tier.Layer | None = None
        if "namespaces" in weaken.split(","):
            self._no_namespaces = _turned_off(tier.NAMESPACES)
        self._group: cgroup.Group | None = None
        self._no_group: tier.Layer | None = None
        if "cgroup" in weaken.split(","):
            self._no_group = _turned_off(tier.CGROUP)
        else:
            self._make_group(pool_memory_bytes, max_workers)
        self.zygotes = [self._start(replica, "") for replica in range(REPLICAS)]

    def stop(self) -> None:
        """End every process below this one."""
        for zygote in self.zygotes:
            zygote.process.kill()
            zygote.process.wait()
            if zygote.bait is not None:
                zygote.bait.close()
        limits.sweep()
        if self._group is not None:
            self._group.remove()

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
        if len(self._retired) > _MAX_RETIRED:  # they hold memory and descriptors as before
            self.drop(self._retired.pop(0))
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
        if worker.process >= 0:
            os.close(worker.process)
            worker.process = -1

    def reap(self, worker: Worker) -> None:
        """End a worker and have its zygote say how it ended."""
        worker.kill()
        self._ask(worker.zygote, ["reap", worker.birth], [])

    def replace(self, zygote: Zygote) -> None:
        """Start another zygote for one that ended; that of a package when it is asked for."""
        self.zygotes.remove(zygote)
        # What it may leave is tried again the next time.
        limits.sweep(keep=[other.process.pid for other in self.zygotes])
        if zygote.group is not None:
            zygote.group.remove()
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
            # A few datasets of packages depend on the order of hashes, and fail replay by it.
            hash_seed = 0 if package else replica
            process = self._run(theirs.fileno(), package, limits.environment(hash_seed=hash_seed))
        zygote = Zygote(replica, package, process, ours)
        self._watch(ours, lambda: self._read(zygote))
        return zygote

    def _run(
        self, control: int, package: str, environment: dict[str, str]
    ) -> subprocess.Popen[bytes] | namespaces.Process:
        """A zygote's process: in namespaces if they can be had."""

        def command(parent: int) -> list[str]:
            arguments = (control, parent, self._memory_bytes, self._weaken, package)
            return limits.command("spade_jax.envs.zygote", *arguments, self._package_path)

        if self._no_namespaces is None:
            try:
                nobody = 0  # that is visible from inside
                needed = (os.__file__, __file__)
                return namespaces.start(command(nobody), environment, control, needed)
            except namespaces.ApartError as error:
                self._no_namespaces = error.layer
        return subprocess.Popen(
            command(os.getpid()), pass_fds=[control], env=environment, stdin=subprocess.DEVNULL
        )

    def _make_group(self, pool_memory_bytes: int, max_workers: int) -> None:
        spares = _MAX_ZYGOTES * self._num_spares
        memory_bytes = pool_memory_bytes + _BASE_BYTES + _WORKER_BYTES * (max_workers + spares)
        processes = 2 * max_workers + spares + _BASE_PROCESSES
        try:
            self._group = cgroup.create(memory_bytes, processes)
        except OSError as error:
            self._no_group = cgroup.missing(error)
            return
        self._extent = f"{memory_bytes >> 20} MiB and {processes} processes in all"

    def _settle(self, zygote: Zygote) -> None:
        """Put a zygote that has loaded all into its group, and have it try what it is now refused;
        what it loaded does not count against the limit."""
        in_group = self._no_group
        if in_group is None and self._group is not None:
            self._num_started += 1
            try:
                zygote.group = self._group.below(str(self._num_started))
                zygote.group.limit(apart.TRIAL_BYTES, apart.TRIAL_PROCESSES)
                zygote.group.join(zygote.process.pid)
                in_group = tier.Layer(tier.CGROUP, True, self._extent)
            except OSError as error:
                in_group = cgroup.missing(error)
        in_namespaces = self._no_namespaces
        if isinstance(zygote.process, namespaces.Process):
            in_namespaces = tier.Layer(tier.NAMESPACES, True, zygote.process.kind)
        zygote.bait = apart.Bait()
        layers = [dataclasses.asdict(layer) for layer in (in_namespaces, in_group) if layer]
        least = self._told.tier if self._told else tier.TIERS[-1]
        self._tell(zygote, ["try", [layers, zygote.bait.told, least]])

    def _settled(self, zygote: Zygote, sandbox: tier.Sandbox) -> None:
        """Let a zygote have workers."""
        if zygote.bait is not None:
            zygote.bait.close()
            zygote.bait = None
        if zygote.group is not None:
            zygote.group.limit(None, None)  # those of the pool's group are left
        if self._told and not zygote.package and (problem := sandbox.shortfall(self._told.tier)):
            raise RuntimeError(problem)  # another supervisor may do better, or says what is left
        zygote.sandbox = sandbox
        found = [other.sandbox for other in self.zygotes if other.sandbox]
        if self._told is None and len(found) == REPLICAS:  # the trainer waits for it at the start
            self._told = tier.worst(found)
            self._on_ready(self._told)
        self.refill_at = time.monotonic()

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
        self._ask(zygote, ["fork", worker.birth], [theirs.detach(), page])
        return worker

    def _ask(self, zygote: Zygote, message: list[Any], descriptors: list[int]) -> None:
        """Tell a zygote what it answers with one word, when it has few such; takes over the
        descriptors."""
        zygote.untold.append((message, descriptors))
        self._tell_more(zygote)

    def _tell_more(self, zygote: Zygote) -> None:
        while zygote.untold and zygote.num_asked < _MAX_ASKED:
            message, descriptors = zygote.untold.popleft()
            zygote.num_asked += 1
            self._tell(zygote, message, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _tell(self, zygote: Zygote, message: list[Any], descriptors: Sequence[int] = ()) -> None:
        try:
            socket.send_fds(zygote.control, [json.dumps(message).encode()], descriptors)
        except BlockingIOError:  # it has stopped listening
            zygote.process.kill()
        except ConnectionError:
            pass  # its end is handled when its control closes

    def _read(self, zygote: Zygote) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                zygote.control, _CHUNK, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except ConnectionError:
            data, descriptors = b"", []
        if not data:
            self._lost(zygote)
            return
        operation, *arguments = json.loads(data)
        if operation in ("forked", "failed", "reaped"):
            zygote.num_asked -= 1
            self._tell_more(zygote)
        if operation == "loaded":
            self._settle(zygote)
        elif operation == "ready":
            self._settled(zygote, tier.loads(*arguments))
        elif operation == "unfit":
            self._on_unfit(*arguments)
        elif operation == "forked":
            birth, pid = arguments
            self._forked(birth, pid, descriptors)
        elif operation == "failed":
            birth, detail = arguments
            worker = self._unborn.pop(birth)
            if worker.number:
                self._on_failed(worker, f"fork: {detail}")
            else:
                self.drop(worker)
        else:
            self._on_reaped(*arguments)

    def _forked(self, birth: int, pid: int, descriptors: list[int]) -> None:
        worker = self._unborn.pop(birth)
        worker.pid = pid
        if descriptors:
            (worker.process,) = descriptors
        if isinstance(worker.zygote.process, namespaces.Process):
            worker.pid = namespaces.outer_pid(worker.process)
        if worker.channel.fileno() < 0:  # killed while it was being born
            self.drop(worker)
            return
        self._on_born(worker)

    def _lost(self, zygote: Zygote) -> None:
        self._unwatch(zygote.control)
        zygote.control.close()
        zygote.process.kill()
        zygote.process.wait()
        if zygote.bait is not None:
            zygote.bait.close()
        for _, descriptors in zygote.untold:
            for descriptor in descriptors:
                os.close(descriptor)
        zygote.untold.clear()
        if zygote.sandbox is None and not zygote.package:
            problem = f"a zygote ended with code {zygote.process.returncode} while starting"
            if self._told or not isinstance(zygote.process, namespaces.Process):
                raise RuntimeError(problem)
            self._no_namespaces = tier.Layer(tier.NAMESPACES, False, f"{problem} in them")
        self._unborn = {b: w for b, w in self._unborn.items() if w.zygote is not zygote}
        retired = [worker for worker in self._retired if worker.zygote is zygote]
        self._retired = [worker for worker in self._retired if worker.zygote is not zygote]
        for worker in [*zygote.spares, *retired]:
            worker.dying = True  # nobody is left to ask
            self.drop(worker)
        self._on_lost(zygote)


def _turned_off(name: str) -> tier.Layer:
    return tier.Layer(name, False, "turned off")
