"""One plain line a step without a terminal, a table with one; unmeasured values are `-`."""

import io

import pytest
from rich.console import Console

from spade_jax.telemetry.live import LiveView, _duration


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


FULL = {
    "progress/step": 2,
    "agent/return_mean": 0.3125,
    "loss/agent": -0.01234,
    "designer/reward_mean": 0.25,
    "loss/designer": 0.5,
    "designer/admitted_count": 7,
    "designer/attempted_count": 12,
    "designer/learnable_frac": 0.4286,
    "sampler/tokens_per_s": 1234.4,
    "time/play_s": 30.04,
    "time/design_s": 12.5,
    "time/step_s": 50.0,
}


def test_plain_line_shows_every_quantity():
    stream = io.StringIO()
    with LiveView(total_steps=12, enabled=True, console=Console(file=stream)) as view:
        view.status("playing")
        view.show(FULL)
    (line,) = stream.getvalue().splitlines()
    assert line == (
        "step 3/12  agent return 0.312  agent loss -0.0123  "
        "designer reward 0.250  designer loss 0.5000  admitted 7/12  learnable 43%  tokens/s 1234  "
        "seconds design 12.5, play 30.0, step 50.0  ETA 7m30s"
    )


def test_what_was_not_measured_is_a_dash():
    stream = io.StringIO()
    with LiveView(total_steps=12, enabled=False, console=Console(file=stream)) as view:
        view.show({"progress/step": 0, "designer/admitted_count": 7})
    line = stream.getvalue()
    assert "0.0" not in line
    for name in (
        "agent return",
        "agent loss",
        "designer loss",
        "admitted",
        "learnable",
        "tokens/s",
        "seconds",
        "ETA",
    ):
        assert f"{name} -" in line


def test_eta_averages_the_steps_seen():
    stream = io.StringIO()
    with LiveView(total_steps=10, enabled=False, console=Console(file=stream)) as view:
        view.show({"progress/step": 4, "time/step_s": 10.0})
        view.show({"progress/step": 5, "time/step_s": 30.0})
    assert [line.rsplit("ETA ")[1] for line in stream.getvalue().splitlines()] == ["50s", "1m20s"]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")


def test_terminal_gets_a_table_with_the_newest_rows():
    stream = Terminal()
    with LiveView(total_steps=40, enabled=True, console=Console(file=stream)) as view:
        for step in range(20):
            view.show(FULL | {"progress/step": step})
        view.status("designing")
    shown = stream.getvalue()
    last = shown[shown.rindex("ETA") :]
    assert "20/40" in last and "9/40" in last
    assert " 8/40" not in last
    assert "0.312" in last and "7/12" in last and "43%" in last and "done" in last


def test_terminal_with_live_off_gets_plain_lines():
    stream = Terminal()
    with LiveView(total_steps=12, enabled=False, console=Console(file=stream)) as view:
        view.show(FULL)
    assert stream.getvalue().startswith("step 3/12  agent return 0.312")
    assert "\x1b" not in stream.getvalue()


def test_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with LiveView(total_steps=12, enabled=True, console=Console(file=stream)) as view:
        view.show(FULL)
    assert stream.getvalue().startswith("step 3/12  agent return 0.312")


def test_table_is_closed_when_the_run_fails():
    stream = Terminal()
    with (
        pytest.raises(RuntimeError),
        LiveView(total_steps=12, enabled=True, console=Console(file=stream)) as view,
    ):
        view.show(FULL)
        raise RuntimeError
    assert "stopped" in stream.getvalue()
    assert stream.getvalue().count("\x1b[?25l") == stream.getvalue().count(
        "\x1b[?25h"
    )  # cursor is back


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (59.6, "1m00s"), (61, "1m01s"), (3599.7, "1h00m"), (7380, "2h03m")],
)
def test_duration(seconds: float, text: str):
    assert _duration(seconds) == text
