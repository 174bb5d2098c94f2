"""The trainer's interface to environments: `Pool.open` a program on a seed, `Instance.step` it: a
`Reply` or a `Fault`.

What a program does wrong comes back as a `Fault`; only a pool that cannot run at all raises
`SandboxError`. The pool places instances in workers, keeps each one's seed and actions, and
rebuilds an instance from them when its worker went down through no fault of its own: because
another instance hung (the caller does not notice), because a process of ours died (tried once more,
then a Fault of the infrastructure), or because the kernel killed it, as it does for want of memory
(tried once more, then the program's Fault). A pool belongs to one running event loop, and its
processes end when the thread that started it does.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spade_jax.envs import adapters, api
from spade_jax.envs.limits import Limits
from spade_jax.envs.link import Answer, Link, launch
from spade_jax.envs.supervisor import ALIVE, BLAMELESS, IDLE, READY, WORN
from spade_jax.errors import SandboxError
from spade_jax.types import Fault, Outcome, Reply

_LOST = "lost"
_KILLED = "killed"
_INFRASTRUCTURE = str(Outcome.INFRASTRUCTURE)


@dataclass(frozen=True)
class PoolStats:
    """What happened since the last look."""

    requests: int  # sent to workers, replays included
    spawned: int  # workers started
    rebuilt: int  # instances moved to another worker
    faults: dict[Outcome, int]  # instances that ended in a fault


@dataclass(eq=False)
class _Worker:
    number: int
    key: tuple[str, int]  # digest of the program, replica
    link: Link
    loaded: asyncio.Future[Answer]
    dead: bool = False
    worn: bool = False  # takes no new instance: its processor time would end under one
    occupants: int = 0
    last_used: int = 0
    last_answered: "Instance | None" = None  # whom to blame if it goes down while idle


class Pool:
    """Workers for any number of programs; `async with Pool(limits) as pool`, or start, close.

    `packages` are those of `adapters.PACKAGES` whose environments may be played as well, and
    `package_path` folders where they are looked for first.
    """

    def __init__(
        self, limits: Limits, packages: Sequence[str] = (), package_path: Sequence[str] = ()
    ) -> None:
        self.limits = limits
        self._packages = frozenset(packages)
        self._package_path = tuple(package_path)
        self._link: Link | None = None
        self._open = False
        self._launching = asyncio.Lock()
        self._workers: dict[int, _Worker] = {}  # alive or being loaded, by number
        self._last_number = READY
        self._clock = 0
        self._last_instance = 0
        self._room = asyncio.Event()  # set, and replaced, when a worker may have room
        self._counts: Counter[str] = Counter()
        self._faults: Counter[Outcome] = Counter()

    async def start(self) -> None:
        """Start the supervisor.

        Raises:
            SandboxError: it cannot be started, or a package is not installed.
        """
        adapters.require(sorted(self._packages), self._package_path)
        self._open = True
        await self._connect()

    async def close(self) -> None:
        """End and reap every process; open instances are dead."""
        self._open = False
        if self._link is not None:
            await self._link.stop()

    async def __aenter__(self) -> "Pool":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def load(self, program: str, replica: int = 0) -> Fault | None:
        """Have a worker ready for `program`, or say what is wrong with it."""
        instance = Instance(self, program, 0, replica)
        outcome = await instance._settle(instance._enter)
        instance._leave()
        return outcome if isinstance(outcome, Fault) else None

    async def open(self, program: str, seed: int, replica: int = 0) -> "Instance | Fault":
        """A new instance of `program`, reset to `seed`.

        `replica` 1 puts it in a worker of the other zygote, where addresses and unseeded generators
        differ.
        """
        instance = Instance(self, program, seed, replica)
        outcome = await instance._settle(instance._build)
        return outcome if isinstance(outcome, Fault) else instance

    def stats(self) -> PoolStats:
        """Return and reset the counts."""
        counts = PoolStats(
            requests=self._counts["requests"],
            spawned=self._counts["spawned"],
            rebuilt=self._counts["rebuilt"],
            faults=dict(self._faults),
        )
        self._counts.clear()
        self._faults.clear()
        return counts

    def _problem(self, program: str) -> str:
        package = adapters.package_of(program)
        if package and package not in self._packages:
            return f"the program needs the package {package}, which this pool was made without"
        return api.program_problem(program)

    async def _connect(self) -> Link:
        async with self._launching:
            if not self._open:
                raise SandboxError(
                    "the environment pool is not running; use `async with Pool(...)` or start() it"
                )
            if self._link is None or not self._link.alive:
                if self._link is not None:
                    await self._link.stop()
                self._link = await launch(
                    self.limits.memory_bytes, self._package_path, self._on_answer, self._on_lost
                )
            return self._link

    async def _enter_worker(self, program: str, replica: int) -> _Worker:
        """Take a place in a worker of `program`, waiting for one if all are taken."""
        key = (hashlib.sha256(program.encode()).hexdigest(), replica)
        while True:
            link = await self._connect()
            worker = self._with_room(key) or self._spawn(link, key, program)
            if worker is not None:
                worker.occupants += 1
                return worker
            await self._room.wait()

    def _with_room(self, key: tuple[str, int]) -> _Worker | None:
        for worker in self._workers.values():
            room = self.limits.instances_per_worker - worker.occupants
            if worker.key == key and room and not worker.worn:
                return worker
        return None

    def _spawn(self, link: Link, key: tuple[str, int], program: str) -> _Worker | None:
        if len(self._workers) >= self.limits.max_workers:
            idle = [worker for worker in self._workers.values() if not worker.occupants]
            if not idle:
                return None
            self._discard(min(idle, key=lambda worker: worker.last_used))
        self._last_number += 1
        self._counts["spawned"] += 1
        link.send("spawn", self._last_number, key[1], adapters.package_of(program))
        loaded = self._ask(link, self._last_number, None, self.limits.load_s, "load", program)
        worker = _Worker(self._last_number, key, link, loaded)
        self._workers[worker.number] = worker
        return worker

    def _ask(self, link: Link, worker: int, *request: Any) -> asyncio.Future[Answer]:
        self._counts["requests"] += 1
        return link.ask(worker, *request)

    def _discard(self, worker: _Worker) -> None:
        if not worker.dead:
            worker.link.send("kill", worker.number)
            self._bury(worker)

    def _leave_worker(self, worker: _Worker) -> None:
        self._clock += 1
        worker.occupants -= 1
        worker.last_used = self._clock
        if worker.worn and not worker.occupants:
            self._discard(worker)
        self._wake()

    def _bury(self, worker: _Worker) -> None:
        worker.dead = True
        self._workers.pop(worker.number, None)
        self._wake()

    def _wake(self) -> None:
        self._room.set()
        self._room = asyncio.Event()

    def _on_answer(self, number: int, owner: Any, answer: Answer) -> None:
        worker = self._workers.get(number)
        if worker is None:
            return
        if answer.status in ALIVE:
            worker.last_answered = owner if isinstance(owner, Instance) else None
            return
        if answer.status == WORN:
            worker.worn = True
            if not worker.occupants:
                self._discard(worker)
            return
        self._bury(worker)
        if owner == IDLE and worker.last_answered is not None and answer.status not in BLAMELESS:
            worker.last_answered._end(Fault(Outcome(answer.status), answer.value))

    def _on_lost(self, link: Link) -> None:
        for worker in [worker for worker in self._workers.values() if worker.link is link]:
            self._bury(worker)


class _Failure(Exception):
    """An attempt that got no reply: an outcome, or "lost" or "killed", and a text."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail


