"""What a worker's frames, its page of progress, a missed deadline and its end mean. Standard
library only.

The supervisor asks; nothing here reads a channel or ends a process. The worker's word counts within
bounds that it cannot move.
"""

import signal
import struct
import time

from spade_jax.envs import limits, wire
from spade_jax.envs.nursery import Batch, Worker

ALIVE = frozenset({"ok", "env_error", "schema"})  # what a worker may say of a request, and live on
BLAMELESS = frozenset(
    {"lost", "killed", "infrastructure"}
)  # says nothing against who answered last
UNKNOWN = 0xFFFF  # index of the guilty request when there is no telling which it is
MAX_STRETCH = 10  # times its limit that a request may wait for a processor, and
MAX_WAIT_S = 30.0  # so much longer: a short limit is no reason to give a crowded host up


def judge(elapsed_s: float, cpu_s: float, state: str, limit_s: float) -> str:
    """Say what a missed deadline means: "timeout", "wait", or "infrastructure".

    A worker that works has its limit of processor time, however crowded the host: one that is ready
    to run (R), waits for the disk (D) or cannot be looked at (?) and has used less is waited for.
    Wall time counts against one that sleeps.
    """
    if state not in "RD?" or cpu_s > limit_s:
        return "timeout"
    return "wait" if elapsed_s < MAX_STRETCH * limit_s + MAX_WAIT_S else "infrastructure"


def match(worker: Worker, reply: bytes) -> tuple[Batch, int]:
    """The batch that a reply belongs to, and how much of it was answered before; marks the rest."""
    if not worker.queue:
        raise wire.WireError("a reply that nobody asked for")
    batch = worker.queue[0]
    if len(reply) < wire.REPLY.size:
        raise wire.WireError("a reply without a head")
    number, count = wire.REPLY.unpack_from(reply)
    if number != batch.number or not 0 < count <= batch.count - batch.done:
        raise wire.WireError("a reply to something else")
    if len(reply) < wire.REPLY.size + 8 * count:
        raise wire.WireError("a reply without its processor times")
    done = batch.done
    batch.done += count
    return batch, done


def passed_on(
    worker: Worker, batch: Batch, reply: bytes, now_clock: float
) -> tuple[bytes, int | None]:
    """The notice to the trainer, and the index of a request that used more than its limit.

    The processor times are the worker's word, within bounds that it cannot move.
    """
    _, count = wire.REPLY.unpack_from(reply)
    form = f"<{count}d"
    clock = worker.clock
    seconds = []
    for at in struct.unpack_from(form, reply, wire.REPLY.size):
        if not clock <= at <= now_clock:
            at = now_clock if at > now_clock else clock
        seconds.append(at - clock)
        clock = at
    worker.clock = clock
    if max(seconds) > batch.limit_s:
        late = next(i for i, used_s in enumerate(seconds) if used_s > batch.limit_s)
        return b"", batch.done - count + late
    head = wire.NOTICE.pack(
        wire.ANSWERS, batch.number, worker.number, count, time.monotonic() - batch.ordered
    )
    body = reply[wire.REPLY.size + 8 * count :]
    return wire.frame(head + struct.pack(form, *seconds), body), None


def locate(worker: Worker) -> int:
    """Index of the request that a worker is at, by its page of progress, or `UNKNOWN`.

    The first word about a request counts, and it cannot go back, so that no program gains more time
    by writing there than a limit for each of its batch. The page is read until it stands still.
    """
    batch = worker.queue[0]
    for _ in range(3):
        word = bytes(worker.progress[: wire.PROGRESS.size])
        if word == worker.progress[: wire.PROGRESS.size]:
            break
    started, clock, number, index = wire.PROGRESS.unpack(word)
    if number != batch.number or not worker.index <= index < batch.count:
        return UNKNOWN
    if index > worker.index:
        worker.index = index
        if worker.started < started:
            worker.started = min(started, time.monotonic())
        if worker.clock < clock:
            worker.clock = min(clock, limits.cpu_s(worker.pid))
    return index


def ending(worker: Worker, code: int) -> tuple[str, str]:
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


def missed(batch: Batch) -> str:
    """What is said of a missed deadline: no measured time, which would differ between runs."""
    return f"no reply within the limit of {batch.limit_s:g} s"
