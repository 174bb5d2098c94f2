"""What tests of whole runs share: starting one of `configs/micro.py`, and comparing two."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from helpers import untimed
from spade_jax.learner.manifest import whole_steps

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 600


def command(folder, *options):
    return [
        sys.executable,
        "-m",
        "spade_jax.cli",
        "train",
        str(ROOT / "configs" / "micro.py"),
        "--run.dir",
        str(folder),
        *options,
    ]


def run(folder, environment, *options):
    done = subprocess.run(
        command(folder, *options),
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def episodes(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "episodes").glob("*.jsonl"))}


def checkpoint(folder):
    """Every array and the whole host state of the newest checkpoint."""
    steps = whole_steps(folder / "checkpoints")
    newest = folder / "checkpoints" / str(max(steps))
    with warnings.catch_warnings(action="ignore"):  # Orbax asks for shardings, which NumPy lacks
        arrays = ocp.PyTreeCheckpointer().restore(newest / "state")
    host = json.loads((newest / "host.json").read_text())
    return max(steps), jax.tree.map(np.asarray, arrays), host


def assert_same_run(folder, other):
    assert [untimed(line) for line in metrics(folder)] == [untimed(line) for line in metrics(other)]
    assert episodes(folder) == episodes(other)
    (step, arrays, host), (other_step, other_arrays, other_host) = map(checkpoint, (folder, other))
    assert step == other_step and host == other_host
    assert len(jax.tree.leaves(arrays)) > 100
    assert jax.tree.all(jax.tree.map(np.array_equal, arrays, other_arrays))
