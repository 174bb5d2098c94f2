"""Which steps are traced, and that a trace is really written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from spade_jax.profiling import traced


@pytest.mark.parametrize(
    ("steps", "count", "expected"),
    [
        (range(5), 0, []),
        (range(5), 2, [1, 2]),
        (range(3, 6), 9, [4, 5]),  # resumed: the first step of this process compiles
        (range(4, 5), 2, [4]),
        (range(5, 5), 2, []),
    ],
)
def test_the_steps_after_the_first_are_traced(
    steps: range, count: int, expected: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    events: list[str | int] = []

    @contextmanager
    def trace(folder: str, **_: object) -> Iterator[None]:
        events.append("start")
        yield
        events.append("stop")

    monkeypatch.setattr(jax.profiler, "trace", trace)
    events.extend(traced(steps, count, tmp_path))
    assert [event for event in events if isinstance(event, int)] == list(steps)
    inside = events[events.index("start") + 1 : events.index("stop")] if expected else []
    assert inside == expected
    assert events.count("start") == events.count("stop") == bool(expected)


def test_a_loop_that_breaks_off_ends_its_trace(tmp_path: Path):
    generator = traced(range(4), 3, tmp_path)
    next(generator)
    next(generator)
    jax.block_until_ready(jnp.ones(3) + 1)
    generator.close()
    assert list(tmp_path.rglob("*.xplane.pb"))
    with jax.profiler.trace(str(tmp_path / "next")):  # none is going on
        pass
