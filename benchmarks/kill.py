"""Kills a run at random moments, resumes it, and compares what it comes to with a run that was left
alone: weights, optimiser, metrics (but times), episodes, environments, memory and all other state
of the host, bit for bit. Then the same for a run that is told to stop (SIGTERM), and how long it
takes to.

    python benchmarks/kill.py [--kills 50] [--kills-per-run 5] [--stops 3] [--config FILE]

A run is killed (SIGKILL) and resumed up to `--kills-per-run` times and then goes on to its end. The
moments are drawn from the length of the unkilled run, so they fall into starts, designs, plays,
updates and saves; every fourth kill is aimed at a save: it comes as soon as a checkpoint has begun
that is not whole. Runs share their compiled programs. The last line is JSON; exit code 1 if a goal
is missed.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from spade_jax.learner.manifest import FILES, find_damage, step_folders, whole_steps
from spade_jax.telemetry.metrics import repeatable

ROOT = Path(__file__).resolve().parents[1]
_NEWLINE = b"\n"
AIMED = 4  # every so many kills one is aimed at a save
STOP_S = 30
TRIES = 4  # kills that come too late are tried again, so many times as there are to be kills


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-per-run", type=int, default=5)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "micro.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="leave the runs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        return measure(options, options.keep or Path(scratch))


def measure(options: argparse.Namespace, home: Path) -> int:
    """Make the runs in `home` and print what was found."""
    runs = Runs(options.config, home / "compiled")
    runs.play(home / "warm")  # compiles
    shutil.rmtree(home / "warm")
    started = time.monotonic()
    runs.play(home / "alone")
    seconds = time.monotonic() - started
    print(f"the run that is left alone: {seconds:.0f} s", flush=True)
    rng = random.Random(options.seed)
    equal, number, where = 0, 0, collections.Counter[str]()
    for tried in range(TRIES * options.kills):
        if (left := options.kills - sum(where.values())) <= 0:
            break
        folder = home / f"killed_{tried}"
        found: list[str] = []
        for _ in range(min(options.kills_per_run, left)):
            aimed = (number + 1) % AIMED == 0
            moment = runs.kill(folder, None if aimed else rng.uniform(0, seconds))
            if moment is None:  # it came to its end first
                break
            number += 1
            found.append(moment)
        if not (folder / "summary.md").exists():
            runs.play(folder)
        where.update(found)
        different = list(differences(home / "alone", folder))
        equal += 0 if different else len(found)
        print(f"killed {', '.join(found) or 'never'}: {different or 'equal'}", flush=True)
        if not options.keep:
            shutil.rmtree(folder)
    print(dict(where))
    told, stop_s = runs.stops(home / "told", options.stops, rng, seconds)
    different = list(differences(home / "alone", home / "told"))
    print(f"told to stop {', '.join(told)}: {different or 'equal'}", flush=True)
    during = where["during a save"]
    goals = [
        _goal("kills_resumed_to_the_same_bits", equal, options.kills),
        _goal("kills_during_a_save", during, max(1, options.kills // (2 * AIMED))),
        _goal("stops_resumed_to_the_same_bits", 0 if different else len(told), options.stops),
        {"name": "sigterm_to_exit_s", "value": stop_s, "goal": STOP_S, "holds": stop_s <= STOP_S},
    ]
    print(json.dumps({"goals": goals}))
    return int(not all(goal["holds"] for goal in goals))


def _goal(name: str, value: int, goal: int) -> dict[str, Any]:
    return {"name": name, "value": value, "goal": goal, "holds": value >= goal}


class Runs:
    """Runs of one config, in processes of their own."""

    def __init__(self, config: Path, compiled: Path) -> None:
        self._config = config
        kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        self._environment = kept | {
            "PYTHONPATH": str(ROOT),
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }

    def start(self, folder: Path) -> subprocess.Popen[bytes]:
        """Start the run of a folder, or go on with it."""
        command = [sys.executable, "-m", "spade_jax.cli", "train", str(self._config)]
        options = ["--run.dir", str(folder), "--resume-if-any", "--telemetry.no-live"]
        log = folder.with_suffix(".log")
        with log.open("ab") as file:
            return subprocess.Popen(
                [*command, *options], env=self._environment, stdout=file, stderr=file, cwd=ROOT
            )

    def play(self, folder: Path) -> None:
        """Bring a run to its end."""
        if self.start(folder).wait():
            sys.exit(f"a run failed:\n{folder.with_suffix('.log').read_text()[-3000:]}")

    def kill(self, folder: Path, seconds: float | None) -> str | None:
        """Start or resume a run and kill it after so many seconds; None: in its next save. Returns
        where that was, or None if it came to its end before.
        """
        since = time.time()
        process = self.start(folder)
        until = None if seconds is None else time.monotonic() + seconds
        while process.poll() is None:
            if until is None and _saving(folder, since):
                break
            if until is not None and time.monotonic() > until:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            if process.returncode:
                self.play(folder)  # says why
            return None
        if _saving(folder, since):
            return "during a save"
        return _moment(folder)

    def stops(
        self, folder: Path, count: int, rng: random.Random, seconds: float
    ) -> tuple[list[str], float]:
        """Tell one run to stop so many times, and let it go on to its end; when that was, and the
        longest time from the signal to the end of the process.
        """
        told, longest = list[str](), 0.0
        for _ in range(count):
            log = folder.with_suffix(".log")
            said = log.stat().st_size if log.exists() else 0
            process = self.start(folder)
            until = time.monotonic() + rng.uniform(0, seconds / count)
            # before it says something, a process dies of the signal, as any does
            while process.poll() is None and log.stat().st_size == said:
                time.sleep(0.01)
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.01)
            sent = time.monotonic()
            process.send_signal(signal.SIGTERM)
            if process.wait():
                self.play(folder)  # says why
            if (folder / "summary.md").exists():
                break
            longest = max(longest, time.monotonic() - sent)
            told.append(_moment(folder))
        if not (folder / "summary.md").exists():
            self.play(folder)
        return told, round(longest, 2)


def _moment(folder: Path) -> str:
    log = folder / "metrics.jsonl"
    return f"after step {log.read_bytes().count(_NEWLINE) if log.exists() else 0}"


def _saving(folder: Path, since: float) -> bool:
    """Whether a checkpoint has begun that is not whole; what an earlier kill left is older."""
    for path in step_folders(folder / "checkpoints"):
        with contextlib.suppress(FileNotFoundError):
            if not (path / FILES).exists() and os.stat(path).st_ctime > since:
                return True
    return False


def differences(one: Path, other: Path) -> Iterator[str]:
    """In what two runs differ."""
    if _metrics(one) != _metrics(other):
        yield "metrics"
    for kind in ("episodes", "environments", "rejected"):
        if _files(one / kind) != _files(other / kind):
            yield kind
    newest = [
        path / "checkpoints" / str(max(whole_steps(path / "checkpoints"), default=-1))
        for path in (one, other)
    ]
    if newest[0].name != newest[1].name or any(find_damage(folder) for folder in newest):
        yield "the newest checkpoint"
        return
    if len({(folder / "host.json").read_bytes() for folder in newest}) > 1:
        yield "the host's state: memory, environments, pending groups, corpus"
    with warnings.catch_warnings(action="ignore"):  # Orbax asks for shardings, which NumPy lacks
        first, second = (ocp.PyTreeCheckpointer().restore(folder / "state") for folder in newest)
    same = jax.tree.map(
        lambda a, b: np.asarray(a).tobytes() == np.asarray(b).tobytes(), first, second
    )
    if not jax.tree.all(same):
        yield "weights or optimiser"


def _metrics(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if repeatable(k)} for line in lines]


def _files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


if __name__ == "__main__":
    sys.exit(main())
