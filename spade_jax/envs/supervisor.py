"""The process between the trainer and the workers: passes requests on, and ends workers that miss a
deadline or take too much memory.

It never runs or parses a program or what one says, never imports jax, and keeps no episode: what is
lost with a worker is rebuilt by the pool. Standard library only; one thread, one epoll loop; every
read and write is non-blocking, so that no worker can hold up another. Its frames are those of
`wire`:

    trainer -> ASK (requests to a worker), SPAWN (the number is the replica; a package), KILL
    trainer <- ANSWERS (as the worker wrote them), FAULT (of one request: a status and a text),
               IDLE (a worker went down while idle), WORN (a worker has used half the processor time
               of a worker's life), READY (or why not), MEMORY (bytes that all workers have added)

A fault's status is an outcome in the words of `types.Outcome`, or one of `BLAMELESS`: "lost" (the
worker went down with another's request, or of old age), "killed" (by the kernel, for want of
memory, by the watch over the memory of all, or by itself). Requests to one worker are pipelined: it
answers in order, and says on its page of progress which one it is at, so the clocks of each start
when the one before it is done.
"""

import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from spade_jax.envs import limits, verdicts, wire
from spade_jax.envs.nursery import BIRTH_S, Batch, Nursery, Worker, Zygote, num_files
from spade_jax.envs.wire import ASK, FAULT, IDLE, MEMORY, READY, SPAWN, WORN

_MAX_EVENTS = 64  # of a turn; room is made for each
_CHUNK = 1 << 16  # a larger buffer is mapped anew for each read
_MAX_DETAIL = 300
_MEMORY_S = 0.1  # between two looks at the memory of busy workers
_MEMORY_STEP = 1 << 20  # a change by less is not told
_BREACH_S = 0.01  # between two looks at a worker that broke the protocol
_NEVER = float("inf")


