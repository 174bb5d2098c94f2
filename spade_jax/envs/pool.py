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
import sys
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from spade_jax.envs import adapters, api
from spade_jax.envs.limits import Limits, Purse
from spade_jax.envs.link import Answer, Link, launch
from spade_jax.envs.pool_stats import PoolStats
from spade_jax.envs.quarantine import Quarantine
from spade_jax.envs.tier import Sandbox
from spade_jax.envs.verdicts import BLAMELESS
from spade_jax.errors import SandboxError
from spade_jax.types import Fault, Outcome, Reply

_LOST = "lost"
_KILLED = "killed"
_INFRASTRUCTURE = str(Outcome.INFRASTRUCTURE)


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
    `package_path` folders where they are looked for first. `weaken` takes walls of the sandbox
    away, for tests: see `confine.prepare`.
    """

    sandbox: Sandbox  # what contains the workers, once started

    def __init__(
        self,
        limits: Limits,
        packages: Sequence[str] = (),
        package_path: Sequence[str] = (),
        *,
        weaken: str = "",
    ) -> None:
        self.limits = limits
        self._packages = frozenset(packages)
        self._package_path = tuple(package_path)
        self._weaken = weaken
        self._link: Link | None = None
        self._open = False
        self._launching = asyncio.Lock()
        self._workers: dict[int, _Worker] = {}  # alive or being loaded, by number
        self._last_number = 0
        self._clock = 0
        self._last_instance = 0
        self._room = asyncio.Event()  # set, and replaced, when a worker may have room
        self._quarantine = Quarantine()
        self._alone: set[str] = set()  # programs whose requests are not sent in batches
        self._memory_bytes = 0
        self._reset_counts()

    def _reset_counts(self) -> None:
        self._counts: Counter[str] = Counter()
        self._faults: Counter[Outcome] = Counter()
        self._programs: set[str] = set()
        self._step_s = array("d")
        self._spawn_s = array("d")
        self._peak_bytes = self._memory_bytes
        self._busy_s = 0.0

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
        await instance.close()
        return outcome if isinstance(outcome, Fault) else None

    async def open(
        self, program: str, seed: int, replica: int = 0, purse: Purse | None = None
    ) -> "Instance | Fault":
        """A new instance of `program`, reset to `seed`, which pays from `purse`.

        `replica` 1 puts it in a worker of the other zygote, where addresses, the order of sets and
        unseeded generators differ. A program in quarantine is not run: the fault says so at once.
        """
        instance = Instance(self, program, seed, replica, purse)
        outcome = await instance._settle(instance._build)
        if isinstance(outcome, Fault):
            return outcome
        self._counts["instances"] += 1
        self._programs.add(instance._digest)
        return instance

    def state(self) -> dict[str, Any]:
        """What a run must keep of the pool: programs in quarantine, and those half way there."""
        return {"offences": self._quarantine.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned."""
        self._quarantine.restore(state["offences"])

    def stats(self) -> PoolStats:
        """Return and reset the counts."""
        if self._link is not None:
            self._busy_s += self._link.take_busy_s()
        counts = PoolStats(
            requests=self._counts["requests"],
            spawned=self._counts["spawned"],
            rebuilt=self._counts["rebuilt"],
            retries=self._counts["retries"],
            faults=dict(self._faults),
            refused=self._counts["refused"],
            programs=frozenset(self._programs),
            instances=self._counts["instances"],
            steps=len(self._step_s),
            step_s=self._step_s,
            spawn_s=self._spawn_s,
            busy_s=self._busy_s,
            peak_bytes=self._peak_bytes,
            workers=len(self._workers),
            quarantined=len(self._quarantine),
        )
        self._reset_counts()
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
                self._link, self.sandbox = await launch(
                    self.limits, self._package_path, self._weaken, self
                )
            return self._link

    async def _enter_worker(self, program: str, digest: str, replica: int) -> _Worker:
        """Take a place in a worker of `program`, waiting for one if all are taken."""
        key = (digest, replica)
        while True:
            link = self._link
            if link is None or not link.alive or not self._open:
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
        self._counts["requests"] += 1
        link.spawn(self._last_number, key[1], adapters.package_of(program))
        loaded = link.ask(self._last_number, None, self.limits.load_s, "load", program)
        loaded.add_done_callback(self._loaded)
        worker = _Worker(self._last_number, key, link, loaded)
        self._workers[worker.number] = worker
        return worker

    def _loaded(self, loaded: asyncio.Future[Answer]) -> None:
        if not loaded.cancelled() and loaded.result().status == "ok":
            self._spawn_s.append(loaded.result().elapsed_s)

    def _discard(self, worker: _Worker) -> None:
        if not worker.dead:
            worker.link.kill(worker.number)
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

    # -- what the link tells

    def on_answers(self, worker: int, owner: Any) -> None:
        if found := self._workers.get(worker):
            found.last_answered = owner

    def on_worn(self, worker: int) -> None:
        if found := self._workers.get(worker):
            found.worn = True
            if not found.occupants:
                self._discard(found)

    def on_down(self, worker: int, status: str, detail: str, *, idle: bool) -> None:
        found = self._workers.get(worker)
        if found is None:
            return
        self._bury(found)
        if status in BLAMELESS:
            return
        fault = Fault(Outcome(status), detail)
        self._quarantine.offend(found.key[0], fault)
        if idle and found.last_answered is not None:
            found.last_answered._end(fault)

    def on_ambiguous(self, worker: int) -> None:
        if found := self._workers.get(worker):
            self._alone.add(found.key[0])

    def on_memory(self, num_bytes: int) -> None:
        self._memory_bytes = num_bytes
        self._peak_bytes = max(self._peak_bytes, num_bytes)

    def on_lost(self, link: Link) -> None:
        self._busy_s += link.take_busy_s()
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

    def __init__(
        self, pool: Pool, program: str, seed: int, replica: int, purse: Purse | None = None
    ) -> None:
        self._pool = pool
        self._program = program
        self._digest = hashlib.sha256(program.encode(errors="surrogatepass")).hexdigest()
        self._seed = seed
        self._replica = replica
        pool._last_instance += 1
        self._number = pool._last_instance
        self._worker: _Worker | None = None
        # What a rebuild replays, and the hashes of what it must see again: replies can be large.
        self._log: list[tuple[str, int]] = []
        self._cpu_s = 0.0  # of the episode, replays left out
        self._purse = purse or Purse()
        self._opened = False
        self._ended = pool._quarantine.refusal(self._digest)
        if self._ended is None:
            pool._quarantine.enter(self._digest)
        else:
            pool._counts["refused"] += 1

    async def step(self, action: str) -> Reply | Fault:
        """Send one action, cut at `api.MAX_ACTION_CHARS`."""
        action = action[: api.MAX_ACTION_CHARS]
        reply = await self._settle(self._step, action)
        if isinstance(reply, Reply):
            self._log.append((action, hash(reply)))
        return reply

    async def solution(self) -> list[str] | Fault:
        """The actions that the program itself says win from here."""
        return await self._settle(self._solution)

    async def close(self) -> None:
        """Give the place up; does not wait for the worker."""
        self._finish(Fault(Outcome.INFRASTRUCTURE, "the instance was closed"))

    async def _settle(self, attempt: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
        """The result of `attempt`, made again if others lose its worker, or the Fault."""
        chances: dict[str, int] | None = None
        while self._ended is None:
            try:
                return await attempt(*arguments)
            except _Failure as failure:
                if chances is None:
                    chances = {_LOST: 2 * self._pool.limits.instances_per_worker}
                    chances[_INFRASTRUCTURE] = 1
                    chances[_KILLED] = 1  # by the kernel, for what others use, or by itself
                status = failure.status
                if chances.get(status, 0):
                    chances[status] -= 1
                    self._pool._counts["retries"] += 1
                elif status == _LOST:  # only instances of one program share a worker
                    detail = "its worker went down again and again under others of the program"
                    self._end(Fault(Outcome.WORKER_DIED, detail))
                elif status == _KILLED:
                    self._end(Fault(Outcome.WORKER_DIED, failure.detail), offence=True)
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
            self._worker = await self._pool._enter_worker(
                self._program, self._digest, self._replica
            )
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
        answer = await self._request(worker, reset_s, "open", self._seed)
        start = _valid(api.check_reset(answer.value))
        if not self._opened:
            self._spend(answer.cpu_s)
            self._keep(start)
        elif start.observation != self.observation:
            raise _diverged("reset")
        self.observation = start.observation
        self._opened = True
        for index, (action, seen) in enumerate(self._log):
            answer = await self._request(worker, self._pool.limits.step_s, "step", action)
            if hash(_valid(api.check_step(answer.value))) != seen:
                raise _diverged(f"step {index}")
        return worker

    async def _home(self) -> _Worker:
        if self._worker is None or self._worker.dead:
            return await self._build()
        return self._worker

    async def _step(self, action: str) -> Reply:
        worker = await self._home()
        answer = await self._request(worker, self._pool.limits.step_s, "step", action)
        reply = _valid(api.check_step(answer.value))
        self._pool._step_s.append(answer.cpu_s)
        self._spend(answer.cpu_s)
        self._keep(reply)
        return reply

    async def _solution(self) -> list[str]:
        worker = await self._home()
        answer = await self._request(worker, self._pool.limits.reset_s, "solution")
        self._spend(answer.cpu_s)
        return _valid(api.check_solution(answer.value))

    async def _request(
        self, worker: _Worker, limit_s: float, operation: str, *arguments: Any
    ) -> Answer:
        if worker.dead:
            raise _Failure(_LOST, "the worker is gone")
        pool = self._pool
        pool._counts["requests"] += 1
        alone = self._digest in pool._alone
        answer = await worker.link.ask(
            worker.number, self, limit_s, operation, self._number, *arguments, alone=alone
        )
        if answer.status != "ok":
            raise _Failure(answer.status, answer.value)
        return answer

    def _spend(self, cpu_s: float) -> None:
        """Count processor time against the limit of the episode, and of all its purse pays for."""
        self._cpu_s += cpu_s
        self._purse.left_s -= cpu_s
        limits, over = self._pool.limits, ""
        if self._cpu_s > limits.episode_s:
            over = f"the episode took more than its {limits.episode_s:g}"
        elif self._purse.left_s < 0:
            over = f"all plays of its trial together took more than their {limits.trial_s:g}"
        if over:
            detail = f"{over} s of processor time"
            self._end(Fault(Outcome.TIMEOUT, detail), offence=True)
            raise _Failure(Outcome.TIMEOUT, detail)

    def _keep(self, reply: Reply) -> None:
        """Count the memory of an observation against what its purse pays for."""
        self._purse.left_bytes -= sys.getsizeof(reply.observation)
        if self._purse.left_bytes < 0:
            raise _Failure(
                Outcome.SCHEMA,
                f"all plays of its trial together showed more than {api.MAX_TRIAL_BYTES >> 20} MiB",
            )

    def _end(self, fault: Fault, *, offence: bool = False) -> None:
        """End in a fault; `offence` if the quarantine has not heard of it when the worker died."""
        if self._ended is None:
            self._pool._faults[fault.outcome] += 1
            if offence:
                self._pool._quarantine.offend(self._digest, fault)
        self._finish(fault)

    def _finish(self, fault: Fault) -> None:
        if self._ended is None:
            self._ended = fault
            self._pool._quarantine.leave(self._digest)
        self._leave()

    def _leave(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if not worker.dead:
            worker.link.tell(worker.number, self._pool.limits.step_s, "close", self._number)
        self._pool._leave_worker(worker)


def _valid(checked: Any) -> Any:
    if isinstance(checked, Fault):
        raise _Failure(checked.outcome, checked.detail)
    return checked


def _diverged(where: str) -> _Failure:
    return _Failure(Outcome.ENV_ERROR, f"not deterministic: {where} went otherwise when replayed")
