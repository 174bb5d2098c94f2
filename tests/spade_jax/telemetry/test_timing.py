"""Seconds add up per phase, a step runs from drain to drain, what was not entered is absent."""

import pytest

from spade_jax.telemetry.metrics import check
from spade_jax.telemetry.timing import Phases


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_start_over():
    clock = Clock()
    phases = Phases(clock)
    with phases("play"):
        clock.now += 2
    clock.now += 1  # outside any phase: only the step sees it
    with phases("update"):
        clock.now += 4
    with phases("play"):
        clock.now += 8
    metrics = phases.drain()
    assert metrics == {"time/play_s": 10.0, "time/update_s": 4.0, "time/step_s": 15.0}
    assert check(metrics) == metrics
    clock.now += 3
    assert phases.drain() == {"time/step_s": 3.0}


def test_phase_that_raises_is_counted():
    clock = Clock()
    phases = Phases(clock)
    with pytest.raises(KeyError), phases("design"):
        clock.now += 5
        raise KeyError
    assert phases.drain()["time/design_s"] == 5.0


@pytest.mark.parametrize("phase", ["paly", "step"])
def test_unknown_phase_is_refused(phase: str):
    with pytest.raises(ValueError, match=phase), Phases()(phase):
        pass


def test_real_clock_moves_forward():
    phases = Phases()
    with phases("play"):
        sum(range(1000))
    metrics = phases.drain()
    assert 0 < metrics["time/play_s"] <= metrics["time/step_s"]