class Supervisor:
    """All state of the supervisor process; `run` returns when the trainer is gone."""

    def __init__(
        self,
        trainer: socket.socket,
        memory_bytes: int,
        spares: int,
        pool_memory_bytes: int,
        max_workers: int,
        weaken: str,
        package_path: str,
    ) -> None:
        self._trainer = trainer
        self._decoder = wire.Decoder()
        self._outbox = bytearray()
        self._blocked = False  # the trainer is not reading
        self._poll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._workers: dict[int, Worker] = {}  # those the trainer knows, by its numbers
        self._pool_memory_bytes = pool_memory_bytes
        self._memory_told = 0
        self._look_at = _NEVER  # when a deadline may have been missed, or memory is to be measured
        self._measure_at = 0.0
        self._watch(trainer, self._read_trainer)
        self._running = True
        self._nursery = Nursery(
            memory_bytes,
            spares,
            weaken,
            package_path,
            pool_memory_bytes=pool_memory_bytes,
            max_workers=max_workers,
            watch=self._watch,
            unwatch=self._unwatch,
            on_ready=lambda sandbox: self._tell_ready("ok", sandbox.dumps()),
            on_unfit=lambda problem: self._tell_ready("infrastructure", problem),
            on_born=lambda worker: self._watch(worker.channel, partial(self._serve, worker)),
            on_failed=lambda worker, detail: self._fail(worker, "infrastructure", detail),
            on_reaped=self._reaped,
            on_lost=self._lost_zygote,
        )

    def run(self) -> None:
        """Serve until the trainer closes its end."""
        handlers, poll = self._handlers, self._poll.poll
        now = time.monotonic()
        while self._running:
            at = min(self._look_at, self._nursery.refill_at)
            timeout = None if at == _NEVER else max(0.0, at - now) + 0.001
            for descriptor, _ in poll(timeout, _MAX_EVENTS):
                if handler := handlers.get(descriptor):  # an earlier event may have removed it
                    handler()
            now = time.monotonic()
            if now >= at:
                self._look(now)
                if now >= self._nursery.refill_at:
                    self._nursery.refill()
            if self._outbox:
                self._write_trainer()

    def stop(self) -> None:
        """End every process below this one."""
        self._nursery.stop()

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
        for order in self._decoder.feed(data):
            kind, worker_number, count, limit_s, number = wire.ORDER.unpack_from(order)
            if kind == ASK:
                frame = wire.frame(order[wire.ORDER.size - wire.NUMBER.size :])
                self._ask(worker_number, Batch(number, count, limit_s, frame, time.monotonic()))
            elif kind == SPAWN:
                worker = self._nursery.claim(number, order[wire.ORDER.size :].decode())
                worker.number = worker_number
                self._workers[worker_number] = worker
            elif worker := self._workers.get(worker_number):
                if worker.confined and not worker.dying and not worker.queue:
                    del self._workers[worker_number]
                    self._nursery.retire(worker)
                else:
                    self._bury(worker)

    def _ask(self, number: int, batch: Batch) -> None:
        worker = self._workers.get(number)
        if worker is None:
            self._tell_fault(number, batch, 0, "lost", "the worker is gone")
            return
        worker.queue.append(batch)
        if worker.confined and not worker.dying and not worker.breach:
            if len(worker.queue) == 1:
                self._begin(worker)
            self._send(worker, batch.frame)
        else:
            self._look_at = min(self._look_at, worker.deadline)

    def _tell(
        self, kind: int, batch: int, worker: int, index: int, value: float, body: bytes = b""
    ) -> None:
        self._outbox += wire.frame(wire.NOTICE.pack(kind, batch, worker, index, value), body)

    def _tell_fault(self, worker: int, batch: Batch, index: int, status: str, detail: str) -> None:
        """Say how a request ended; those of its batch that have no answer are lost with it."""
        body = wire.dumps([status, detail[:_MAX_DETAIL]])
        self._tell(FAULT, batch.number, worker, index, 0.0, body)

    def _tell_ready(self, status: str, detail: str) -> None:
        self._tell(READY, 0, 0, 0, 0.0, wire.dumps([status, detail]))

    def _write_trainer(self) -> None:
        try:
            while self._outbox:
                del self._outbox[: self._trainer.send(self._outbox)]
        except (BlockingIOError, ConnectionError):  # the end is seen when reading
            pass
        if self._blocked != bool(self._outbox):
            self._blocked = bool(self._outbox)
            self._poll.modify(self._trainer.fileno(), _wanted(self._blocked))

    # -- workers

    def _begin(self, worker: Worker) -> None:
        """Start the clocks of a worker's oldest request."""
        batch, now = worker.queue[0], time.monotonic()
        worker.index = batch.done
        worker.started = now
        worker.deadline = now + batch.limit_s
        worker.touched = True
        self._look_at = min(self._look_at, worker.deadline, max(now, self._measure_at))

    def _send(self, worker: Worker, data: bytes = b"") -> None:
        """Write what the channel takes; the rest waits until it takes more."""
        if worker.outbox:
            worker.outbox += data
            data = bytes(worker.outbox)
        try:
            sent = worker.channel.send(data)
        except BlockingIOError:
            sent = 0
        except ConnectionError:
            self._ask_how_it_ended(worker)
            return
        worker.outbox[:] = data[sent:]
        if worker.blocked != bool(worker.outbox):
            worker.blocked = bool(worker.outbox)
            self._poll.modify(worker.channel.fileno(), _wanted(worker.blocked))

    def _serve(self, worker: Worker) -> None:
        self._read_worker(worker)
        if worker.outbox:
            self._send(worker)

    def _read_worker(self, worker: Worker) -> bool:
        """Take what a worker has written; returns whether that was anything."""
        try:
            data = worker.channel.recv(_CHUNK)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self._ask_how_it_ended(worker)
            return True
        now_clock = limits.cpu_s(worker.pid)
        answers: list[tuple[Batch, int, bytes]] = []  # with what was answered before
        fault = None
        try:
            for reply in worker.decoder.feed(data):
                if not worker.confined:
                    if not self._confined(worker, reply):
                        return True
                    continue
                batch, done = verdicts.match(worker, reply)
                notice, late = verdicts.passed_on(worker, batch, reply, now_clock)
                if late is not None:  # on an idle host it would have been killed
                    fault = "timeout", verdicts.missed(batch), late
                    break
                answers.append((batch, done, notice))
                if batch.done == batch.count:
                    worker.queue.popleft()
            if worker.decoder.pending and not worker.queue:
                raise wire.WireError("bytes after the reply")
        except wire.WireError as error:
            fault = "protocol", str(error), verdicts.UNKNOWN
            if worker.queue:
                fault, worker.breach = None, str(error)
                self._unwatch(worker.channel)
            elif answers:  # what follows an answer voids it
                batch, batch.done, _ = answers.pop()
                worker.queue.append(batch)
        for _, _, notice in answers:
            self._outbox += notice
        if not worker.worn and now_clock > limits.CPU_S / 2:
            worker.worn = True
            self._tell(WORN, 0, worker.number, 0, 0.0)
        if fault is not None:
            self._fail(worker, *fault)
        elif answers and worker.queue:
            self._begin(worker)
        elif answers:
            worker.deadline = _NEVER
        if worker.breach:
            worker.outbox.clear()
            worker.deadline = time.monotonic()
            self._look_at = min(self._look_at, worker.deadline)
        return True

    def _confined(self, worker: Worker, hello: bytes) -> bool:
        """Read a worker's first frame, older than any program in it; let its requests start."""
        _, status, detail = wire.loads(hello)
        if status != "ok":
            self._fail(worker, status, detail)
            return False
        worker.confined = True
        worker.clock = limits.cpu_s(worker.pid)
        worker.born_bytes = limits.resident(worker.pid)
        self._nursery.confined(worker)
        if worker.queue:
            self._begin(worker)
            self._send(worker, b"".join(batch.frame for batch in worker.queue))
        return True

    def _ask_how_it_ended(self, worker: Worker) -> None:
        if not worker.number:  # a spare: nobody minds
            self._nursery.drop(worker)
            return
        worker.ended_alone = limits.exiting(worker.pid)
        worker.at_cap = limits.cpu_s(worker.pid) > 0.9 * limits.CPU_S
        worker.dying = True
        worker.deadline = time.monotonic() + BIRTH_S
        self._look_at = min(self._look_at, worker.deadline)
        worker.outbox.clear()
        self._unwatch(worker.channel)
        self._nursery.reap(worker)

    def _reaped(self, birth: int, code: int) -> None:
        for worker in self._workers.values():
            if worker.dying and worker.birth == birth:
                self._fail(worker, *verdicts.ending(worker, code))
                return

    def _fail(self, worker: Worker, status: str, detail: str, index: int | None = None) -> None:
        """End a worker because of the request it is at, or of that with this index in its batch;
        the others are innocent."""
        if not worker.number:
            self._nursery.drop(worker)
            return
        if worker.queue:
            index = verdicts.locate(worker) if index is None else index
            self._tell_fault(worker.number, worker.queue.popleft(), index, status, detail)
        else:
            self._tell(IDLE, 0, worker.number, 0, 0.0, wire.dumps([status, detail[:_MAX_DETAIL]]))
        self._bury(worker)

    def _bury(self, worker: Worker) -> None:
        for batch in worker.queue:
            self._tell_fault(worker.number, batch, batch.done, "lost", "the worker is gone")
        worker.queue.clear()
        del self._workers[worker.number]
        self._nursery.drop(worker)

    def _lost_zygote(self, zygote: Zygote) -> None:
        """Start a new zygote; the workers of the old one died with it, blamelessly."""
        for worker in [w for w in self._workers.values() if w.zygote is zygote]:
            worker.dying = True  # nobody is left to ask
            if not worker.queue:
                self._fail(worker, "infrastructure", "the zygote died")
                continue
            for batch in worker.queue:
                self._tell_fault(
                    worker.number, batch, batch.done, "infrastructure", "the zygote died"
                )
            worker.queue.clear()
            self._bury(worker)
        self._nursery.replace(zygote)

    # -- deadlines and memory

    def _look(self, now: float) -> None:
        """See to every deadline that has passed and to the memory of all; decide when next."""
        if now >= self._measure_at:
            self._measure()
            self._measure_at = now + _MEMORY_S
        for worker in list(self._workers.values()):
            if worker.queue and now >= worker.deadline:
                self._overdue(worker, now)
        busy = [worker.deadline for worker in self._workers.values() if worker.queue]
        self._look_at = min(*busy, self._measure_at) if busy else _NEVER

    def _overdue(self, worker: Worker, now: float) -> None:
        if worker.dying or not worker.confined:
            worker.zygote.process.kill()  # stuck; its end is handled when its control closes
            worker.deadline = now + BIRTH_S
            return
        if worker.breach:
            self._judge_breach(worker, now)
            return
        state = limits.state(worker.pid)
        # It may have answered, or begun to, while this process could not run.
        heard = self._read_worker(worker)
        if worker.dying or not worker.queue or worker.deadline > now:
            return
        batch = worker.queue[0]
        verdicts.locate(worker)
        elapsed_s = now - worker.started
        if elapsed_s < batch.limit_s:
            worker.deadline = worker.started + batch.limit_s
            return
        if heard and elapsed_s < verdicts.MAX_STRETCH * batch.limit_s:  # a long answer
            worker.deadline = now + batch.limit_s / 10
            return
        cpu_s = limits.cpu_s(worker.pid) - worker.clock
        verdict = verdicts.judge(elapsed_s, cpu_s, state, batch.limit_s)
        if verdict == "wait":
            worker.deadline = now + max(batch.limit_s - cpu_s, batch.limit_s / 10)
        else:
            self._fail(worker, verdict, verdicts.missed(batch))

    def _judge_breach(self, worker: Worker, now: float) -> None:
        """End a worker whose bytes were no frame once it rests; one that never does hangs."""
        batch = worker.queue[0]
        cpu_s = limits.cpu_s(worker.pid) - worker.clock
        if limits.state(worker.pid) not in "RD":
            self._fail(worker, "protocol", worker.breach, verdicts.UNKNOWN)
        elif verdicts.judge(now - worker.started, cpu_s, "R", batch.limit_s) == "wait":
            worker.deadline = now + _BREACH_S
        else:
            self._fail(worker, "timeout", verdicts.missed(batch), verdicts.UNKNOWN)

    def _measure(self) -> None:
        """Tell how much memory the workers have added, and keep it within the budget of all."""
        for worker in self._workers.values():
            if worker.touched and worker.confined:
                worker.touched = bool(worker.queue)
                worker.grown_bytes = max(0, limits.resident(worker.pid) - worker.born_bytes)
        total = sum(worker.grown_bytes for worker in self._workers.values())
        if abs(total - self._memory_told) >= _MEMORY_STEP:
            self._memory_told = total
            self._tell(MEMORY, 0, 0, 0, float(total))
        while total > self._pool_memory_bytes:
            largest = max(self._workers.values(), key=lambda worker: worker.grown_bytes)
            total -= largest.grown_bytes
            detail = (
                f"all workers together passed their {self._pool_memory_bytes} bytes of memory, "
                "and this one was the largest"
            )
            self._fail(largest, "killed", detail)

    # -- the loop

    def _watch(self, connection: socket.socket, handler: Callable[[], None]) -> None:
        self._handlers[connection.fileno()] = handler
        self._poll.register(connection.fileno(), select.EPOLLIN)

    def _unwatch(self, connection: socket.socket) -> None:
        if self._handlers.pop(connection.fileno(), None):
            self._poll.unregister(connection.fileno())


def _wanted(blocked: bool) -> int:
    return select.EPOLLIN | (select.EPOLLOUT if blocked else 0)


def main() -> None:
    """Serve the trainer at the other end of the descriptor given, until it is gone."""
    descriptor, parent, memory_bytes, spares, pool_memory_bytes, workers = map(int, sys.argv[1:7])
    limits.die_with_parent(parent)
    limits.adopt_orphans()
    # For the trainer, which may have something to save, though it is often sent to every process;
    # what this one starts inherits it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer = socket.socket(fileno=descriptor)
    if problem := limits.few_files(num_files(workers, spares)) or limits.missing():
        head = wire.NOTICE.pack(READY, 0, 0, 0, 0.0)
        trainer.sendall(wire.frame(head, wire.dumps(["infrastructure", problem])))
        return
    trainer.setblocking(False)
    weaken, package_path = sys.argv[7:]
    supervisor = Supervisor(
        trainer, memory_bytes, spares, pool_memory_bytes, workers, weaken, package_path
    )
    try:
        supervisor.run()
    finally:
        supervisor.stop()
