"""Wall-clock seconds per phase of a step.

Nothing here waits for a device: a phase is timed rightly only if it waits for its own results.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spade_jax.telemetry.metrics import PHASES


class Phases:
    """Adds up the time spent in each phase: `with phases("play"): ...`, then `drain` once a step.

    The phase `step` is measured by itself: from one drain (or the construction) to the next.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._drained = clock()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time spent inside, also when it raises; a phase may repeat within a step."""
        if phase not in PHASES or phase == "step":
            raise ValueError(f"phase {phase!r} is unknown; expected one of {PHASES[:-1]}")
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + self._clock() - start

    def drain(self) -> dict[str, float]:
        """Return `time/<phase>_s` of the phases entered and of the whole step; then start over."""
        now = self._clock()
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self._seconds.items()}
        metrics["time/step_s"] = now - self._drained
        self._seconds, self._drained = {}, now
        return metrics
