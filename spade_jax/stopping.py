"""When a run saves, and whether it stops before its end: the one place where signals and the clock
decide something. Neither changes a bit of what the run computes.

SIGTERM, which TPU VMs, Slurm and `kill` send before they take the machine, asks a run to stop; so
does a cloud's notice that it will (`preemption`).
What is saved is the state after a whole step, never half of one. Design and play, which take long,
are given up where they are (`guarded`): a resume does them again, to the same bits. An update has
consumed the state, so it is finished, and its step is completed and saved. Interrupts (SIGINT) are
left as they are: they end the run without a save.

Of several processes one that is asked is enough: it lets the others know, and all stop after the
same step. They agree on it, and on saves that are due by the clock, where all of them ask.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from spade_jax import preemption, processes

logger = logging.getLogger(__name__)

POLL_S = 0.2  # seconds between two looks at whether to stop


class Stopped(Exception):
    """The run was asked to stop, and all that must be saved is."""


class Watch:
    """Knows whether the run is asked to stop and when it saved last."""

    def __init__(
        self, steps: int, minutes: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Save after every so many steps, and after the step in which so many minutes have passed
        since the last save (0: only by steps).
        """
        self._steps, self._minutes, self._clock = steps, minutes, clock
        self._saved_at = clock()
        self._asked = False
        self._at_once = False

    @contextmanager
    def listening(self, preemption_url: str = "") -> Iterator[None]:
        """Take SIGTERM, and notice of a preemption where an address is given that tells of it, as
        the wish to stop while in the block.
        """
        if threading.current_thread() is not threading.main_thread():  # signals are not for it
            yield
            return
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            with preemption.noticed(preemption_url):
                yield
        finally:
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Stop at the signal itself while in the block, where there is nothing to save; several
        processes stop after it, together.
        """
        self._at_once = processes.count() == 1
        try:
            if self._at_once and self._asked:
                raise Stopped
            yield
        except Stopped:
            logger.info("asked to stop while starting: nothing new to save")
            raise
        finally:
            self._at_once = False
        if self.agreed_to_stop():
            raise Stopped

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        processes.ask_to_stop()
        if self._at_once:
            raise Stopped

    def must_stop(self) -> bool:
        """Whether this process is to stop as soon as the run's state is that of a whole step: it
        was asked, or has heard that another one was.
        """
        return self._asked or processes.is_asked_to_stop()

    def agreed_to_stop(self) -> bool:
        """Whether any process must stop; all have to ask together."""
        return processes.agree(self.must_stop())

    def must_save(self, step: int) -> bool:
        """Whether a checkpoint is due after this step; all processes have to ask together."""
        waited = (self._clock() - self._saved_at) / 60
        return (step + 1) % self._steps == 0 or processes.agree(0 < self._minutes <= waited)

    def saved(self) -> None:
        """A save has begun: the minutes count from here."""
        self._saved_at = self._clock()

    async def guarded(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, which is given up when the run must stop.

        Raises:
            Stopped: it was.
        """
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=POLL_S))[0] and not self.must_stop():
                pass
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if not self.must_stop() and task.exception() is not None:
            await asyncio.sleep(POLL_S)  # the signal may have ended what the work needs first
        if self.must_stop():
            raise Stopped
        return task.result()
