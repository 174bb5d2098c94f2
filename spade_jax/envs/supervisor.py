"""The process between the trainer and the workers: passes requests on, and ends workers that miss a
deadline.

It never runs or parses a program, never imports jax, and keeps no episode: what is lost with a
worker is rebuilt by the pool. Standard library only; one thread, one epoll loop; every read and
write is non-blocking, so that no worker can hold up another.

    trainer -> ["spawn", worker, replica], ["ask", request, worker, limit_s, body], ["kill", worker]
    trainer <- [request, worker, status, value]

Status is "ok" or an outcome in the words of `types.Outcome`, or one of `BLAMELESS`: "lost" (the
worker went down with another's request, or of old age), "killed" (by the kernel, for want of
memory, or by itself). With request `IDLE` it is told that a worker went down while idle and, as
`WORN`, that one has used half the processor time of a worker's life. Requests to one worker are
pipelined: it answers in order, so the oldest one is the one being worked on, and the clocks of each
start when the one before it is answered.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spade_jax.envs import limits, tier, wire

IDLE = -1  # request number of the notice that an idle worker went down
READY = 0  # worker number of the notice that the supervisor is up, or why it cannot be
REPLICAS = 2  # zygotes: replay in the other one shows what depends on addresses
ALIVE = frozenset({"ok", "env_error", "schema"})  # what a worker may say of a request, and live on
WORN = "worn"
BLAMELESS = frozenset(
    {"lost", "killed", "infrastructure"}
)  # says nothing against who answered last
_CHUNK = 1 << 18
_SPAWN_S = 60.0  # a fork that takes longer means that the zygote is stuck
MAX_STRETCH = 10  # times its limit that a request may wait for a processor
_MAX_DETAIL = 300
_BREACH_S = 0.01  # between two looks at a worker that broke the protocol


def judge(elapsed_s: float, cpu_s: float, state: str, limit_s: float) -> str:
    """Say what a missed deadline means: "timeout", "wait", or "infrastructure".

    A worker that works has its limit of processor time, however crowded the host: one that is ready
    to run (R), waits for the disk (D) or cannot be looked at (?) and has used less is waited for.
    Wall time counts against one that sleeps.
    """
    if state not in "RD?" or cpu_s > limit_s:
        return "timeout"
    return "wait" if elapsed_s < MAX_STRETCH * limit_s else "infrastructure"


@dataclass
class _Request:
    number: int
    limit_s: float
    body: list[Any]


@dataclass
class _Worker:
    number: int
    zygote: "_Zygote"
    channel: socket.socket
    deadline: float  # of the oldest request, the fork, or the reaping
    pid: int = 0  # 0 until it is forked
    confined: bool = False  # it said so; it is sent nothing before
    dying: bool = False  # its channel closed; the zygote is asked how it ended
    ended_alone: bool = False  # it was on its way out before it was killed
    worn: bool = False  # it has used half the processor time of a worker's life
    at_cap: bool = False  # it had used all of it
    queue: deque[_Request] = field(default_factory=deque)
    decoder: wire.Decoder = field(default_factory=wire.Decoder)
    outbox: bytearray = field(default_factory=bytearray)
    breach: str = ""  # what was wrong with its bytes; they are no longer read
    started: float = 0.0  # when the oldest request became the oldest
    cpu_started: float = 0.0  # processor time of the worker then
    blocked: bool = False  # the channel is full


@dataclass(eq=False)
class _Zygote:
    replica: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    sandbox: tier.Sandbox | None = None  # what its probe found; None until it is ready


class Supervisor:
    """All state of the supervisor process; `run` returns when the trainer is gone."""

    def __init__(self, trainer: socket.socket, memory_bytes: int, weaken: str) -> None:
        self._trainer = trainer
        self._memory_bytes = memory_bytes
        self._weaken = weaken
        self._decoder = wire.Decoder()
        self._outbox = bytearray()
        self._blocked = False  # the trainer is not reading
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._workers: dict[int, _Worker] = {}
        self._watch(trainer, self._read_trainer)
        self._running = True
        self._told_ready = False
        self._zygotes = [self._start_zygote(replica) for replica in range(REPLICAS)]

    def run(self) -> None:
        """Serve until the trainer closes its end."""
        while self._running:
            for descriptor, _ in self._poll.poll(self._patience()):
                if handler := self._handlers.get(descriptor):  # an earlier event may remove it
                    handler()
            self._expire()
            for worker in list(self._workers.values()):
                if worker.outbox:
                    self._write_worker(worker)
            self._write_trainer()

    def stop(self) -> None:
        """End every process below this one."""
        for zygote in self._zygotes:
            zygote.process.kill()
            zygote.process.wait()
        limits.sweep()

    # -- the trainer

    def _read_trainer(self) -> None:
        try:
            data = self._trainer.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._running = False
        for operation, *arguments in self._decoder.feed(data):
            {"spawn": self._spawn, "ask": self._ask, "kill": self._kill}[operation](*arguments)

    def _spawn(self, number: int, replica: int) -> None:
        zygote = self._zygotes[replica]
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        deadline = time.monotonic() + _SPAWN_S
        self._workers[number] = _Worker(number, zygote, ours, deadline)
        with theirs:
            self._tell_zygote(zygote, ["fork", number], [theirs.fileno()])

    def _ask(self, number: int, worker_number: int, limit_s: float, body: list[Any]) -> None:
        worker = self._workers.get(worker_number)
        if worker is None:
            self._reply(number, worker_number, "lost", "the worker is gone")
            return
        worker.queue.append(_Request(number, limit_s, body))
        if worker.confined and not worker.dying and not worker.breach:
            worker.outbox += wire.encode([number, *body])
            if len(worker.queue) == 1:
                self._begin(worker, limits.cpu_s(worker.pid))

    def _kill(self, number: int) -> None:
        if worker := self._workers.get(number):
            self._bury(worker)

    def _reply(self, request: int, worker: int, status: str, value: Any) -> None:
        try:
            self._outbox += wire.encode([request, worker, status, value])
        except wire.WireError:  # it fitted its own frame, barely
            self._outbox += wire.encode([request, worker, "schema", "a reply too large to pass on"])

    def _write_trainer(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # the end is seen when reading
            while self._outbox:
                del self._outbox[: self._trainer.send(self._outbox)]
        if self._blocked != bool(self._outbox):
            self._blocked = bool(self._outbox)
            self._poll.modify(self._trainer.fileno(), _wanted(self._blocked))

    # -- workers

    def _begin(self, worker: _Worker, cpu_started: float) -> None:
        worker.started = time.monotonic()
        worker.deadline = worker.started + worker.queue[0].limit_s
        worker.cpu_started = cpu_started

    def _write_worker(self, worker: _Worker) -> None:
        try:
            del worker.outbox[: worker.channel.send(worker.outbox)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self._ask_how_it_ended(worker)
            return
        if worker.blocked != bool(worker.outbox):
            worker.blocked = bool(worker.outbox)
            self._poll.modify(worker.channel.fileno(), _wanted(worker.blocked))

    def _read_worker(self, worker: _Worker) -> None:
        try:
            data = worker.channel.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._ask_how_it_ended(worker)
            return
        now_cpu_s = limits.cpu_s(worker.pid)
        answered: list[tuple[_Request, str, Any]] = []
        fault = None
        try:
            for message in worker.decoder.feed(data):
                if not worker.confined:
                    if not self._confined(worker, message):
                        return
                    continue
                request, status, value, cpu_s = _match(worker.queue, message)
                cpu_s = min(max(cpu_s, worker.cpu_started), now_cpu_s)  # the worker's word, bounded
                if cpu_s - worker.cpu_started > request.limit_s:  # on an idle host it was killed
                    worker.queue.appendleft(request)
                    fault = ("timeout", _missed(request))
                    break
                worker.cpu_started = cpu_s
                answered.append((request, status, value))
            if worker.decoder.pending and not worker.queue:
                raise wire.WireError("bytes after the reply")
        except wire.WireError as error:
            fault = ("protocol", str(error))
            if worker.queue:
                fault, worker.breach = None, str(error)
                self._unwatch(worker.channel)
            elif answered:  # what follows a reply voids it
                worker.queue.append(answered.pop()[0])
        for request, status, value in answered:
            self._reply(request.number, worker.number, status, value)
        if not worker.worn and now_cpu_s > limits.CPU_S / 2:
            worker.worn = True
            self._reply(IDLE, worker.number, WORN, None)
        if fault is not None:
            self._fail(worker, *fault)
        elif answered and worker.queue:
            self._begin(worker, worker.cpu_started)
        if worker.breach:
            worker.outbox.clear()
            worker.deadline = time.monotonic()

    def _ask_how_it_ended(self, worker: _Worker) -> None:
        worker.ended_alone = limits.exiting(worker.pid)
        worker.at_cap = limits.cpu_s(worker.pid) > 0.9 * limits.CPU_S
        worker.dying = True
        worker.deadline = time.monotonic() + _SPAWN_S
        worker.outbox.clear()
        self._unwatch(worker.channel)
        self._reap(worker)

    def _fail(self, worker: _Worker, status: str, detail: str) -> None:
        """End a worker because of its oldest request; the others are innocent."""
        detail = detail[:_MAX_DETAIL]
        if worker.queue:
            self._reply(worker.queue.popleft().number, worker.number, status, detail)
        else:
            self._reply(IDLE, worker.number, status, detail)
        self._bury(worker)

    def _bury(self, worker: _Worker) -> None:
        for request in worker.queue:
            self._reply(request.number, worker.number, "lost", "the worker is gone")
        del self._workers[worker.number]
        self._unwatch(worker.channel)
        worker.channel.close()
        if worker.pid and not worker.dying:
            self._reap(worker)

    def _reap(self, worker: _Worker) -> None:
        with contextlib.suppress(ProcessLookupError):  # its zygote is gone, and it with it
            os.kill(worker.pid, signal.SIGKILL)
        self._tell_zygote(worker.zygote, ["reap", worker.pid])

    def _patience(self) -> float | None:
        busy = [worker.deadline for worker in self._workers.values() if worker.queue]
        return max(0.0, min(busy) - time.monotonic()) + 0.001 if busy else None

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if not worker.queue or now < worker.deadline:
                continue
            if worker.dying or not worker.confined:
                worker.zygote.process.kill()  # stuck; its end is handled when its control closes
                worker.deadline = now + _SPAWN_S
                continue
            if worker.breach:
                self._judge_breach(worker, now)
                continue
            request = worker.queue[0]
            state = limits.state(worker.pid)
            self._read_worker(worker)  # it may have answered while this process could not run
            if worker.dying or not worker.queue or worker.queue[0] is not request:
                continue
            cpu_s = limits.cpu_s(worker.pid) - worker.cpu_started
            verdict = judge(now - worker.started, cpu_s, state, request.limit_s)
            if verdict == "wait":
                worker.deadline = now + max(request.limit_s - cpu_s, request.limit_s / 10)
            else:
                self._fail(worker, verdict, _missed(request))

    def _judge_breach(self, worker: _Worker, now: float) -> None:
        """End a worker whose bytes were no frame once it rests; one that never does hangs."""
        limit_s, cpu_s = worker.queue[0].limit_s, limits.cpu_s(worker.pid) - worker.cpu_started
        if limits.state(worker.pid) not in "RD":
            self._fail(worker, "protocol", worker.breach)
        elif judge(now - worker.started, cpu_s, "R", limit_s) == "wait":
            worker.deadline = now + _BREACH_S
        else:
            self._fail(worker, "timeout", _missed(worker.queue[0]))

    # -- zygotes

    def _start_zygote(self, replica: int) -> _Zygote:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs:
            arguments = (theirs.fileno(), os.getpid(), self._memory_bytes, self._weaken)
            process = subprocess.Popen(
                limits.command("spade_jax.envs.zygote", *arguments),
                pass_fds=[theirs.fileno()],
                env=limits.environment(),
                stdin=subprocess.DEVNULL,
            )
        zygote = _Zygote(replica, process, ours)
        self._watch(ours, lambda: self._read_zygote(zygote))
        return zygote

    def _tell_zygote(
        self, zygote: _Zygote, message: list[Any], descriptors: list[int] | None = None
    ) -> None:
        try:
            socket.send_fds(zygote.control, [json.dumps(message).encode()], descriptors or [])
        except BlockingIOError:  # it has stopped listening
            zygote.process.kill()
        except ConnectionError:
            pass  # its end is handled when its control closes

    def _read_zygote(self, zygote: _Zygote) -> None:
        try:
            data = zygote.control.recv(_CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self._replace(zygote)
            return
        operation, *arguments = json.loads(data)
        if operation == "ready":
            zygote.sandbox = tier.loads(*arguments)
            found = [other.sandbox for other in self._zygotes if other.sandbox is not None]
            if not self._told_ready and len(found) == REPLICAS:
                self._told_ready = True  # once: the trainer waits for it only at the start
                self._reply(IDLE, READY, "ok", tier.worst(found).dumps())
        elif operation == "unfit":
            self._reply(IDLE, READY, "infrastructure", *arguments)
        elif operation == "forked":
            self._forked(zygote, *arguments)
        elif operation == "failed":
            number, detail = arguments
            if worker := self._workers.get(number):
                self._fail(worker, "infrastructure", f"fork: {detail}")
        else:
            self._reaped(*arguments)

    def _forked(self, zygote: _Zygote, number: int, pid: int) -> None:
        worker = self._workers.get(number)
        if worker is None:  # killed while it was being born
            self._tell_zygote(zygote, ["reap", pid])
            return
        worker.pid = pid
        self._watch(worker.channel, lambda: self._read_worker(worker))

    def _confined(self, worker: _Worker, message: list[Any]) -> bool:
        """Read a worker's first frame, older than any program in it; let its requests start."""
        _, status, detail = message
        if status != "ok":
            self._fail(worker, status, detail)
            return False
        worker.confined = True
        for request in worker.queue:
            worker.outbox += wire.encode([request.number, *request.body])
        if worker.queue:
            self._begin(worker, limits.cpu_s(worker.pid))
        return True

    def _reaped(self, pid: int, code: int) -> None:
        for worker in self._workers.values():
            if worker.dying and worker.pid == pid:
                self._fail(worker, *_ending(worker, code))
                return

    def _replace(self, zygote: _Zygote) -> None:
        """Start a new zygote; the workers of the old one die with it, blamelessly."""
        self._unwatch(zygote.control)
        zygote.control.close()
        zygote.process.kill()
        zygote.process.wait()
        if zygote.sandbox is None:
            raise RuntimeError(
                f"a zygote ended with code {zygote.process.returncode} while starting"
            )
        for worker in [w for w in self._workers.values() if w.zygote is zygote]:
            worker.dying = True  # nobody is left to ask
            for request in worker.queue:
                self._reply(request.number, worker.number, "infrastructure", "the zygote died")
            if not worker.queue:
                self._reply(IDLE, worker.number, "infrastructure", "the zygote died")
            worker.queue.clear()
            self._bury(worker)
        # What it may leave is tried again the next time.
        limits.sweep(keep=[other.process.pid for other in self._zygotes])
        self._zygotes[zygote.replica] = self._start_zygote(zygote.replica)

    # -- the loop

    def _watch(self, connection: socket.socket, handler: Callable[[], None]) -> None:
        self._handlers[connection.fileno()] = handler
        self._poll.register(connection.fileno(), select.EPOLLIN)

    def _unwatch(self, connection: socket.socket) -> None:
        if self._handlers.pop(connection.fileno(), None):
            self._poll.unregister(connection.fileno())