class Instance:
    """One episode of one program, one call at a time. A Fault or a cancelled call ends it."""

    observation: str  # what reset returned

    def __init__(self, pool: Pool, program: str, seed: int, replica: int) -> None:
        self._pool = pool
        self._program = program
        self._seed = seed
        self._replica = replica
        pool._last_instance += 1
        self._number = pool._last_instance
        self._worker: _Worker | None = None
        self._log: list[tuple[str, Reply]] = []  # what a rebuild replays, and must see again
        self._opened = False
        self._ended: Fault | None = None

    async def step(self, action: str) -> Reply | Fault:
        """Send one action, cut at `api.MAX_ACTION_CHARS`."""
        action = action[: api.MAX_ACTION_CHARS]
        reply = await self._settle(lambda: self._step(action))
        if isinstance(reply, Reply):
            self._log.append((action, reply))
        return reply

    async def solution(self) -> list[str] | Fault:
        """The actions that the program itself says win from here."""
        return await self._settle(self._solution)

    async def close(self) -> None:
        """Give the place up; does not wait for the worker."""
        self._ended = self._ended or Fault(Outcome.INFRASTRUCTURE, "the instance was closed")
        self._leave()

    async def _settle(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """The result of `attempt`, made again if others lose its worker, or the Fault."""
        chances = {_LOST: 2 * self._pool.limits.instances_per_worker, _INFRASTRUCTURE: 1}
        chances[_KILLED] = 1  # by the kernel, for what others use of the memory, or by itself
        while self._ended is None:
            try:
                return await attempt()
            except _Failure as failure:
                status = failure.status
                if chances.get(status, 0):
                    chances[status] -= 1
                elif status == _LOST:  # only instances of one program share a worker
                    detail = "its worker went down again and again under others of the program"
                    self._end(Fault(Outcome.WORKER_DIED, detail))
                elif status == _KILLED:
                    self._end(Fault(Outcome.WORKER_DIED, failure.detail))
                else:
                    self._end(Fault(Outcome(status), failure.detail))
            except BaseException:  # cancelled: how far the worker got is not known
                await self.close()
                raise
        return self._ended

    async def _enter(self) -> _Worker:
        """Be in a living worker that has loaded the program."""
        if self._worker is None or self._worker.dead:
            if problem := self._pool._problem(self._program):
                raise _Failure(Outcome.SCHEMA, problem)
            self._leave()
            self._worker = await self._pool._enter_worker(self._program, self._replica)
        worker = self._worker
        answer = await asyncio.shield(worker.loaded)  # shared by all who wait for it
        if answer.status != "ok":
            self._pool._discard(worker)
            raise _Failure(answer.status, answer.value)
        return worker

    async def _build(self) -> _Worker:
        """Be in a living worker, in the state the log ends in."""
        worker = await self._enter()
        if self._opened:
            self._pool._counts["rebuilt"] += 1
        reset_s = self._pool.limits.reset_s
        start = _valid(api.check_reset(await self._request(worker, reset_s, "open", self._seed)))
        if self._opened and start.observation != self.observation:
            raise _diverged("reset")
        self.observation = start.observation
        self._opened = True
        for index, (action, seen) in enumerate(self._log):
            if await self._step_in(worker, action) != seen:
                raise _diverged(f"step {index}")
        return worker

    async def _home(self) -> _Worker:
        if self._worker is None or self._worker.dead:
            return await self._build()
        return self._worker

    async def _step(self, action: str) -> Reply:
        return await self._step_in(await self._home(), action)

    async def _step_in(self, worker: _Worker, action: str) -> Reply:
        return _valid(
            api.check_step(await self._request(worker, self._pool.limits.step_s, "step", action))
        )

    async def _solution(self) -> list[str]:
        worker = await self._home()
        return _valid(
            api.check_solution(await self._request(worker, self._pool.limits.reset_s, "solution"))
        )

    async def _request(
        self, worker: _Worker, limit_s: float, operation: str, *arguments: Any
    ) -> Any:
        if worker.dead:
            raise _Failure(_LOST, "the worker is gone")
        answer = await self._pool._ask(
            worker.link, worker.number, self, limit_s, operation, self._number, *arguments
        )
        if answer.status != "ok":
            raise _Failure(answer.status, answer.value)
        return answer.value

    def _end(self, fault: Fault) -> None:
        if self._ended is None:
            self._ended = fault
            self._pool._faults[fault.outcome] += 1
        self._leave()

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if not worker.dead:
            worker.link.tell(worker.number, self._pool.limits.reset_s, "close", self._number)
        self._pool._leave_worker(worker)


def _valid(checked: Any) -> Any:
    if isinstance(checked, Fault):
        raise _Failure(checked.outcome, checked.detail)
    return checked


def _diverged(where: str) -> _Failure:
    return _Failure(Outcome.ENV_ERROR, f"not deterministic: {where} went otherwise when replayed")
