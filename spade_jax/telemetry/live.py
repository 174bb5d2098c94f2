"""What is shown while a run goes on: a live table in a terminal, else one plain line a step.

A value that was not measured is `-`. The table holds the newest steps, `metrics.jsonl` all of them.
"""

from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from spade_jax.telemetry.metrics import PHASES

_ROWS = 12
_PLAIN = (
    "step",
    "agent return",
    "agent loss",
    "designer reward",
    "designer loss",
    "admitted",
    "learnable",
    "tokens/s",
    "seconds",
)
_HEADERS = {  # short enough for a terminal of 80 columns
    "step": "step",
    "agent return": "agent\nreturn",
    "agent loss": "agent\nloss",
    "designer reward": "designer\nreward",
    "designer loss": "designer\nloss",
    "admitted": "admitted",
    "learnable": "learn-\nable",
    "tokens/s": "tokens\n/s",
    "brief seconds": "design/play/\nupdate/save/\nstep s",
}


class LiveView:
    """Shows the steps of a run: `with LiveView(...) as view: view.show(metrics)` once a step."""

    def __init__(self, total_steps: int, enabled: bool, console: Console | None = None) -> None:
        self._console = console or Console()
        self._total_steps = total_steps
        self._rows: deque[dict[str, str]] = deque(maxlen=_ROWS)
        self._step_seconds: list[float] = []
        self._status = "starting"
        self._eta = "-"
        self._live = None
        if enabled and self._console.file.isatty() and not self._console.is_dumb_terminal:
            self._live = Live(self._table(), console=self._console)

    def __enter__(self) -> "LiveView":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._status = "stopped" if kind else "done"
            self._live.update(self._table())
            self._live.stop()

    def status(self, text: str) -> None:
        """Say in the table's caption what is being done now; plain output has no such place."""
        self._status = text
        if self._live:
            self._live.update(self._table())

    def show(self, metrics: Mapping[str, float]) -> None:
        """Add one finished step, given its logged metrics."""
        step = int(metrics["progress/step"])
        if "time/step_s" in metrics:
            self._step_seconds.append(metrics["time/step_s"])
            remaining = self._total_steps - step - 1
            mean_s = sum(self._step_seconds) / len(self._step_seconds)
            self._eta = _duration(remaining * mean_s)
        cells = _cells(metrics, self._total_steps)
        self._rows.append(cells)
        if self._live:
            self._live.update(self._table())
        else:
            line = "  ".join(f"{name} {cells[name]}" for name in _PLAIN)
            self._console.print(
                f"{line}  ETA {self._eta}", markup=False, highlight=False, soft_wrap=True
            )

    def _table(self) -> Table:
        title = f"SPADE, {self._total_steps} steps, ETA {self._eta}"
        table = Table(title=title, caption=self._status, box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for header in _HEADERS.values():
            table.add_column(header, justify="right")
        for row in self._rows:
            table.add_row(*(row[name] for name in _HEADERS))
        return table


def _cells(metrics: Mapping[str, float], total_steps: int) -> dict[str, str]:
    """Return the text of every column."""

    def number(name: str, form: str) -> str:
        return format(metrics[name], form) if name in metrics else "-"

    admitted = number("designer/admitted_count", ".0f")
    attempted = number("designer/attempted_count", ".0f")
    measured = [phase for phase in PHASES if f"time/{phase}_s" in metrics]
    seconds = [f"{phase} {metrics[f'time/{phase}_s']:.1f}" for phase in measured]
    return {
        "step": f"{int(metrics['progress/step']) + 1}/{total_steps}",
        "agent return": number("agent/return_mean", ".3f"),
        "agent loss": number("loss/agent", ".4f"),
        "designer reward": number("designer/reward_mean", ".3f"),
        "designer loss": number("loss/designer", ".4f"),
        "admitted": "-" if "-" in (admitted, attempted) else f"{admitted}/{attempted}",
        "learnable": number("designer/learnable_frac", ".0%"),
        "tokens/s": number("sampler/tokens_per_s", ".0f"),
        "seconds": ", ".join(seconds) or "-",
        "brief seconds": "/".join(number(f"time/{phase}_s", ".0f") for phase in PHASES),
    }


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