def _ending(worker: _Worker, code: int) -> tuple[str, str]:
    """Status and text for a worker that ended with `code` (negative for a signal)."""
    detail = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
    detail = f"the process ended with {detail}"
    if not worker.confined:
        return "infrastructure", detail
    if code != -signal.SIGKILL:
        return "worker_died", detail
    if not worker.ended_alone:  # the signal was ours
        return "worker_died", "it closed its channel"
    return ("lost" if worker.at_cap else "killed"), detail


def _missed(request: _Request) -> str:
    """What is said of a missed deadline: no measured time, which would differ between runs."""
    return f"no reply within the limit of {request.limit_s:g} s"


def _match(queue: deque[_Request], message: Any) -> tuple[_Request, str, Any, float]:
    """Take the oldest request off the queue, which `message` must answer."""
    if not queue:
        raise wire.WireError("a reply that nobody asked for")
    if type(message) is not list or len(message) != 4:
        raise wire.WireError("a reply that is not [number, status, value, cpu_s]")
    number, status, value, cpu_s = message
    if type(cpu_s) is not float:
        raise wire.WireError("a reply without its processor time")
    if type(number) is not int or number != queue[0].number:
        raise wire.WireError("a reply with the wrong number")
    if type(status) is not str or status not in ALIVE:
        raise wire.WireError("a reply with an unknown status")
    if status != "ok":
        if type(value) is not str:
            raise wire.WireError("a fault without a text")
        value = "".join(c if c.isprintable() else "?" for c in value[:_MAX_DETAIL])  # for terminals
    return queue.popleft(), status, value, cpu_s


def _wanted(blocked: bool) -> int:
    return select.EPOLLIN | (select.EPOLLOUT if blocked else 0)


def main() -> None:
    """Serve the trainer at the other end of the descriptor given, until it is gone."""
    descriptor, parent, memory_bytes = map(int, sys.argv[1:4])
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    limits.few_files()
    trainer = socket.socket(fileno=descriptor)
    if problem := limits.missing():
        trainer.sendall(wire.encode([IDLE, READY, "infrastructure", problem]))
        return
    trainer.setblocking(False)
    supervisor = Supervisor(trainer, memory_bytes, weaken=sys.argv[4])
    try:
        supervisor.run()
    finally:
        supervisor.stop()
